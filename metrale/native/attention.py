"""`attention_verify` and `attention_prefill` as one C kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from metrale.kernels.groups import Groups
from metrale.native.build import Kernel
from metrale.native.checks import describe, group_words, new_rows, refuse, refuse_tensors

_kernel = Kernel("attention", "q" * 17)


def attention_verify(
    q: Tensor, projected: Tensor, k_cache: Tensor, v_cache: Tensor, groups: Groups
) -> Tensor:
    """Attention of generated rows over their sequence's pages, times the sigmoid of the gate.

    | tensor | shape | dtype | dir | meaning |
    | --- | --- | --- | --- | --- |
    | q | [T, H, dh] | float32 | in | from `rotary_store` |
    | projected | [T, 2 H dh + 2 Hkv dh] | float32 | in | its gates |
    | k_cache, v_cache | [pages, P, Hkv, dh] | float32 | in | one layer's pages, this step's rows stored |
    | groups | | | in | row i of a group stands at start + i and sees positions 0 .. start + i |
    | result | [T, H dh] | float32 | out | |

    Keys are walked in blocks of 64 from position 0 with an online softmax; scores are scaled by dh^-1/2.

    Requires: contiguous tensors; pages of every position up to a group's last row.
    Source: Milakov and Gimelshein 2018, Online normalizer calculation for softmax.
    """
    return _attend("attention_verify", q, projected, k_cache, v_cache, groups)


def attention_prefill(
    q: Tensor, projected: Tensor, k_cache: Tensor, v_cache: Tensor, groups: Groups
) -> Tensor:
    """`attention_verify` for prompt rows: the same contract and, on this backend, the same arithmetic."""
    return _attend("attention_prefill", q, projected, k_cache, v_cache, groups)


def _attend(
    operator: str, q: Tensor, projected: Tensor, k_cache: Tensor, v_cache: Tensor, groups: Groups
) -> Tensor:
    num_rows, num_heads, dim = q.shape
    num_pages, page_size, num_kv_heads, key_dim = k_cache.shape
    width = 2 * dim * (num_heads + num_kv_heads)
    if (
        num_heads % num_kv_heads
        or key_dim != dim
        or v_cache.shape != k_cache.shape
        or projected.shape != (num_rows, width)
        or not (q.dtype is projected.dtype is k_cache.dtype is v_cache.dtype is torch.float32)
        or not (q.is_contiguous() and projected.is_contiguous())
        or not (k_cache.is_contiguous() and v_cache.is_contiguous())
    ):
        raise refuse_tensors(operator, q=q, projected=projected, k_cache=k_cache, v_cache=v_cache)
    count, slots, starts, cu_rows, _ = group_words(operator, groups, num_rows)
    pages = groups.page_table
    num_tables, max_pages = pages.shape
    if num_tables != count or pages.dtype is not torch.int32 or not pages.is_contiguous():
        raise refuse(operator, "groups.page_table", f"contiguous int32 [{count}, pages]", describe(pages))
    out = new_rows(num_rows, num_heads * dim)
    arguments = _kernel.pack(
        q.data_ptr(),
        projected.data_ptr(),
        width,
        num_heads,
        num_kv_heads,
        dim,
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        num_pages,
        page_size,
        count,
        slots,
        starts,
        cu_rows,
        pages.data_ptr(),
        max_pages,
        out.data_ptr(),
    )
    if status := _kernel.run(arguments):
        raise _kernel.fail(status, operator)
    return out
