"""`accept` in Triton: the verdict on every row group of a verify, without the host."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from metrale.kernels.groups import Groups
from metrale.kernels.launch import describe, kernel, launch

MAX_ROWS = 32
"""Rows of a group that a program compares at once: an anchor and up to 16 drafts, padded."""


@kernel(indices=["token_ids_ptr", "picks_ptr", "cu_rows_ptr"])
def _accept_kernel(token_ids_ptr, picks_ptr, cu_rows_ptr, out_ptr, BLOCK: tl.constexpr):
    i_group = tl.program_id(0).to(tl.int64)
    first_row = tl.load(cu_rows_ptr + i_group).to(tl.int64)
    num_drafts = tl.load(cu_rows_ptr + i_group + 1) - first_row.to(tl.int32) - 1
    offs = tl.arange(0, BLOCK)
    mask = offs < num_drafts
    drafts = tl.load(token_ids_ptr + first_row + 1 + offs, mask=mask, other=-1)
    picks = tl.load(picks_ptr + first_row + offs, mask=mask, other=-1)
    is_wrong = mask & ((drafts != picks) | (picks < 0))
    num_accepted = tl.min(tl.where(is_wrong, offs, num_drafts), axis=0)
    tl.store(out_ptr + 2 * i_group, num_accepted.to(tl.int64))
    tl.store(out_ptr + 2 * i_group + 1, tl.load(picks_ptr + first_row + num_accepted))


def accept(token_ids: Tensor, picks: Tensor, groups: Groups) -> Tensor:
    """How many drafts of each group equal the target's picks, and the token that follows them: one launch.

    | tensor | shape | dtype | dir | meaning |
    | --- | --- | --- | --- | --- |
    | token_ids | [T] | int64 | in | token fed in each row: a group's anchor, then its drafts |
    | picks | [T] | int64 | in | the target's pick after each row, -1 where there is none |
    | groups | | | in | the row groups, every one of 1 to MAX_ROWS rows |
    | result | [N, 2] | int64 | out | (accepted drafts, next token); the token is -1 where the row has no pick |

    Row i + 1 of a group is accepted when it equals the pick after row i and all before it were. The verdict is all that is
    written: nothing advances until the host has cut it at stops.

    Requires: contiguous tensors; no empty group. Source: Leviathan et al. 2022 (arXiv:2211.17192), for picks that are
    fixed by their seed.
    """
    for name, tensor in (("token_ids", token_ids), ("picks", picks)):
        if tensor.shape != (groups.num_rows,) or tensor.dtype is not torch.int64:
            raise ValueError(f"accept: {name}: expected int64 [{groups.num_rows}], got {describe(tensor)}")
        if not tensor.is_contiguous():
            raise ValueError(f"accept: {name}: expected contiguous rows, got {describe(tensor)}")
    for group in groups.host:
        if not 1 <= group.num_rows <= MAX_ROWS:
            raise ValueError(
                f"accept: groups: expected 1 to {MAX_ROWS} rows, slot {group.slot} has {group.num_rows}"
            )
    out = token_ids.new_empty(groups.num_groups, 2)
    launch(
        _accept_kernel,
        (groups.num_groups,),
        token_ids,
        picks,
        groups.cu_rows,
        out,
        BLOCK=MAX_ROWS,
        num_warps=1,
        enable_fp_fusion=False,
    )
    return out
