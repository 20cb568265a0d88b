"""`state_copy` in Triton: checkpoint, restore and fork of slots."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor

from metrale.kernels.groups import check_slots, index_tensors
from metrale.kernels.launch import ceil_div, check, kernel, launch

BLOCK_BYTES = 16384
NUM_WARPS = 4


@kernel(sizes=["num_slots", "num_slots_out"], indices=["slots_ptr"])
def _state_copy_kernel(
    source_ptr,
    destination_ptr,
    slots_ptr,  # [M, 2]: from, to
    num_slots,
    num_slots_out,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    layer = tl.program_id(2).to(tl.int64)
    slot = tl.load(slots_ptr + 2 * tl.program_id(1)).to(tl.int64)
    slot_out = tl.load(slots_ptr + 2 * tl.program_id(1) + 1).to(tl.int64)
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < SIZE
    x = tl.load(source_ptr + (layer * num_slots + slot) * SIZE + offs, mask=mask, other=0)
    tl.store(destination_ptr + (layer * num_slots_out + slot_out) * SIZE + offs, x, mask=mask)


def state_copy(
    source: Tensor, destination: Tensor, from_slots: Sequence[int], to_slots: Sequence[int]
) -> None:
    """Copy slot `from_slots[i]` of every layer of `source` to slot `to_slots[i]` of `destination`.

    | tensor | shape | dtype | dir | meaning |
    | --- | --- | --- | --- | --- |
    | source | [L, S, ...] | float32, bfloat16, int32 | in | one state tensor of all layers |
    | destination | [L, S', ...] | as source | inout | the same tensor, a checkpoint or host memory |
    | from_slots, to_slots | M integers each | | in | |

    Slots that are consecutive on both sides are one strided copy, and so is each run of them where the two tensors lie on
    different devices (asynchronous for pinned host memory); other slots are one launch. Checkpoint, restore and fork are
    this copy of each state tensor of folded slots (nothing pending).

    Requires: contiguous 16-byte aligned tensors; slots in range; no slot twice in `to_slots`; none of them among
    `from_slots` where both are one tensor.
    """
    check_slots(source, destination, from_slots, to_slots)
    for name, tensor in (("source", source), ("destination", destination)):
        check("state_copy", name, tensor, (None,) * source.ndim, torch.float32, torch.bfloat16, torch.int32)
    runs = _runs(from_slots, to_slots)
    if len(runs) < 2 or source.device != destination.device:
        for i, j, length in runs:
            destination[:, j : j + length].copy_(source[:, i : i + length], non_blocking=True)
        return
    pairs = [slot for pair in zip(from_slots, to_slots, strict=True) for slot in pair]
    (slots,) = index_tensors(pairs, (len(pairs),), torch.int32, source.device)
    size = math.prod(source.shape[2:])
    block = BLOCK_BYTES // source.element_size()
    launch(
        _state_copy_kernel,
        (ceil_div(size, block), len(from_slots), source.shape[0]),
        source.view(*source.shape[:2], size),
        destination.view(*destination.shape[:2], size),
        slots,
        source.shape[1],
        destination.shape[1],
        SIZE=size,
        BLOCK=block,
        is_aligned=size * source.element_size() % 16 == 0,
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,
    )


def _runs(from_slots: Sequence[int], to_slots: Sequence[int]) -> list[tuple[int, int, int]]:
    """(from, to, length) of maximal runs of slots that are consecutive on both sides."""
    runs: list[tuple[int, int, int]] = []
    for i, j in zip(from_slots, to_slots, strict=True):
        if runs and (i, j) == (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]):
            runs[-1] = (*runs[-1][:2], runs[-1][2] + 1)
        else:
            runs.append((i, j, 1))
    return runs
