"""`attention_verify` and `attention_prefill` in Triton: gated attention of ragged rows over paged keys and values."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from metrale.kernels.groups import Groups
from metrale.kernels.launch import (
    IS_INTERPRETED,
    ceil_div,
    check,
    describe,
    is_hip,
    kernel,
    launch,
    next_power_of_2,
    only_if,
    shape_of,
)
from metrale.kernels.products import dot, num_parts, product, split, transposed

KEY_BLOCK = 64
SPLIT_BLOCKS = 16
"""Times KEY_BLOCK keys are one split of generated rows; prompt rows are never split."""
BLOCK_ROWS = 64
"""Most rows of a program's tile: (row, query head) pairs that share a key head."""
NUM_WARPS = 8


class Tile(NamedTuple):
    """Rows, keys and key elements of one product in a program's block, its warps and pipeline stages."""

    rows: int
    keys: int
    inner: int
    num_warps: int
    num_stages: int


def tile_of(dim: int, dtype: torch.dtype) -> Tile:
    """A function of the head's size, the dtype and the backend alone, chosen so that nothing spills."""
    whole = max(16, next_power_of_2(dim))
    if dtype is torch.float32:
        return Tile(16, 16, min(whole, 32), 4, 1)
    keys = KEY_BLOCK if dim <= 128 else KEY_BLOCK // 2
    if is_hip():
        return Tile(BLOCK_ROWS, keys, min(whole, 64), NUM_WARPS, 1)
    return Tile(BLOCK_ROWS, keys, whole, NUM_WARPS, 2)


@triton.jit
def _gated(x, gate, dtype: tl.constexpr):
    """x times the sigmoid of its gate; what is no number is NaN, for the path by which it came decides its infinities."""
    x = tl.where(x - x == 0.0, x, float("nan"))
    return (x.to(dtype).to(tl.float32) / (1.0 + tl.exp(-gate.to(tl.float32)))).to(dtype)


@kernel(
    sizes=["max_pages", "num_rows_total"],
    indices=["starts_ptr", "cu_rows_ptr", "page_table_ptr", "tiles_ptr"],
)
def _attention_kernel(
    q_ptr,
    projected_ptr,
    k_cache_ptr,
    v_cache_ptr,
    starts_ptr,
    cu_rows_ptr,
    page_table_ptr,
    tiles_ptr,
    out_ptr,
    part_out_ptr,  # [splits, T, H, dh] unnormalised
    part_stats_ptr,  # [splits, T, H, 2] highest score, sum
    max_pages,
    num_rows_total,
    scale,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_INNER: tl.constexpr,  # elements of BLOCK_DIM in one product of the scores
    BLOCK_RATIO: tl.constexpr,  # query heads of a key head, padded
    TILE_ROWS: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    SPLIT_BLOCKS: tl.constexpr,  # 0: no splits
    PARTS: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    ratio: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    i_kv = tl.program_id(0)
    i_group = tl.load(tiles_ptr + 2 * tl.program_id(1))
    i_tile = tl.load(tiles_ptr + 2 * tl.program_id(1) + 1)
    i_split = tl.program_id(2)
    start = tl.load(starts_ptr + i_group)
    first_row = tl.load(cu_rows_ptr + i_group)
    num_rows = tl.load(cu_rows_ptr + i_group + 1) - first_row

    offs_m = tl.arange(0, TILE_ROWS * BLOCK_RATIO)
    i_row = i_tile * TILE_ROWS + offs_m // BLOCK_RATIO
    i_query = offs_m % BLOCK_RATIO
    head = i_kv * ratio + i_query
    mask_m = (i_row < num_rows) & (i_query < ratio)
    position = start + i_row
    row = (first_row + i_row).to(tl.int64)
    offs_d = tl.arange(0, BLOCK_DIM)
    mask_d = offs_d < DIM
    mask_q = mask_m[:, None] & mask_d[None, :]
    p_q = q_ptr + ((row * NUM_HEADS + head) * DIM)[:, None]
    offs_p = tl.arange(0, BLOCK_INNER)
    if BLOCK_INNER == BLOCK_DIM:
        q = tl.load(p_q + offs_d[None, :], mask=mask_q, other=0.0)

    last = start + tl.minimum((i_tile + 1) * TILE_ROWS, num_rows)  # positions that this tile may see
    num_blocks = (last + KEY_BLOCK - 1) // KEY_BLOCK
    if SPLIT_BLOCKS > 0:
        first_block = i_split * SPLIT_BLOCKS
        end_block = tl.minimum(first_block + SPLIT_BLOCKS, num_blocks)
    else:
        first_block = 0
        end_block = num_blocks
    highest = tl.full((TILE_ROWS * BLOCK_RATIO,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((TILE_ROWS * BLOCK_RATIO,), dtype=tl.float32)
    acc = tl.zeros((TILE_ROWS * BLOCK_RATIO, BLOCK_DIM), dtype=tl.float32)
    first_edge = (
        start + i_tile * TILE_ROWS + 1
    ) // KEY_BLOCK  # from here on not every row of the tile sees a block
    num_bad = tl.zeros((KEY_BLOCK,), dtype=tl.float32)
    for block in range(first_block, end_block):
        at = block * KEY_BLOCK + tl.arange(0, KEY_BLOCK)
        is_key = at < last
        page = tl.load(page_table_ptr + i_group * max_pages + at // PAGE_SIZE, mask=is_key, other=0).to(
            tl.int64
        )
        offs_kv = ((page * PAGE_SIZE + at % PAGE_SIZE) * NUM_KV_HEADS + i_kv) * DIM
        mask_kv = is_key[:, None] & mask_d[None, :]
        scores = tl.zeros((TILE_ROWS * BLOCK_RATIO, KEY_BLOCK), dtype=tl.float32)
        for i in range(0, BLOCK_DIM, BLOCK_INNER):
            mask_p = (i + offs_p < DIM)[None, :]
            if BLOCK_INNER < BLOCK_DIM:
                q = tl.load(p_q + i + offs_p[None, :], mask=mask_m[:, None] & mask_p, other=0.0)
            p_k = k_cache_ptr + offs_kv[:, None] + i + offs_p[None, :]
            k = tl.load(p_k, mask=is_key[:, None] & mask_p, other=0.0)
            scores += product(split(q, PARTS), transposed(split(k, PARTS)), PARTS, IS_INTERPRETED)
        scores *= scale
        v = tl.load(v_cache_ptr + offs_kv[:, None] + offs_d[None, :], mask=mask_kv, other=0.0)
        is_seen = at[None, :] <= position[:, None]
        scores = tl.where(is_seen, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, axis=1))
        # -inf - -inf: a row that has seen nothing yet
        old = tl.exp(tl.where(highest == new_highest, 0.0, highest - new_highest))
        base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        weights = tl.exp(scores - base[:, None])
        total = total * old + tl.sum(weights, axis=1)
        acc = acc * old[:, None]
        if block >= first_edge:
            # a later row's NaN must not reach an earlier one by 0 * NaN
            wide = v.to(tl.float32)
            is_number = wide - wide == 0.0
            v = tl.where(is_number, v, 0.0)
            num_bad += tl.sum(tl.where(is_number, 0.0, 1.0), axis=1)
        if v.dtype == tl.float32:
            acc += product(split(weights, PARTS), split(v, PARTS), PARTS, IS_INTERPRETED)
        else:
            acc = dot(weights.to(v.dtype), v, acc, IS_INTERPRETED)
        highest = new_highest
    if tl.sum(num_bad, axis=0) > 0.0:
        for key in range(
            tl.maximum(first_block, first_edge) * KEY_BLOCK, tl.minimum(end_block * KEY_BLOCK, last)
        ):
            key_page = tl.load(page_table_ptr + i_group * max_pages + key // PAGE_SIZE).to(tl.int64)
            offs_v = ((key_page * PAGE_SIZE + key % PAGE_SIZE) * NUM_KV_HEADS + i_kv) * DIM + offs_d
            row_v = tl.load(v_cache_ptr + offs_v, mask=mask_d, other=0.0).to(tl.float32)
            is_bad = (key <= position)[:, None] & (row_v - row_v != 0.0)[None, :]
            acc = tl.where(is_bad, float("nan"), acc)

    at_out = (row * NUM_HEADS + head) * DIM
    if SPLIT_BLOCKS > 0:
        part = (i_split * num_rows_total + row) * NUM_HEADS + head
        tl.store(
            part_out_ptr + part[:, None] * DIM + offs_d[None, :],
            acc,
            mask=only_if(first_block < num_blocks, mask_q),
        )
        tl.store(part_stats_ptr + 2 * part, highest, mask=mask_m)
        tl.store(part_stats_ptr + 2 * part + 1, total, mask=mask_m)
    else:
        columns = 2 * DIM * (NUM_HEADS + NUM_KV_HEADS)
        p_gate = projected_ptr + (row * columns + 2 * DIM * head + DIM)[:, None] + offs_d[None, :]
        gate = tl.load(p_gate, mask=mask_q, other=0.0)
        result = _gated(acc / total[:, None], gate, out_ptr.dtype.element_ty)
        tl.store(out_ptr + at_out[:, None] + offs_d[None, :], result, mask=mask_q)


@kernel(sizes=["num_splits", "num_rows_total"])
def _merge_kernel(
    part_out_ptr,
    part_stats_ptr,
    projected_ptr,
    out_ptr,
    num_splits,
    num_rows_total,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    offs_d = tl.arange(0, BLOCK_DIM)
    mask_d = offs_d < DIM
    acc = tl.zeros((BLOCK_DIM,), dtype=tl.float32)
    highest = float("-inf")
    total = 0.0
    for i_split in range(num_splits):
        part = (i_split * num_rows_total + row) * NUM_HEADS + head
        part_highest = tl.load(part_stats_ptr + 2 * part)
        part_total = tl.load(part_stats_ptr + 2 * part + 1)
        is_used = part_total != 0.0  # NaN is used
        part_out = tl.load(part_out_ptr + part * DIM + offs_d, mask=only_if(is_used, mask_d), other=0.0)
        new_highest = tl.maximum(highest, part_highest)
        base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        old, new = tl.exp(highest - base), tl.exp(part_highest - base)
        total = total * old + part_total * new
        acc = acc * old + part_out * new
        highest = new_highest
    columns = 2 * DIM * (NUM_HEADS + NUM_KV_HEADS)
    gate = tl.load(projected_ptr + row * columns + 2 * DIM * head + DIM + offs_d, mask=mask_d, other=0.0)
    result = _gated(acc / total, gate, out_ptr.dtype.element_ty)
    tl.store(out_ptr + (row * NUM_HEADS + head) * DIM + offs_d, result, mask=mask_d)


def attention_verify(
    q: Tensor, projected: Tensor, k_cache: Tensor, v_cache: Tensor, groups: Groups
) -> Tensor:
    """Attention of generated rows over their sequence's pages, times the sigmoid of the gate: two launches.

    | tensor | shape | dtype | dir | meaning |
    | --- | --- | --- | --- | --- |
    | q | [T, H, dh] | float32, bfloat16 | in | from `rotary_store` |
    | projected | [T, 2 H dh + 2 Hkv dh] | as q | in | its gates |
    | k_cache, v_cache | [pages, P, Hkv, dh] | as q | in | one layer's pages, this step's rows stored |
    | groups | | | in | row i of a group stands at start + i and sees positions 0 .. start + i |
    | result | [T, H dh] | as q | out | |

    Keys are walked in blocks (`tile_of`) from position 0 with an online softmax; scores are scaled by dh^-1/2. Every
    SPLIT_BLOCKS x 64 keys are a split of their own; splits are merged in order, one alone in the same way as many. Products run
    on the units that multiply bf16 and are added in float32: with float32 rows an operand is the sum of 3 bf16 parts, and a product
    errs by at most 2^-22 of its terms' magnitudes; with bf16 rows the softmax weights are rounded to bf16. An element of a value
    that is no finite number makes its dimension NaN in the rows that see it, and in no other.

    Requires: contiguous 16-byte aligned tensors; P a power of two up to 64; pages of every position up to a group's last
    row in its page table; positions below 2^31.
    Source: Milakov and Gimelshein 2018, Online normalizer calculation for softmax (arXiv:1805.02867); splits as in
    Dao et al. 2023, Flash-Decoding.
    """
    return _attend("attention_verify", q, projected, k_cache, v_cache, groups, is_split=True)


def attention_prefill(
    q: Tensor, projected: Tensor, k_cache: Tensor, v_cache: Tensor, groups: Groups
) -> Tensor:
    """`attention_verify` for prompt rows: the same contract and kernel, one launch, keys never split."""
    return _attend("attention_prefill", q, projected, k_cache, v_cache, groups, is_split=False)


def _attend(
    operator: str,
    q: Tensor,
    projected: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    groups: Groups,
    is_split: bool,
) -> Tensor:
    num_rows, num_heads, dim = shape_of(operator, "q", q, 3)
    num_pages, page_size, num_kv_heads, _ = shape_of(operator, "k_cache", k_cache, 4)
    kinds = (q.dtype,)
    for name, tensor, shape, dtypes in (
        ("q", q, (num_rows, num_heads, dim), (torch.float32, torch.bfloat16)),
        ("projected", projected, (num_rows, 2 * dim * (num_heads + num_kv_heads)), kinds),
        ("k_cache", k_cache, (num_pages, page_size, num_kv_heads, dim), kinds),
        ("v_cache", v_cache, (num_pages, page_size, num_kv_heads, dim), kinds),
    ):
        check(operator, name, tensor, shape, *dtypes)
    ratio, odd = divmod(num_heads, num_kv_heads)
    block_ratio = next_power_of_2(ratio)
    tile = tile_of(dim, q.dtype)
    if odd or block_ratio > BLOCK_ROWS or groups.num_rows != num_rows:
        raise ValueError(
            f"{operator}: q: expected {groups.num_rows} rows of 1 to {BLOCK_ROWS} times {num_kv_heads} heads, got {describe(q)}"
        )
    if KEY_BLOCK % page_size:
        raise ValueError(
            f"{operator}: k_cache: expected pages of 1, 2, 4, .. {KEY_BLOCK} positions, got {page_size}"
        )
    num_keys = groups.num_positions
    num_pages_needed, max_pages = ceil_div(num_keys, page_size), groups.page_table.shape[1]
    if num_pages_needed > max_pages:
        raise ValueError(
            f"{operator}: groups: expected {num_pages_needed} pages for {num_keys} positions, got {max_pages}"
        )
    tile_rows = max(tile.rows // block_ratio, 1)
    out = projected.new_empty(num_rows, num_heads * dim)
    num_splits = 0
    part_out = part_stats = out
    if is_split:
        num_splits = ceil_div(num_keys, SPLIT_BLOCKS * KEY_BLOCK)
        part_out = q.new_empty(num_splits * num_rows * num_heads * dim, dtype=torch.float32)
        part_stats = q.new_empty(num_splits * num_rows * num_heads * 2, dtype=torch.float32)
    tiles = groups.tiles(tile_rows)
    sizes = {
        "NUM_HEADS": num_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "DIM": dim,
        "BLOCK_DIM": max(16, next_power_of_2(dim)),
    }
    launch(
        _attention_kernel,
        (num_kv_heads, tiles.shape[0], max(num_splits, 1)),
        q,
        projected,
        k_cache,
        v_cache,
        groups.starts,
        groups.cu_rows,
        groups.page_table,
        tiles,
        out,
        part_out,
        part_stats,
        max_pages,
        num_rows,
        dim**-0.5,
        **sizes,
        PAGE_SIZE=page_size,
        BLOCK_INNER=tile.inner,
        BLOCK_RATIO=block_ratio,
        TILE_ROWS=tile_rows,
        KEY_BLOCK=tile.keys,
        SPLIT_BLOCKS=SPLIT_BLOCKS * KEY_BLOCK // tile.keys if is_split else 0,
        PARTS=num_parts(q.dtype),
        IS_INTERPRETED=IS_INTERPRETED,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        enable_fp_fusion=True,
    )
    if is_split:
        launch(
            _merge_kernel,
            (num_heads, num_rows),
            part_out,
            part_stats,
            projected,
            out,
            num_splits,
            num_rows,
            **sizes,
            num_warps=1,
            enable_fp_fusion=True,
        )
    return out
