"""`gdn_chunk` in Triton: the gated delta rule over prompt rows, 64 rows at a time."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from metrale.kernels.gdn_verify import num_tiles
from metrale.kernels.groups import Groups
from metrale.kernels.launch import (
    IS_INTERPRETED,
    ceil_div,
    check,
    dot,
    kernel,
    launch,
    next_power_of_2,
    only_if,
)

CHUNK = 64
BLOCK_DV = 32
NUM_WARPS = 4


@kernel(indices=["slots_ptr", "starts_ptr", "cu_rows_ptr"])
def _gdn_chunk_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    g_ptr,
    beta_ptr,
    ssm_ptr,
    num_folded_ptr,
    slots_ptr,
    starts_ptr,
    cu_rows_ptr,
    out_ptr,
    NUM_KEY_HEADS: tl.constexpr,
    NUM_VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_DK: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    NUM_TILES: tl.constexpr,
    CHUNK: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    i_head = tl.program_id(0)
    i_block = tl.program_id(1)
    i_group = tl.program_id(2)
    i_key_head = i_head // (NUM_VALUE_HEADS // NUM_KEY_HEADS)
    slot = tl.load(slots_ptr + i_group).to(tl.int64)
    start = tl.load(starts_ptr + i_group)
    first_row = tl.load(cu_rows_ptr + i_group).to(tl.int64)
    num_rows = tl.load(cu_rows_ptr + i_group + 1) - first_row.to(tl.int32)

    offs_k = tl.arange(0, BLOCK_DK)
    offs_v = i_block * BLOCK_DV + tl.arange(0, BLOCK_DV)
    offs_t = tl.arange(0, CHUNK)
    mask_k = offs_k < KEY_DIM
    mask_v = offs_v < VALUE_DIM
    is_before = offs_t[:, None] > offs_t[None, :]
    is_seen = offs_t[:, None] >= offs_t[None, :]
    # the state transposed: [dk, dv]
    p_state = (
        ssm_ptr
        + ((slot * NUM_VALUE_HEADS + i_head) * VALUE_DIM + offs_v[None, :]) * KEY_DIM
        + offs_k[:, None]
    )
    mask_state = mask_k[:, None] & mask_v[None, :]
    state = tl.load(p_state, mask=only_if(start > 0, mask_state), other=0.0)
    square = tl.zeros((CHUNK, CHUNK), dtype=tl.float32)
    wide = tl.zeros((CHUNK, BLOCK_DV), dtype=tl.float32)
    for i_row in range(0, num_rows, CHUNK):
        mask_t = i_row + offs_t < num_rows
        rows = first_row + i_row + offs_t
        mask_tk = mask_t[:, None] & mask_k[None, :]
        mask_tv = mask_t[:, None] & mask_v[None, :]
        at_k = ((rows * NUM_KEY_HEADS + i_key_head) * KEY_DIM)[:, None] + offs_k[None, :]
        at_v = ((rows * NUM_VALUE_HEADS + i_head) * VALUE_DIM)[:, None] + offs_v[None, :]
        at_h = rows * NUM_VALUE_HEADS + i_head
        k = tl.load(k_ptr + at_k, mask=mask_tk, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + at_v, mask=mask_tv, other=0.0).to(tl.float32)
        g = tl.load(g_ptr + at_h, mask=mask_t, other=0.0)
        beta = tl.load(beta_ptr + at_h, mask=mask_t, other=0.0)
        total = tl.cumsum(g, axis=0)
        whole = tl.sum(tl.where(offs_t == CHUNK - 1, total, 0.0), axis=0)
        difference = tl.where(is_seen, total[:, None] - total[None, :], 0.0)
        decay = tl.where(is_seen, tl.exp(difference), 0.0)
        system = dot(k, tl.trans(k), square, IS_INTERPRETED) * decay * beta[:, None]
        system = tl.where(is_before, system, 0.0)
        known = v - tl.exp(total)[:, None] * dot(k, state, wide, IS_INTERPRETED)
        u = beta[:, None] * known
        for i in range(1, CHUNK):
            # row i of the unit triangular system, from the rows above it
            weights = tl.sum(tl.where((offs_t == i)[:, None], system, 0.0), axis=0)
            seen = tl.sum(weights[:, None] * u, axis=0)
            u = tl.where((offs_t == i)[:, None], u - seen[None, :], u)
        q = tl.load(q_ptr + at_k, mask=mask_tk, other=0.0).to(tl.float32)
        scores = dot(q, tl.trans(k), square, IS_INTERPRETED) * decay
        out = tl.exp(total)[:, None] * dot(q, state, wide, IS_INTERPRETED)
        out = dot(scores, u, out, IS_INTERPRETED)
        tl.store(out_ptr + at_v, out.to(out_ptr.dtype.element_ty), mask=mask_tv)
        kept = k * tl.exp(whole - total)[:, None]
        state = state * tl.exp(whole)
        state = dot(tl.trans(kept), u, state, IS_INTERPRETED)
    if num_rows > 0:
        tl.store(p_state, state, mask=mask_state)
        if i_block == 0:
            p_folded = num_folded_ptr + (slot * NUM_VALUE_HEADS + i_head) * NUM_TILES
            for i_tile in tl.static_range(NUM_TILES):
                tl.store(p_folded + i_tile, start + num_rows)


def gdn_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    ssm: Tensor,
    num_folded: Tensor,
    groups: Groups,
) -> Tensor:
    """The gated delta rule over prompt rows in chunks of 64, state in and state out: one launch.

    | tensor | shape | dtype | dir | meaning |
    | --- | --- | --- | --- | --- |
    | q, k | [T, Hk, dk] | float32, bfloat16 | in | normalised queries (scaled) and keys |
    | v | [T, Hv, dv] | as q | in | values |
    | g | [T, Hv] | float32 | in | log decays |
    | beta | [T, Hv] | float32 | in | write strengths |
    | ssm | [S, Hv, dv, dk] | float32 | inout | state before and after the group's rows |
    | num_folded | [S, Hv, tiles] | int32 | inout | set to start + rows |
    | result | [T, Hv, dv] | as q | out | |

    With G the running sum of g inside a chunk and S0 its first state, the deltas solve the unit lower triangular system
    (I + tril(beta_i e^(G_i - G_j) k_i.k_j, -1)) U = beta (V - e^G K S0^T), here row by row from the first; then
    o_i = e^(G_i) S0 q_i plus the sum over j <= i of e^(G_i - G_j) (k_j.q_i) u_j. Chunks stand at absolute multiples of
    64 and the last one is padded with rows that neither read nor write. A program walks the chunks of one group for
    BLOCK_DV value rows of one head; all products are full float32.

    Requires: contiguous 16-byte aligned tensors; group starts at a multiple of 64 with nothing pending.
    Source: Yang et al. 2024, Gated Delta Networks (arXiv:2412.06464), section 3.3 (the WY form with decay).
    """
    num_rows, num_key_heads, key_dim = q.shape
    num_value_heads, value_dim = v.shape[1:]
    tiles = num_tiles(key_dim, value_dim)
    f32, kinds = (torch.float32,), (q.dtype,)
    if groups.num_rows != num_rows or num_value_heads % num_key_heads:
        raise ValueError(
            f"gdn_chunk: q: expected {groups.num_rows} rows of heads that divide {num_value_heads}, got {list(q.shape)}"
        )
    for group in groups.host:
        if group.start % CHUNK:
            raise ValueError(
                f"gdn_chunk: groups: expected a start at a multiple of {CHUNK}, got {group.start}"
            )
    for name, tensor, shape, dtypes in (
        ("q", q, (num_rows, num_key_heads, key_dim), (torch.float32, torch.bfloat16)),
        ("k", k, (num_rows, num_key_heads, key_dim), kinds),
        ("v", v, (num_rows, num_value_heads, value_dim), kinds),
        ("g", g, (num_rows, num_value_heads), f32),
        ("beta", beta, (num_rows, num_value_heads), f32),
        ("ssm", ssm, (None, num_value_heads, value_dim, key_dim), f32),
        ("num_folded", num_folded, (ssm.shape[0], num_value_heads, tiles), (torch.int32,)),
    ):
        check("gdn_chunk", name, tensor, shape, *dtypes)
    out = torch.empty_like(v)
    launch(
        _gdn_chunk_kernel,
        (num_value_heads, ceil_div(value_dim, BLOCK_DV), groups.num_groups),
        q,
        k,
        v,
        g,
        beta,
        ssm,
        num_folded,
        groups.slots,
        groups.starts,
        groups.cu_rows,
        out,
        NUM_KEY_HEADS=num_key_heads,
        NUM_VALUE_HEADS=num_value_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        BLOCK_DK=max(16, next_power_of_2(key_dim)),
        BLOCK_DV=BLOCK_DV,
        NUM_TILES=tiles,
        CHUNK=CHUNK,
        IS_INTERPRETED=IS_INTERPRETED,
        num_warps=NUM_WARPS,
        num_stages=1,
        enable_fp_fusion=True,
    )
    return out
