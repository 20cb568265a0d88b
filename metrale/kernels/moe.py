"""`moe` in Triton: top-k routed experts in fixed row tiles, grouped without the host, summed in expert order."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from metrale.kernels.groups import check_generated
from metrale.kernels.launch import IS_INTERPRETED, ceil_div, check, kernel, launch, next_power_of_2, shape_of
from metrale.kernels.linear import linear, tile_of
from metrale.kernels.products import dot

BLOCK_DIM = 1024
BLOCK_PAIRS = 1024
ROUTE_WARPS = 4
COMBINE_WARPS = 4


@kernel()
def _route_kernel(
    x_ptr,
    logits_ptr,
    shared_gate_ptr,
    experts_ptr,  # [T, k], ascending
    weights_ptr,  # [T, k]
    gate_ptr,  # [T] of the shared expert
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    NORM_TOPK: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    ids = tl.arange(0, BLOCK_EXPERTS)
    mask = ids < NUM_EXPERTS
    logits = tl.load(logits_ptr + row * NUM_EXPERTS + ids, mask=mask, other=float("-inf")).to(tl.float32)
    scores = tl.exp(logits - tl.max(logits, axis=0))
    scores = scores / tl.sum(scores, axis=0)
    # a row of NaN takes the first experts, and gives NaN by its weights
    left = tl.where(mask, tl.where(scores == scores, scores, 0.0), -1.0)
    is_chosen = ids < 0
    for _ in tl.static_range(TOP_K):
        highest = tl.max(left, axis=0)
        expert = tl.min(tl.where(left == highest, ids, NUM_EXPERTS), axis=0)
        is_chosen = is_chosen | (ids == expert)
        left = tl.where(ids == expert, -1.0, left)
    if NORM_TOPK:
        scores = scores / tl.sum(tl.where(is_chosen, scores, 0.0), axis=0)
    at = row * TOP_K + tl.cumsum(is_chosen.to(tl.int32), axis=0) - 1
    tl.store(experts_ptr + at, ids, mask=is_chosen)
    tl.store(weights_ptr + at, scores, mask=is_chosen)

    products = tl.zeros((BLOCK_DIM,), dtype=tl.float32)
    for first in range(0, DIM, BLOCK_DIM):
        offs = first + tl.arange(0, BLOCK_DIM)
        x = tl.load(x_ptr + row * DIM + offs, mask=offs < DIM, other=0.0).to(tl.float32)
        w = tl.load(shared_gate_ptr + offs, mask=offs < DIM, other=0.0).to(tl.float32)
        products = tl.fma(x, w, products)
    gate = tl.sum(products, axis=0).to(x_ptr.dtype.element_ty).to(tl.float32)
    tl.store(gate_ptr + row, 1.0 / (1.0 + tl.exp(-gate)))


@kernel(sizes=["first_row", "num_rows"])
def _group_kernel(
    experts_ptr,
    lists_ptr,  # [E, rows of the class]: pairs (row * k + place) of each expert, ascending
    counts_ptr,  # [E]
    first_row,
    num_rows,
    TOP_K: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
):
    expert = tl.program_id(0)
    first_pair = first_row.to(tl.int64) * TOP_K
    num_pairs = num_rows * TOP_K
    p_list = lists_ptr + expert.to(tl.int64) * num_rows
    count = 0
    for i in range(0, num_pairs, BLOCK_PAIRS):
        offs = i + tl.arange(0, BLOCK_PAIRS)
        is_ours = tl.load(experts_ptr + first_pair + offs, mask=offs < num_pairs, other=-1) == expert
        place = count + tl.cumsum(is_ours.to(tl.int32), axis=0) - 1
        tl.store(p_list + place, (first_pair + offs).to(tl.int32), mask=is_ours)
        count += tl.sum(is_ours.to(tl.int32), axis=0)
    tl.store(counts_ptr + expert, count)


@kernel(sizes=["num_rows"])
def _experts_kernel(
    x_ptr,
    weight_ptr,
    lists_ptr,
    counts_ptr,
    out_ptr,
    num_rows,
    NUM_EXPERTS: tl.constexpr,
    NUM_OUTPUTS: tl.constexpr,
    INNER: tl.constexpr,
    PAIRS_A_ROW: tl.constexpr,  # of x
    SILU_MUL: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    # the tiles of all experts stand in one line; this program finds whose tile its own is
    ids = tl.arange(0, BLOCK_EXPERTS)
    counts = tl.load(counts_ptr + ids, mask=ids < NUM_EXPERTS, other=0)
    num_tiles = (counts + BLOCK_T - 1) // BLOCK_T
    ends = tl.cumsum(num_tiles, axis=0)
    i_tile = tl.program_id(1)
    expert = tl.sum((ends <= i_tile).to(tl.int32), axis=0)
    if expert >= NUM_EXPERTS:
        return
    is_ours = ids == expert
    count = tl.sum(tl.where(is_ours, counts, 0), axis=0)
    first = (i_tile - tl.sum(tl.where(is_ours, ends - num_tiles, 0), axis=0)) * BLOCK_T

    offs_t = first + tl.arange(0, BLOCK_T)
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    mask_t = offs_t < count
    mask_n = offs_n < NUM_OUTPUTS
    pairs = tl.load(lists_ptr + expert.to(tl.int64) * num_rows + offs_t, mask=mask_t, other=0).to(tl.int64)
    p_x = x_ptr + (pairs // PAIRS_A_ROW)[:, None] * INNER
    weight_rows: tl.constexpr = 2 * NUM_OUTPUTS if SILU_MUL else NUM_OUTPUTS
    p_w = weight_ptr + (expert.to(tl.int64) * weight_rows + offs_n)[None, :] * INNER
    acc = tl.zeros((BLOCK_T, BLOCK_N), dtype=tl.float32)
    acc_up = tl.zeros((BLOCK_T, BLOCK_N), dtype=tl.float32)
    for i_k in range(0, INNER, BLOCK_K):
        at = i_k + offs_k
        mask_k = at < INNER
        x = tl.load(p_x + at[None, :], mask=mask_t[:, None] & mask_k[None, :], other=0.0)
        mask_w = mask_k[:, None] & mask_n[None, :]
        w = tl.load(p_w + at[:, None], mask=mask_w, other=0.0)
        acc = dot(x, w, acc, IS_INTERPRETED)
        if SILU_MUL:
            w_up = tl.load(p_w + NUM_OUTPUTS * INNER + at[:, None], mask=mask_w, other=0.0)
            acc_up = dot(x, w_up, acc_up, IS_INTERPRETED)
    if SILU_MUL:
        acc = acc / (1.0 + tl.exp(-acc)) * acc_up
    p_out = out_ptr + pairs[:, None] * NUM_OUTPUTS + offs_n[None, :]
    tl.store(p_out, acc.to(out_ptr.dtype.element_ty), mask=mask_t[:, None] & mask_n[None, :])


@kernel()
def _combine_kernel(
    y_ptr,  # [T k, D]
    weights_ptr,
    shared_ptr,
    gate_ptr,
    residual_ptr,
    out_ptr,
    DIM: tl.constexpr,
    TOP_K: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    mask = offs < DIM
    total = tl.zeros((BLOCK_DIM,), dtype=tl.float32)
    for i in tl.static_range(TOP_K):  # in expert order
        y = tl.load(y_ptr + (row * TOP_K + i) * DIM + offs, mask=mask, other=0.0).to(tl.float32)
        total = tl.fma(y, tl.load(weights_ptr + row * TOP_K + i), total)
    shared = tl.load(shared_ptr + row * DIM + offs, mask=mask, other=0.0).to(tl.float32)
    out = tl.fma(shared, tl.load(gate_ptr + row), total)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + row * DIM + offs, mask=mask, other=0.0).to(tl.float32)
        out = residual + out.to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + row * DIM + offs, out.to(out_ptr.dtype.element_ty), mask=mask)


def moe(
    x: Tensor,
    router: Tensor,
    gate_up: Tensor,
    down: Tensor,
    shared_gate_up: Tensor,
    shared_down: Tensor,
    shared_gate: Tensor,
    top_k: int,
    norm_topk: bool,
    num_generated: int,
    residual: Tensor | None = None,
) -> Tensor:
    """Sparse mixture of experts: eight launches for rows of one class, none of which waits for the host.

    | tensor | shape | dtype | dir | meaning |
    | --- | --- | --- | --- | --- |
    | x | [T, D] | float32, bfloat16 | in | rows, generated rows first |
    | router | [E, D] | as x | in | |
    | gate_up | [E, 2 I, D] | as x | in | gate rows, then up rows |
    | down | [E, D, I] | as x | in | |
    | shared_gate_up, shared_down | [2 Is, D], [D, Is] | as x | in | the expert that every row takes |
    | shared_gate | [1, D] | as x | in | its sigmoid gate |
    | residual | [T, D] | as x | in | added last, to the rounded sum |
    | result | [T, D] | as x | out | |

    Router probabilities are a float32 softmax over all experts; the `top_k` largest are taken (the lowest id on a tie) and
    renormalised when `norm_topk`. Rows of one class that share an expert stand in tiles of one fixed height (`tile_of`), so
    that an active expert's weights are read once for every tile and a row's bits are its own. Contributions are added in
    expert order, in float32, the shared expert last.

    Requires: contiguous 16-byte aligned tensors; 1 <= top_k <= E; T top_k below 2^31.
    Source: Shazeer et al. 2017, Outrageously large neural networks (arXiv:1701.06538); the shared expert as in
    DeepSeekMoE (arXiv:2401.06066).
    """
    num_rows, dim = shape_of("moe", "x", x, 2)
    num_experts, _, inner = shape_of("moe", "down", down, 3)
    _, shared_inner = shape_of("moe", "shared_down", shared_down, 2)
    check("moe", "x", x, (None, None), torch.float32, torch.bfloat16)
    for name, tensor, shape in (
        ("router", router, (num_experts, dim)),
        ("gate_up", gate_up, (num_experts, 2 * inner, dim)),
        ("down", down, (num_experts, dim, inner)),
        ("shared_gate_up", shared_gate_up, (2 * shared_inner, dim)),
        ("shared_down", shared_down, (dim, shared_inner)),
        ("shared_gate", shared_gate, (1, dim)),
        ("residual", x if residual is None else residual, (num_rows, dim)),
    ):
        check("moe", name, tensor, shape, x.dtype)
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"moe: top_k: expected 1 to {num_experts}, got {top_k}")
    check_generated("moe", num_generated, num_rows)
    experts, weights, gate = _route(x, router, shared_gate, top_k, norm_topk, num_generated)
    y = _experts(x, gate_up, down, experts, num_generated)
    shared = linear(linear(x, shared_gate_up, num_generated, silu_mul=True), shared_down, num_generated)
    out = torch.empty_like(x)
    launch(
        _combine_kernel,
        (num_rows, ceil_div(dim, BLOCK_DIM)),
        y,
        weights,
        shared,
        gate,
        x if residual is None else residual,
        out,
        DIM=dim,
        TOP_K=top_k,
        HAS_RESIDUAL=residual is not None,
        BLOCK_DIM=BLOCK_DIM,
        num_warps=COMBINE_WARPS,
        enable_fp_fusion=True,
    )
    return out


def _route(
    x: Tensor, router: Tensor, shared_gate: Tensor, top_k: int, norm_topk: bool, num_generated: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Chosen experts int32 [T k], ascending in a row, their weights float32 [T k], the shared expert's gate float32 [T]."""
    (num_rows, dim), num_experts = x.shape, router.shape[0]
    experts = x.new_empty(num_rows * top_k, dtype=torch.int32)
    weights = x.new_empty(num_rows * top_k, dtype=torch.float32)
    gate = x.new_empty(num_rows, dtype=torch.float32)
    launch(
        _route_kernel,
        (num_rows,),
        x,
        linear(x, router, num_generated),
        shared_gate,
        experts,
        weights,
        gate,
        NUM_EXPERTS=num_experts,
        TOP_K=top_k,
        NORM_TOPK=norm_topk,
        DIM=dim,
        BLOCK_EXPERTS=next_power_of_2(num_experts),
        BLOCK_DIM=BLOCK_DIM,
        num_warps=ROUTE_WARPS,
        enable_fp_fusion=True,
    )
    return experts, weights, gate


def _experts(x: Tensor, gate_up: Tensor, down: Tensor, experts: Tensor, num_generated: int) -> Tensor:
    """Every chosen expert's output of its rows, [T k, D] in the dtype of x."""
    num_rows, dim = x.shape
    num_experts, _, inner = down.shape
    top_k = experts.shape[0] // max(num_rows, 1)
    hidden, y = x.new_empty(num_rows * top_k, inner), x.new_empty(num_rows * top_k, dim)
    for first, last, is_prompt in ((0, num_generated, False), (num_generated, num_rows, True)):
        lists = experts.new_empty(num_experts * (last - first))
        counts = experts.new_empty(num_experts)
        launch(
            _group_kernel,
            (num_experts if last > first else 0,),
            experts,
            lists,
            counts,
            first,
            last - first,
            TOP_K=top_k,
            BLOCK_PAIRS=BLOCK_PAIRS,
            num_warps=ROUTE_WARPS,
            enable_fp_fusion=True,
        )
        num_pairs = (last - first) * top_k
        for rows, weight, out, silu_mul in ((x, gate_up, hidden, True), (hidden, down, y, False)):
            num_outputs = out.shape[1]
            tile = tile_of(num_outputs, x.dtype, is_prompt)
            launch(
                _experts_kernel,
                (ceil_div(num_outputs, tile.outputs), min(num_experts, num_pairs) + num_pairs // tile.rows),
                rows,
                weight,
                lists,
                counts,
                out,
                last - first,
                NUM_EXPERTS=num_experts,
                NUM_OUTPUTS=num_outputs,
                INNER=rows.shape[1],
                PAIRS_A_ROW=top_k if silu_mul else 1,
                SILU_MUL=silu_mul,
                BLOCK_EXPERTS=next_power_of_2(num_experts),
                BLOCK_T=tile.rows,
                BLOCK_N=tile.outputs,
                BLOCK_K=tile.inner,
                IS_INTERPRETED=IS_INTERPRETED,
                num_warps=tile.num_warps,
                num_stages=tile.num_stages,
                enable_fp_fusion=True,
            )
    return y
