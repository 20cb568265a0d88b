"""`linear` in Triton: a matrix product whose rows do not see one another, with a norm before and an epilogue after."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from metrale.kernels.groups import check_generated
from metrale.kernels.launch import IS_INTERPRETED, ceil_div, check, describe, is_hip, kernel, launch
from metrale.kernels.products import dot


class Tile(NamedTuple):
    """Rows, outputs and inner elements of a program's tile, its warps and pipeline stages."""

    rows: int
    outputs: int
    inner: int
    num_warps: int
    num_stages: int


def tile_of(num_outputs: int, dtype: torch.dtype, is_prompt: bool) -> Tile:
    """A function of the weight's outputs and dtype, the row class and the backend alone."""
    is_wide = dtype is torch.float32
    if is_prompt:
        tile = Tile(64, 32, 16, 4, 3) if is_wide else Tile(64, 128, 64, 8, 3)
    elif num_outputs >= 8192:
        tile = Tile(16, 64, 32, 4, 3) if is_wide else Tile(16, 64, 128, 4, 4)
    else:
        tile = Tile(16, 32, 64, 4, 3) if is_wide else Tile(16, 32, 256, 4, 4)
    # 64 KiB of shared memory hold two stages of the largest tile
    return tile._replace(num_stages=2) if is_hip() else tile


@kernel(sizes=["first_row", "num_rows"])
def _linear_kernel(
    x_ptr,
    weight_ptr,
    norm_ptr,
    residual_ptr,
    out_ptr,
    first_row,
    num_rows,
    eps,
    NUM_OUTPUTS: tl.constexpr,  # of the result: half of the weight's rows with SILU_MUL
    INNER: tl.constexpr,
    NORM_GROUPS: tl.constexpr,  # 0: no norm
    HAS_RESIDUAL: tl.constexpr,
    SILU_MUL: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    offs_t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_t = offs_t < num_rows
    mask_n = offs_n < NUM_OUTPUTS
    offs_k = tl.arange(0, BLOCK_K)
    rows = (first_row + offs_t).to(tl.int64)
    p_x = x_ptr + rows[:, None] * INNER
    p_w = weight_ptr + offs_n.to(tl.int64)[None, :] * INNER
    part: tl.constexpr = INNER // NORM_GROUPS if NORM_GROUPS > 0 else INNER
    out = tl.zeros((BLOCK_T, BLOCK_N), dtype=tl.float32)
    up = tl.zeros((BLOCK_T, BLOCK_N), dtype=tl.float32)
    for i_part in range(NORM_GROUPS if NORM_GROUPS > 0 else 1):
        acc = tl.zeros((BLOCK_T, BLOCK_N), dtype=tl.float32)
        acc_up = tl.zeros((BLOCK_T, BLOCK_N), dtype=tl.float32)
        squares = tl.zeros((BLOCK_T,), dtype=tl.float32)
        for i_k in range(0, part, BLOCK_K):
            at = i_part * part + i_k + offs_k
            mask_k = i_k + offs_k < part
            x = tl.load(p_x + at[None, :], mask=mask_t[:, None] & mask_k[None, :], other=0.0)
            mask_w = mask_k[:, None] & mask_n[None, :]
            w = tl.load(p_w + at[:, None], mask=mask_w, other=0.0)
            if NORM_GROUPS > 0:
                wide = x.to(tl.float32)
                squares += tl.sum(wide * wide, axis=1)
                scale = tl.load(norm_ptr + at, mask=mask_k, other=0.0)
                x = (wide * scale[None, :]).to(w.dtype)
            acc = dot(x, w, acc, IS_INTERPRETED)
            if SILU_MUL:
                w_up = tl.load(p_w + NUM_OUTPUTS * INNER + at[:, None], mask=mask_w, other=0.0)
                acc_up = dot(x, w_up, acc_up, IS_INTERPRETED)
        if NORM_GROUPS > 0:
            inverse = 1.0 / tl.sqrt(squares / part + eps)
            acc = acc * inverse[:, None]
            acc_up = acc_up * inverse[:, None]
        out += acc
        up += acc_up
    if SILU_MUL:
        out = out / (1.0 + tl.exp(-out)) * up
    at_out = rows[:, None] * NUM_OUTPUTS + offs_n[None, :]
    mask = mask_t[:, None] & mask_n[None, :]
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + at_out, mask=mask, other=0.0).to(tl.float32)
        out = residual + out.to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + at_out, out.to(out_ptr.dtype.element_ty), mask=mask)


def linear(
    x: Tensor,
    weight: Tensor,
    num_generated: int,
    residual: Tensor | None = None,
    silu_mul: bool = False,
    norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """y = norm(x) W^T, plus an optional epilogue: one launch a row class.

    | tensor | shape | dtype | dir | meaning |
    | --- | --- | --- | --- | --- |
    | x | [T, K] | float32, bfloat16 | in | rows, generated rows first |
    | weight | [N, K] | as x | in | with `silu_mul` [2 I, K]: gate rows, then up rows |
    | residual | [T, N] | as x | in | added to the rounded product |
    | norm | [K] or [G, K / G] | float32 | in | RMSNorm scales, one norm for each of a row's G parts, with `eps` |
    | result | [T, N] or [T, I] | as x | out | |

    Accumulates in float32, over the inner dimension in ascending order; float32 products are full float32. With `norm` the
    scaled row is rounded to the dtype of x, and 1 / sqrt(mean(x^2) + eps) multiplies the sum, so that x is read once.
    The tile, and with it every bit of a row, follows from the weight's shape, the dtype and the row class (`tile_of`). The
    weight is read once for every 16 generated rows.

    Requires: contiguous 16-byte aligned tensors; no residual with `silu_mul`.
    """
    check("linear", "x", x, (None, None), torch.float32, torch.bfloat16)
    num_rows, inner = x.shape
    check("linear", "weight", weight, (None, inner), x.dtype)
    num_outputs = weight.shape[0] // 2 if silu_mul else weight.shape[0]
    check_generated("linear", num_generated, num_rows)
    if silu_mul and (weight.shape[0] % 2 or residual is not None):
        raise ValueError(
            f"linear: silu_mul: expected an even number of outputs and no residual, got {describe(weight)}"
        )
    if residual is not None:
        check("linear", "residual", residual, (num_rows, num_outputs), x.dtype)
    norm_groups = 0
    if norm is not None:
        norm_groups = norm.shape[0] if norm.ndim == 2 else 1
        parts = (norm_groups, inner // max(norm_groups, 1)) if norm.ndim == 2 else (inner,)
        check("linear", "norm", norm, parts, torch.float32)
        if math.prod(parts) != inner:
            raise ValueError(f"linear: norm: expected parts of {inner} columns, got {describe(norm)}")
    out = x.new_empty(num_rows, num_outputs)
    for first, last, is_prompt in ((0, num_generated, False), (num_generated, num_rows, True)):
        tile = tile_of(num_outputs, x.dtype, is_prompt)
        launch(
            _linear_kernel,
            (ceil_div(num_outputs, tile.outputs), ceil_div(last - first, tile.rows)),
            x,
            weight,
            x if norm is None else norm,
            x if residual is None else residual,
            out,
            first,
            last - first,
            eps,
            NUM_OUTPUTS=num_outputs,
            INNER=inner,
            NORM_GROUPS=norm_groups,
            HAS_RESIDUAL=residual is not None,
            SILU_MUL=silu_mul,
            BLOCK_T=tile.rows,
            BLOCK_N=tile.outputs,
            BLOCK_K=tile.inner,
            IS_INTERPRETED=IS_INTERPRETED,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            enable_fp_fusion=True,
        )
    return out
