"""`masked_argmax` and `gumbel` as C kernels."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from metrale.native.build import Kernel
from metrale.native.checks import describe, new_rows, refuse

WORD = 0xFFFFFFFF
SEED_WORD = 0xFFFFFFFFFFFFFFFF

_masked_argmax = Kernel("masked_argmax", "qqqqq")
_gumbel = Kernel("gumbel", "qqqq")


def masked_argmax(logits: Tensor, num_valid: int) -> Tensor:
    """The highest-scoring id of each row, the lowest id on a tie.

    | tensor | shape | dtype | dir | meaning |
    | --- | --- | --- | --- | --- |
    | logits | [M, V] | float32 | in | the row stride may exceed V |
    | num_valid | int | | in | ids at and past it do not exist (padded columns) |
    | result | [M] | int64 | out | in [0, num_valid), or -1 where a valid id is NaN or all are -inf |

    Requires: 1 <= num_valid <= V.
    """
    num_rows, width = logits.shape
    row_stride, step = logits.stride()
    if not 1 <= num_valid <= width:
        raise refuse("masked_argmax", "num_valid", f"1 to {width}", num_valid)
    if logits.dtype is not torch.float32 or (step != 1 and width != 1):
        raise refuse("masked_argmax", "logits", "float32 with contiguous rows", describe(logits))
    out = torch.empty(num_rows, dtype=torch.int64, device="cpu")
    arguments = _masked_argmax.pack(logits.data_ptr(), num_rows, row_stride, num_valid, out.data_ptr())
    if status := _masked_argmax.run(arguments):
        raise _masked_argmax.fail(status)
    return out


def gumbel(seeds: Sequence[tuple[int, int, int]], num_ids: int, device: torch.device | None = None) -> Tensor:
    """Standard Gumbel noise, float32 [M, num_ids], for M rows named by (seed, sample, position).

    Philox4x32-10 with key = the seed's low and high 32 bits and counter = (id // 4, position, sample, 0); id takes
    word id % 4. A word x gives u = (x + 1/2) 2^-32, at most 1 - 2^-24, and noise = -log(-log1p(-u)): u is finest near
    0, which is the Gumbel tail that decides a pick. The words are exact; the noise is within a few ulp of the
    reference's, whose logarithms are others.

    Requires: num_ids >= 0; `device` is a CPU.
    Source: Salmon et al. 2011, Parallel random numbers: as easy as 1, 2, 3.
    """
    if num_ids < 0:
        raise refuse("gumbel", "num_ids", "at least 0", num_ids)
    if device is not None and device.type != "cpu":
        raise refuse("gumbel", "device", "a CPU", device)
    streams = array("Q")
    for seed, sample, position in seeds:
        streams.extend((seed & SEED_WORD, sample & WORD, position & WORD))
    out = new_rows(len(seeds), num_ids)
    if status := _gumbel.run(_gumbel.pack(streams.buffer_info()[0], len(seeds), num_ids, out.data_ptr())):
        raise _gumbel.fail(status)
    return out
