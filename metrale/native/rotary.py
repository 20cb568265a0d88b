"""`rotary_store` as a C kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from metrale.native.build import Kernel
from metrale.native.checks import describe, new_rows, refuse, refuse_tensors

_kernel = Kernel("rotary_store", "q" * 16 + "dq")


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
    """Normalise and rotate queries and keys, store keys and values in their pages.

    | tensor | shape | dtype | dir | meaning |
    | --- | --- | --- | --- | --- |
    | projected | [T, 2 H dh + 2 Hkv dh] | float32 | in | per head query then gate; all keys; all values |
    | q_norm, k_norm | [dh] | float32 | in | RMSNorm scales, 1 + w |
    | cos, sin | [positions, rot / 2] | float32 | in | rotary table; the first `rot` of dh dimensions turn |
    | positions | [T] | int64 | in | absolute position of each row |
    | kv_index | [T] | int64 | in | page * P + offset of each row |
    | k_cache, v_cache | [pages, P, Hkv, dh] | float32 | inout | one layer's pages |
    | result | [T, H, dh] | float32 | out | queries |

    Requires: contiguous tensors, positions inside the table and kv_index inside the cache; rot <= dh.
    Source: Su et al. 2021, RoFormer (the rotate-half form); Henry et al. 2020 for query-key normalisation.
    """
    num_rows, width = projected.shape
    num_pages, page_size, num_kv_heads, dim = k_cache.shape
    num_positions, half = cos.shape
    num_heads = width // (2 * dim) - num_kv_heads
    if (
        width != 2 * dim * (num_heads + num_kv_heads)
        or num_heads < 1
        or q_norm.shape != (dim,)
        or k_norm.shape != (dim,)
        or 2 * half > dim
        or sin.shape != (num_positions, half)
        or v_cache.shape != k_cache.shape
        or not (projected.dtype is q_norm.dtype is k_norm.dtype is cos.dtype is sin.dtype is torch.float32)
        or not (k_cache.dtype is v_cache.dtype is torch.float32)
        or not (projected.is_contiguous() and q_norm.is_contiguous() and k_norm.is_contiguous())
        or not (cos.is_contiguous() and sin.is_contiguous())
        or not (k_cache.is_contiguous() and v_cache.is_contiguous())
    ):
        raise refuse_tensors(
            "rotary_store",
            projected=projected,
            q_norm=q_norm,
            k_norm=k_norm,
            cos=cos,
            sin=sin,
            k_cache=k_cache,
            v_cache=v_cache,
        )
    for index in (positions, kv_index):
        if index.shape != (num_rows,) or index.dtype is not torch.int64 or not index.is_contiguous():
            raise refuse(
                "rotary_store", "positions and kv_index", f"contiguous int64 [{num_rows}]", describe(index)
            )
    q = new_rows(num_rows, num_heads, dim)
    arguments = _kernel.pack(
        projected.data_ptr(),
        num_rows,
        num_heads,
        num_kv_heads,
        dim,
        half,
        q_norm.data_ptr(),
        k_norm.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        num_positions,
        positions.data_ptr(),
        kv_index.data_ptr(),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        num_pages * page_size,
        eps,
        q.data_ptr(),
    )
    if status := _kernel.run(arguments):
        raise _kernel.fail(status)
    return q
