"""`gdn_verify` in Triton: replay, fold when due, verify, in one launch a layer."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from metrale.kernels.groups import Groups
from metrale.kernels.launch import ceil_div, check, kernel, launch, next_power_of_2, only_if, shape_of

CONFIGS = {16: (128, 1), 32: (128, 2), 64: (128, 4), 128: (128, 8), 256: (32, 8)}
"""Rows of a value tile and warps, by the padded key dimension.

Every tile of a head reads its keys and queries again: with 128 rows, 64 state registers a thread, a head of the published
sizes is one tile and reads them once. Taller tiles spill, and so does this one where key rows are no multiple of 4 elements.
"""
ODD_ROWS = 32
PART_DIM = 32
"""Keys that lie side by side in a warp, 4 in a lane: 8 lanes hold a value row of the state and 3 shuffles sum it."""


def tile_of(key_dim: int, value_dim: int) -> tuple[int, int]:
    """Value rows of one program, and its warps. A function of the head's shape alone."""
    padded = max(16, next_power_of_2(key_dim))
    block_dv, num_warps = CONFIGS[padded] if key_dim % 4 == 0 else (ODD_ROWS, max(1, padded // 32))
    return min(block_dv, max(16, next_power_of_2(value_dim))), num_warps


def num_tiles(key_dim: int, value_dim: int) -> int:
    """Programs a head, each of which keeps its own `num_folded`."""
    return ceil_div(value_dim, tile_of(key_dim, value_dim)[0])


@triton.jit
def load_parts(p_row, is_row, KEY_DIM: tl.constexpr, BLOCK_DK: tl.constexpr, PARTS: tl.constexpr):
    """A key or query as float32 parts, zero where there is no row."""
    parts = ()
    for i in tl.static_range(PARTS):
        offs = i * BLOCK_DK + tl.arange(0, BLOCK_DK)
        part = tl.load(p_row + offs, mask=only_if(is_row, offs < KEY_DIM), other=0.0)
        parts = parts + (part.to(tl.float32),)
    return parts


@triton.jit
def advance(state, kept, delta, key, PARTS: tl.constexpr):
    """The state after a row: fma(u, k, S e^g), element by element."""
    after = ()
    for i in tl.static_range(PARTS):
        after = after + (tl.fma(delta[:, None], key[i][None, :], state[i] * kept),)
    return after


@kernel(
    sizes=["ring_len", "fold_threshold"],
    indices=["slots_ptr", "starts_ptr", "cu_rows_ptr"],
)
def _gdn_verify_kernel(
    q_ptr,
    v_ptr,
    beta_ptr,
    ring_k_ptr,
    ring_u_ptr,
    ring_g_ptr,
    ssm_ptr,
    num_folded_ptr,
    slots_ptr,
    starts_ptr,
    cu_rows_ptr,
    out_ptr,
    ring_len,
    fold_threshold,
    NUM_KEY_HEADS: tl.constexpr,
    NUM_VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_DK: tl.constexpr,  # of a part
    BLOCK_DV: tl.constexpr,
    NUM_TILES: tl.constexpr,
):
    i_head = tl.program_id(0)
    i_tile = tl.program_id(1)
    i_group = tl.program_id(2)
    i_key_head = i_head // (NUM_VALUE_HEADS // NUM_KEY_HEADS)
    slot = tl.load(slots_ptr + i_group).to(tl.int64)
    start = tl.load(starts_ptr + i_group)
    first_row = tl.load(cu_rows_ptr + i_group)
    num_rows = tl.load(cu_rows_ptr + i_group + 1) - first_row
    p_folded = num_folded_ptr + (slot * NUM_VALUE_HEADS + i_head) * NUM_TILES + i_tile
    folded = tl.load(p_folded)

    # the state in parts of [value rows, keys]: a sum over keys adds the parts in registers, then crosses few lanes
    offs_k = tl.arange(0, BLOCK_DK)
    offs_v = i_tile * BLOCK_DV + tl.arange(0, BLOCK_DV)
    mask_v = offs_v < VALUE_DIM
    p_state = (
        ssm_ptr
        + ((slot * NUM_VALUE_HEADS + i_head) * VALUE_DIM + offs_v[:, None]) * KEY_DIM
        + offs_k[None, :]
    )
    state = ()
    for i in tl.static_range(PARTS):
        mask = mask_v[:, None] & (i * BLOCK_DK + offs_k < KEY_DIM)[None, :]
        part = tl.load(p_state + i * BLOCK_DK, mask=only_if(folded > 0, mask), other=0.0)
        state = state + (part,)

    # ring rows of this slot; one row a position
    p_k = ring_k_ptr + (slot * ring_len * NUM_KEY_HEADS + i_key_head) * KEY_DIM
    p_u = ring_u_ptr + (slot * ring_len * NUM_VALUE_HEADS + i_head) * VALUE_DIM + offs_v
    p_g = ring_g_ptr + slot * ring_len * NUM_VALUE_HEADS + i_head

    at = (folded % ring_len).to(tl.int64)
    is_row = folded < start + num_rows
    is_pending = folded < start
    key = load_parts(p_k + at * (NUM_KEY_HEADS * KEY_DIM), is_row, KEY_DIM, BLOCK_DK, PARTS)
    decay = tl.load(p_g + at * NUM_VALUE_HEADS, mask=is_row, other=0.0)
    delta = tl.load(p_u + at * (NUM_VALUE_HEADS * VALUE_DIM), mask=only_if(is_pending, mask_v), other=0.0)
    for position in range(folded, start):
        at += 1
        at = tl.where(at == ring_len, 0, at)
        is_row = position + 1 < start + num_rows
        is_pending = position + 1 < start
        next_key = load_parts(p_k + at * (NUM_KEY_HEADS * KEY_DIM), is_row, KEY_DIM, BLOCK_DK, PARTS)
        next_decay = tl.load(p_g + at * NUM_VALUE_HEADS, mask=is_row, other=0.0)
        next_delta = tl.load(
            p_u + at * (NUM_VALUE_HEADS * VALUE_DIM), mask=only_if(is_pending, mask_v), other=0.0
        )
        state = advance(state, tl.exp(decay), delta, key, PARTS)
        key, decay, delta = next_key, next_decay, next_delta

    num_pending = start - folded
    if (num_pending > 0) & (num_pending + num_rows > fold_threshold):
        for i in tl.static_range(PARTS):
            mask = mask_v[:, None] & (i * BLOCK_DK + offs_k < KEY_DIM)[None, :]
            tl.store(p_state + i * BLOCK_DK, state[i], mask=mask)
        tl.store(p_folded, start)

    row = first_row.to(tl.int64)
    p_q = q_ptr + (row * NUM_KEY_HEADS + i_key_head) * KEY_DIM
    p_v = v_ptr + (row * NUM_VALUE_HEADS + i_head) * VALUE_DIM + offs_v
    p_out = out_ptr + (row * NUM_VALUE_HEADS + i_head) * VALUE_DIM + offs_v
    p_beta = beta_ptr + row * NUM_VALUE_HEADS + i_head
    is_row = num_rows > 0
    query = load_parts(p_q, is_row, KEY_DIM, BLOCK_DK, PARTS)
    value = tl.load(p_v, mask=only_if(is_row, mask_v), other=0.0).to(tl.float32)
    strength = tl.load(p_beta, mask=is_row, other=0.0)
    for i_row in range(num_rows):
        here = at
        at += 1
        at = tl.where(at == ring_len, 0, at)
        p_q += NUM_KEY_HEADS * KEY_DIM
        p_v += NUM_VALUE_HEADS * VALUE_DIM
        p_beta += NUM_VALUE_HEADS
        is_row = i_row + 1 < num_rows
        next_key = load_parts(p_k + at * (NUM_KEY_HEADS * KEY_DIM), is_row, KEY_DIM, BLOCK_DK, PARTS)
        next_decay = tl.load(p_g + at * NUM_VALUE_HEADS, mask=is_row, other=0.0)
        next_query = load_parts(p_q, is_row, KEY_DIM, BLOCK_DK, PARTS)
        next_value = tl.load(p_v, mask=only_if(is_row, mask_v), other=0.0)
        next_strength = tl.load(p_beta, mask=is_row, other=0.0)
        kept = tl.exp(decay)
        seen = state[0] * key[0][None, :]
        for i in tl.static_range(1, PARTS):
            seen = tl.fma(state[i], key[i][None, :], seen)
        delta = strength * (value - kept * tl.sum(seen, axis=1))
        tl.store(p_u + here * (NUM_VALUE_HEADS * VALUE_DIM), delta, mask=mask_v)
        state = advance(state, kept, delta, key, PARTS)
        asked = state[0] * query[0][None, :]
        for i in tl.static_range(1, PARTS):
            asked = tl.fma(state[i], query[i][None, :], asked)
        tl.store(p_out, tl.sum(asked, axis=1).to(out_ptr.dtype.element_ty), mask=mask_v)
        p_out += NUM_VALUE_HEADS * VALUE_DIM
        key, decay, query = next_key, next_decay, next_query
        value, strength = next_value.to(tl.float32), next_strength


def gdn_verify(
    q: Tensor,
    v: Tensor,
    beta: Tensor,
    ring_k: Tensor,
    ring_u: Tensor,
    ring_g: Tensor,
    ssm: Tensor,
    num_folded: Tensor,
    groups: Groups,
    fold_threshold: int,
) -> Tensor:
    """Replay the pending rows of each group's slot, fold them when due, run the new rows: one launch.

    | tensor | shape | dtype | dir | meaning |
    | --- | --- | --- | --- | --- |
    | q | [T, Hk, dk] | activation | in | normalised, scaled queries of the new rows |
    | v | [T, Hv, dv] | activation | in | values |
    | beta | [T, Hv] | float32 | in | write strengths |
    | ring_k | [S, W, Hk, dk] | activation | in | normalised keys, row p at p mod W; the new rows are in already |
    | ring_u | [S, W, Hv, dv] | float32 | inout | deltas u = beta (v - S k); the new rows are written |
    | ring_g | [S, W, Hv] | float32 | in | log decays |
    | ssm | [S, Hv, dv, dk] | float32 | inout | state after row num_folded - 1; stored only by a fold |
    | num_folded | [S, Hv, tiles] | int32 | inout | rows in `ssm`; a fold sets it to `start`; tiles = num_tiles(dk, dv) |
    | result | [T, Hv, dv] | activation | out | S q after each row's update |

    A program owns `tile_of(dk, dv)` value rows of one head: it loads its part of the state once, replays
    S = fma(u, k, S exp(g)) from the ring, stores the state if a fold is due, and runs the new rows while the next row's
    inputs load. A replayed row has the bits of its first run, since neither holds a reduction between the two.

    Requires: contiguous 16-byte aligned tensors; pending + new rows <= W; group positions below 2^31.
    Source: Yang et al. 2024, Gated Delta Networks (arXiv:2412.06464), equation 10.
    """
    num_rows, num_key_heads, key_dim = shape_of("gdn_verify", "q", q, 3)
    num_slots, ring_len, _, _ = shape_of("gdn_verify", "ring_k", ring_k, 4)
    _, num_value_heads, value_dim = shape_of("gdn_verify", "v", v, 3)
    block_dv, num_warps = tile_of(key_dim, value_dim)
    tiles = ceil_div(value_dim, block_dv)
    padded = max(16, next_power_of_2(key_dim))
    part = min(padded, PART_DIM)
    dtypes, f32 = (q.dtype,), (torch.float32,)
    if groups.num_rows != num_rows or num_value_heads % num_key_heads:
        raise ValueError(
            f"gdn_verify: q: expected {groups.num_rows} rows of heads that divide {num_value_heads}, got {list(q.shape)}"
        )
    for name, tensor, shape, kinds in (
        ("q", q, (num_rows, num_key_heads, key_dim), (torch.float32, torch.bfloat16)),
        ("v", v, (num_rows, num_value_heads, value_dim), dtypes),
        ("beta", beta, (num_rows, num_value_heads), f32),
        ("ring_k", ring_k, (num_slots, ring_len, num_key_heads, key_dim), dtypes),
        ("ring_u", ring_u, (num_slots, ring_len, num_value_heads, value_dim), f32),
        ("ring_g", ring_g, (num_slots, ring_len, num_value_heads), f32),
        ("ssm", ssm, (num_slots, num_value_heads, value_dim, key_dim), f32),
        ("num_folded", num_folded, (num_slots, num_value_heads, tiles), (torch.int32,)),
    ):
        check("gdn_verify", name, tensor, shape, *kinds)
    out = torch.empty_like(v)
    launch(
        _gdn_verify_kernel,
        (num_value_heads, tiles, groups.num_groups),
        q,
        v,
        beta,
        ring_k,
        ring_u,
        ring_g,
        ssm,
        num_folded,
        groups.slots,
        groups.starts,
        groups.cu_rows,
        out,
        ring_len,
        fold_threshold,
        NUM_KEY_HEADS=num_key_heads,
        NUM_VALUE_HEADS=num_value_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        PARTS=padded // part,
        BLOCK_DK=part,
        BLOCK_DV=block_dv,
        NUM_TILES=tiles,
        num_warps=num_warps,
        num_stages=1,
        enable_fp_fusion=True,
    )
    return out
