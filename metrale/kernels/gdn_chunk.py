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
    is_hip,
    kernel,
    launch,
    next_power_of_2,
    only_if,
    shape_of,
)
from metrale.kernels.products import (
    keep_order,
    load_parts,
    num_parts,
    product,
    split,
    store_parts,
    transposed,
)

CHUNK = 64
SOLVE_BLOCK = 16
"""Rows of a diagonal block of the triangular system that is solved row by row."""
SOLVE_KEYS = 16
"""Key elements that a product of the system takes at a time."""
SOLVE_WARPS = 8
BLOCK_DK = 64
BLOCK_DV = 32
NUM_WARPS = 4
"""Value rows and warps of a program; with float32 rows half the value rows and twice the warps."""


@kernel(
    sizes=["num_rows_total"],
    indices=["cu_rows_ptr", "chunks_ptr"],
    scratch=["inverse_ptr", "scores_ptr"],
)
def _solve_kernel(
    q_ptr,
    k_ptr,
    g_ptr,
    beta_ptr,
    cu_rows_ptr,
    chunks_ptr,
    inverse_ptr,  # [PARTS, T, Hv, CHUNK]
    scores_ptr,  # [PARTS, T, Hv, CHUNK]
    q_parts_ptr,  # [ROW_PARTS, T, Hk, dk], where that is more than one
    k_parts_ptr,
    num_rows_total,
    NUM_KEY_HEADS: tl.constexpr,
    NUM_VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    BLOCK_DK: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    DOUBLINGS: tl.constexpr,  # from a block to the chunk
    PARTS: tl.constexpr,
    ROW_PARTS: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    i_head = tl.program_id(0)
    i_chunk = tl.program_id(1)
    i_key_head = i_head // (NUM_VALUE_HEADS // NUM_KEY_HEADS)
    i_group = tl.load(chunks_ptr + 2 * i_chunk)
    i_row = tl.load(chunks_ptr + 2 * i_chunk + 1) * CHUNK
    first_row = tl.load(cu_rows_ptr + i_group)
    num_rows = tl.load(cu_rows_ptr + i_group + 1) - first_row - i_row
    row = (first_row + i_row).to(tl.int64)
    offs_t = tl.arange(0, CHUNK)
    mask_t = offs_t < num_rows
    is_seen = offs_t[:, None] >= offs_t[None, :]
    at_h = row * NUM_VALUE_HEADS + i_head
    offs_h = offs_t * NUM_VALUE_HEADS
    g = tl.load(g_ptr + at_h + offs_h, mask=mask_t, other=0.0)
    beta = tl.load(beta_ptr + at_h + offs_h, mask=mask_t, other=0.0)
    sums = tl.cumsum(g, axis=0)
    decay = tl.exp(tl.where(is_seen, sums[:, None] - sums[None, :], float("-inf")))
    offs_tt = (offs_h * CHUNK)[:, None] + offs_t[None, :]
    part_stride = num_rows_total.to(tl.int64) * (NUM_VALUE_HEADS * CHUNK)
    mask_tt = mask_t[:, None] & (offs_t < CHUNK)[None, :]
    at_k = (row * NUM_KEY_HEADS + i_key_head) * KEY_DIM
    row_stride = num_rows_total.to(tl.int64) * (NUM_KEY_HEADS * KEY_DIM)
    scores = tl.zeros((CHUNK, CHUNK), dtype=tl.float32)
    for i in range(0, KEY_DIM, BLOCK_DK):
        offs_k = i + tl.arange(0, BLOCK_DK)
        offs_tk = offs_t[:, None] * (NUM_KEY_HEADS * KEY_DIM) + offs_k[None, :]
        mask_tk = mask_t[:, None] & (offs_k < KEY_DIM)[None, :]
        q = tl.load(q_ptr + at_k + offs_tk, mask=mask_tk, other=0.0)
        k = tl.load(k_ptr + at_k + offs_tk, mask=mask_tk, other=0.0)
        if ROW_PARTS > 1:
            mask_split = only_if(i_head % (NUM_VALUE_HEADS // NUM_KEY_HEADS) == 0, mask_tk)
            store_parts(q_parts_ptr + at_k + offs_tk, q, mask_split, row_stride, ROW_PARTS)
            store_parts(k_parts_ptr + at_k + offs_tk, k, mask_split, row_stride, ROW_PARTS)
        scores += product(split(q, PARTS), transposed(split(k, PARTS)), PARTS, IS_INTERPRETED)
    store_parts(scores_ptr + at_h * CHUNK + offs_tt, scores * decay, mask_tt, part_stride, PARTS)

    # a loop of its own: beside the scores this sum would spill
    system = tl.zeros((CHUNK, CHUNK), dtype=tl.float32)
    for i in range(0, KEY_DIM, BLOCK_DK):
        offs_k = i + tl.arange(0, BLOCK_DK)
        offs_tk = offs_t[:, None] * (NUM_KEY_HEADS * KEY_DIM) + offs_k[None, :]
        mask_tk = mask_t[:, None] & (offs_k < KEY_DIM)[None, :]
        keys = split(tl.load(k_ptr + at_k + offs_tk, mask=mask_tk, other=0.0), PARTS)
        system += product(keys, transposed(keys), PARTS, IS_INTERPRETED)
    system = tl.where(offs_t[:, None] > offs_t[None, :], system * decay * beta[:, None], 0.0)
    # the blocks on the diagonal, all at once: row i of each inverse from the rows above it
    is_block = (offs_t // BLOCK)[:, None] == (offs_t // BLOCK)[None, :]
    blocks = tl.where(is_block, system, 0.0)
    inverse = tl.where(offs_t[:, None] == offs_t[None, :], 1.0, 0.0)
    for i in range(1, BLOCK):
        is_row = (offs_t % BLOCK == i)[:, None]
        weights = tl.sum(tl.where(is_row, blocks, 0.0), axis=0)
        seen = tl.sum(weights[:, None] * inverse, axis=0)
        inverse = tl.where(is_row & is_block, inverse - seen[None, :], inverse)
    # the inverse of a block of twice the size: below the diagonal -(second inverse) (what is there) (first inverse)
    for i in tl.static_range(DOUBLINGS):
        is_block = (offs_t // (BLOCK << i))[:, None] == (offs_t // (BLOCK << i))[None, :]
        is_pair = (offs_t // (BLOCK << (i + 1)))[:, None] == (offs_t // (BLOCK << (i + 1)))[None, :]
        below = tl.where(is_pair, tl.where(is_block, 0.0, system), 0.0)
        halves = split(inverse, PARTS)
        below = product(halves, split(below, PARTS), PARTS, IS_INTERPRETED)
        inverse = inverse - product(split(below, PARTS), halves, PARTS, IS_INTERPRETED)
    store_parts(inverse_ptr + at_h * CHUNK + offs_tt, inverse * beta[None, :], mask_tt, part_stride, PARTS)


@kernel(
    sizes=["num_rows_total"],
    indices=["slots_ptr", "starts_ptr", "cu_rows_ptr"],
    scratch=["inverse_ptr", "scores_ptr"],
)
def _gdn_chunk_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    g_ptr,
    inverse_ptr,
    scores_ptr,
    ssm_ptr,
    num_folded_ptr,
    slots_ptr,
    starts_ptr,
    cu_rows_ptr,
    out_ptr,
    num_rows_total,
    NUM_KEY_HEADS: tl.constexpr,
    NUM_VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCKS_DK: tl.constexpr,
    BLOCK_DK: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    NUM_TILES: tl.constexpr,
    CHUNK: tl.constexpr,
    PARTS: tl.constexpr,
    ROW_PARTS: tl.constexpr,  # of q and k
    IS_INTERPRETED: tl.constexpr,
):
    i_head = tl.program_id(0)
    i_block = tl.program_id(1)
    i_group = tl.program_id(2)
    i_key_head = i_head // (NUM_VALUE_HEADS // NUM_KEY_HEADS)
    start = tl.load(starts_ptr + i_group)
    first_row = tl.load(cu_rows_ptr + i_group).to(tl.int64)
    num_rows = tl.load(cu_rows_ptr + i_group + 1) - first_row.to(tl.int32)

    offs_k = tl.arange(0, BLOCK_DK)
    offs_v = i_block * BLOCK_DV + tl.arange(0, BLOCK_DV)
    offs_t = tl.arange(0, CHUNK)
    mask_v = offs_v < VALUE_DIM
    # the state transposed, in parts of [keys, values]
    offs_state = offs_v[None, :] * KEY_DIM + offs_k[:, None]
    at_head = tl.load(slots_ptr + i_group).to(tl.int64) * NUM_VALUE_HEADS + i_head
    p_state = ssm_ptr + at_head * (VALUE_DIM * KEY_DIM) + offs_state
    state = ()
    for i in tl.static_range(BLOCKS_DK):
        mask_state = (i * BLOCK_DK + offs_k < KEY_DIM)[:, None] & mask_v[None, :]
        part = tl.load(p_state + i * BLOCK_DK, mask=only_if(start > 0, mask_state), other=0.0)
        state = state + (part,)
    part_stride = num_rows_total.to(tl.int64) * (NUM_VALUE_HEADS * CHUNK)
    row_stride = num_rows_total.to(tl.int64) * (NUM_KEY_HEADS * KEY_DIM)
    for i_row in range(0, num_rows, CHUNK):
        mask_t = i_row + offs_t < num_rows
        mask_tv = mask_t[:, None] & mask_v[None, :]
        mask_tt = mask_t[:, None] & (offs_t < CHUNK)[None, :]
        # offsets are made anew for every chunk: kept from one to the next they would not fit into the registers
        rows = first_row + i_row + offs_t
        offs_h = rows * NUM_VALUE_HEADS + i_head
        offs_tk = ((rows * NUM_KEY_HEADS + i_key_head) * KEY_DIM)[:, None] + offs_k[None, :]
        offs_tv = (offs_h * VALUE_DIM)[:, None] + offs_v[None, :]
        offs_tt = (offs_h * CHUNK)[:, None] + offs_t[None, :]
        g = tl.load(g_ptr + offs_h, mask=mask_t, other=0.0)
        sums = tl.cumsum(g, axis=0)
        whole = tl.sum(tl.where(offs_t == CHUNK - 1, sums, 0.0), axis=0)
        kept = tl.exp(sums)[:, None]
        seen = tl.zeros((CHUNK, BLOCK_DV), dtype=tl.float32)
        asked = tl.zeros((CHUNK, BLOCK_DV), dtype=tl.float32)
        for i in tl.static_range(BLOCKS_DK):
            mask_tk = mask_t[:, None] & (i * BLOCK_DK + offs_k < KEY_DIM)[None, :]
            k = load_parts(k_ptr + i * BLOCK_DK + offs_tk, mask_tk, row_stride, ROW_PARTS)
            seen += product(k, split(state[i], PARTS), PARTS, IS_INTERPRETED)
            keep_order(PARTS)
            q = load_parts(q_ptr + i * BLOCK_DK + offs_tk, mask_tk, row_stride, ROW_PARTS)
            asked += product(q, split(state[i], PARTS), PARTS, IS_INTERPRETED)
        v = tl.load(v_ptr + offs_tv, mask=mask_tv, other=0.0).to(tl.float32)
        known = split(v - kept * seen, PARTS)
        keep_order(PARTS)
        inverse = load_parts(inverse_ptr + offs_tt, mask_tt, part_stride, PARTS)
        u = product(inverse, known, PARTS, IS_INTERPRETED)
        keep_order(PARTS)
        scores = load_parts(scores_ptr + offs_tt, mask_tt, part_stride, PARTS)
        out = kept * asked + product(scores, split(u, PARTS), PARTS, IS_INTERPRETED)
        tl.store(out_ptr + offs_tv, out.to(out_ptr.dtype.element_ty), mask=mask_tv)
        deltas = split(u * tl.exp(whole - sums)[:, None], PARTS)
        after = ()
        for i in tl.static_range(BLOCKS_DK):
            mask_tk = mask_t[:, None] & (i * BLOCK_DK + offs_k < KEY_DIM)[None, :]
            k = load_parts(k_ptr + i * BLOCK_DK + offs_tk, mask_tk, row_stride, ROW_PARTS)
            keep_order(PARTS)
            grown = product(transposed(k), deltas, PARTS, IS_INTERPRETED)
            after = after + (state[i] * tl.exp(whole) + grown,)
        state = after
    if (num_rows > 0) | (start == 0):
        # found again: kept through the loop it would not fit into the registers
        at_head = tl.load(slots_ptr + i_group).to(tl.int64) * NUM_VALUE_HEADS + i_head
        p_state = ssm_ptr + at_head * (VALUE_DIM * KEY_DIM) + offs_state
        for i in tl.static_range(BLOCKS_DK):
            mask_state = (i * BLOCK_DK + offs_k < KEY_DIM)[:, None] & mask_v[None, :]
            tl.store(p_state + i * BLOCK_DK, state[i], mask=mask_state)
        if i_block == 0:
            p_folded = num_folded_ptr + at_head * NUM_TILES
            for i_tile in tl.static_range(NUM_TILES):
                tl.store(p_folded + i_tile, tl.load(starts_ptr + i_group) + num_rows)


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
    """The gated delta rule over prompt rows in chunks of 64, state in and state out: two launches.

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
    (I + tril(beta_i e^(G_i - G_j) k_i.k_j, -1)) U = beta (V - e^G K S0^T); then o_i = e^(G_i) S0 q_i plus the sum over
    j <= i of e^(G_i - G_j) (k_j.q_i) u_j. Chunks stand at absolute multiples of 64 and the last one is padded with rows that
    neither read nor write.

    The first launch inverts the system of every chunk and head, 16 x 16 blocks on the diagonal by substitution, then
    blocks of twice the size from their halves; no power of the matrix is taken, which would overflow for keys that are
    alike. It leaves inverses and scores in 256 bytes a part, row and value head (in all T Hv 512 bytes with bf16 rows,
    T Hv 768 with float32) and, with float32 rows, the parts of queries and keys (12 T Hk dk bytes), which every program
    of the second would split again. The second walks the chunks of a group for BLOCK_DV value rows of one head, half of
    them with float32 rows. Products run on the units that multiply bf16 and are added in float32; a float32 operand is
    the sum of 3 bf16 parts with float32 rows and of 2 with bf16 rows (`products`), which lose 2^-22 and 2^-15 of a
    product's terms.

    A group without rows leaves its state as it is, zeros at start 0. A chunk's rows are one product: what is no number in one of them may reach all 64,
    and no other chunk but those after it in its group.

    Requires: contiguous 16-byte aligned tensors; group starts at a multiple of 64 with nothing pending.
    Source: Yang et al. 2024, Gated Delta Networks (arXiv:2412.06464), section 3.3 (the WY form with decay).
    """
    num_rows, num_key_heads, key_dim = shape_of("gdn_chunk", "q", q, 3)
    _, num_value_heads, value_dim = shape_of("gdn_chunk", "v", v, 3)
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
    chunks = groups.tiles(CHUNK)
    parts = num_parts(q.dtype)
    inverse, scores = g.new_empty(
        2, parts, num_rows, num_value_heads, CHUNK, dtype=torch.float32 if parts == 1 else torch.bfloat16
    )
    q_parts, k_parts = q, k
    row_parts = parts if q.dtype is torch.float32 else 1
    if row_parts > 1:
        q_parts, k_parts = q.new_empty(2, row_parts * num_rows, num_key_heads, key_dim, dtype=torch.bfloat16)
    is_wide = q.dtype is torch.float32
    block_dv = BLOCK_DV // 2 if is_wide else BLOCK_DV
    block_dv = min(block_dv, max(16, next_power_of_2(value_dim)))
    sizes = {
        "NUM_KEY_HEADS": num_key_heads,
        "NUM_VALUE_HEADS": num_value_heads,
        "KEY_DIM": key_dim,
        "PARTS": parts,
        "ROW_PARTS": row_parts,
        "CHUNK": CHUNK,
        "IS_INTERPRETED": IS_INTERPRETED,
    }
    launch(
        _solve_kernel,
        (num_value_heads, chunks.shape[0]),
        q,
        k,
        g,
        beta,
        groups.cu_rows,
        chunks,
        inverse,
        scores,
        q_parts,
        k_parts,
        num_rows,
        **sizes,
        BLOCK_DK=SOLVE_KEYS,
        BLOCK=SOLVE_BLOCK,
        DOUBLINGS=(CHUNK // SOLVE_BLOCK).bit_length() - 1,
        num_warps=SOLVE_WARPS // 2 if is_hip() else SOLVE_WARPS,
        num_stages=1,
        enable_fp_fusion=True,
    )
    launch(
        _gdn_chunk_kernel,
        (num_value_heads, ceil_div(value_dim, block_dv), groups.num_groups),
        q_parts,
        k_parts,
        v,
        g,
        inverse,
        scores,
        ssm,
        num_folded,
        groups.slots,
        groups.starts,
        groups.cu_rows,
        out,
        num_rows,
        **sizes,
        VALUE_DIM=value_dim,
        BLOCKS_DK=ceil_div(key_dim, BLOCK_DK),
        BLOCK_DK=min(BLOCK_DK, max(16, next_power_of_2(key_dim))),
        BLOCK_DV=block_dv,
        NUM_TILES=tiles,
        num_warps=2 * NUM_WARPS if is_wide else NUM_WARPS,
        num_stages=1,
        enable_fp_fusion=True,
    )
    return out
