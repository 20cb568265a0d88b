"""`rotary_store` in Triton: query and key norms, rotation, and the store into pages, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from metrale.kernels.launch import check, describe, kernel, launch, next_power_of_2, only_if, shape_of

NUM_WARPS = 1


@triton.jit
def _scale(q_norm_ptr, k_norm_ptr, offs, mask, is_query):
    of_query = tl.load(q_norm_ptr + offs, mask=only_if(is_query, mask), other=0.0)
    return of_query + tl.load(k_norm_ptr + offs, mask=only_if(is_query == 0, mask), other=0.0)


@kernel(indices=["positions_ptr", "kv_index_ptr"])
def _rotary_store_kernel(
    projected_ptr,
    q_norm_ptr,
    k_norm_ptr,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    kv_index_ptr,
    k_cache_ptr,
    v_cache_ptr,
    q_ptr,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,  # of the dimensions that turn
    BLOCK: tl.constexpr,
):
    # heads in the order of the columns: queries, keys, values
    i_head = tl.program_id(1)
    row = tl.program_id(0).to(tl.int64)
    is_query = i_head < NUM_HEADS
    is_value = i_head >= NUM_HEADS + NUM_KV_HEADS
    offs = tl.arange(0, BLOCK)
    mask = offs < DIM
    columns = 2 * DIM * (NUM_HEADS + NUM_KV_HEADS)
    first = tl.where(is_query, 2 * DIM * i_head, 2 * DIM * NUM_HEADS + DIM * (i_head - NUM_HEADS))
    p_x = projected_ptr + row * columns + first
    x = tl.load(p_x + offs, mask=mask, other=0.0)
    if is_value:
        i_kv = i_head - NUM_HEADS - NUM_KV_HEADS
        at = tl.load(kv_index_ptr + row)
        tl.store(v_cache_ptr + (at * NUM_KV_HEADS + i_kv) * DIM + offs, x, mask=mask)
    else:
        dtype = q_ptr.dtype.element_ty
        position = tl.load(positions_ptr + row)
        wide = x.to(tl.float32)
        inverse = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / DIM + eps)
        normed = (
            (wide * inverse * _scale(q_norm_ptr, k_norm_ptr, offs, mask, is_query)).to(dtype).to(tl.float32)
        )
        # the other half of a turning pair, read again: a register shuffle costs more
        is_first = offs < HALF
        is_turning = offs < 2 * HALF
        partner = tl.where(is_first, offs + HALF, offs - HALF)
        other = tl.load(p_x + partner, mask=is_turning, other=0.0).to(tl.float32)
        other = (
            (other * inverse * _scale(q_norm_ptr, k_norm_ptr, partner, is_turning, is_query))
            .to(dtype)
            .to(tl.float32)
        )
        pair = tl.where(is_first, offs, offs - HALF)
        cos = tl.load(cos_ptr + position * HALF + pair, mask=is_turning, other=1.0)
        sin = tl.load(sin_ptr + position * HALF + pair, mask=is_turning, other=0.0)
        turned = normed * cos + tl.where(is_first, -other, other) * sin
        out = tl.where(is_turning, turned, normed).to(dtype)
        if is_query:
            tl.store(q_ptr + (row * NUM_HEADS + i_head) * DIM + offs, out, mask=mask)
        else:
            at = tl.load(kv_index_ptr + row)
            tl.store(k_cache_ptr + (at * NUM_KV_HEADS + i_head - NUM_HEADS) * DIM + offs, out, mask=mask)


def rotary_store(
    projected: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    kv_index: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    eps: float,
) -> Tensor:
    """Normalise and rotate queries and keys, store keys and values in their pages: one launch.

    | tensor | shape | dtype | dir | meaning |
    | --- | --- | --- | --- | --- |
    | projected | [T, 2 H dh + 2 Hkv dh] | float32, bfloat16 | in | per head query then gate; all keys; all values |
    | q_norm, k_norm | [dh] | float32 | in | RMSNorm scales, 1 + w |
    | cos, sin | [positions, rot / 2] | float32 | in | rotary table; the first `rot` of dh dimensions turn |
    | positions | [T] | int64 | in | absolute position of each row |
    | kv_index | [T] | int64 | in | page * P + offset of each row |
    | k_cache, v_cache | [pages, P, Hkv, dh] | as projected | inout | one layer's pages |
    | result | [T, H, dh] | as projected | out | queries |

    One program a row and head. The normed value is rounded to the activation dtype before it turns.

    Requires: contiguous 16-byte aligned tensors; rot <= dh; positions within the table, indices within the pages.
    Source: Su et al. 2021, RoFormer (arXiv:2104.09864, the rotate-half form); Henry et al. 2020 (arXiv:2010.04245) for
    query-key normalisation.
    """
    num_rows, columns = shape_of("rotary_store", "projected", projected, 2)
    _, _, num_kv_heads, dim = shape_of("rotary_store", "k_cache", k_cache, 4)
    _, half = shape_of("rotary_store", "cos", cos, 2)
    num_heads = columns // (2 * dim) - num_kv_heads
    kinds, f32 = (projected.dtype,), (torch.float32,)
    check("rotary_store", "projected", projected, (None, None), torch.float32, torch.bfloat16)
    if num_heads < 1 or columns != 2 * dim * (num_heads + num_kv_heads) or 2 * half > dim:
        raise ValueError(
            f"rotary_store: projected: expected 2 x {dim} columns for every head, got {describe(projected)}"
        )
    for name, tensor, shape, dtypes in (
        ("q_norm", q_norm, (dim,), f32),
        ("k_norm", k_norm, (dim,), f32),
        ("cos", cos, (None, half), f32),
        ("sin", sin, (None, half), f32),
        ("k_cache", k_cache, (None, None, num_kv_heads, dim), kinds),
        ("v_cache", v_cache, (*k_cache.shape,), kinds),
    ):
        check("rotary_store", name, tensor, shape, *dtypes)
    for name, tensor in (("positions", positions), ("kv_index", kv_index)):
        if tensor.shape != (num_rows,) or tensor.dtype is not torch.int64:
            raise ValueError(f"rotary_store: {name}: expected int64 [{num_rows}], got {describe(tensor)}")
    q = projected.new_empty(num_rows, num_heads, dim)
    launch(
        _rotary_store_kernel,
        (num_rows, num_heads + 2 * num_kv_heads),
        projected,
        q_norm,
        k_norm,
        cos,
        sin,
        positions,
        kv_index,
        k_cache,
        v_cache,
        q,
        eps,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        DIM=dim,
        HALF=half,
        BLOCK=next_power_of_2(dim),
        num_warps=NUM_WARPS,
        enable_fp_fusion=True,
    )
    return q
