"""`conv_prefill` in Triton: `conv_verify` for prompt rows, a tile of rows and one head a program."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from metrale.kernels.conv_verify import L2_EPS, check_layer, head_of, outputs, sigmoid, softplus
from metrale.kernels.groups import Groups
from metrale.kernels.launch import kernel, launch

BLOCK_ROWS = 16
NUM_WARPS = 4


@kernel(
    sizes=["conv_len"],
    indices=["slots_ptr", "starts_ptr", "cu_rows_ptr", "tiles_ptr"],
)
def _conv_prefill_kernel(
    x_ptr,
    weight_ptr,
    neg_exp_a_ptr,
    dt_bias_ptr,
    ring_x_ptr,
    slots_ptr,
    starts_ptr,
    cu_rows_ptr,
    tiles_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    g_ptr,
    beta_ptr,
    conv_len,
    eps,
    scale,
    ROW_STRIDE: tl.constexpr,
    NUM_KEY_HEADS: tl.constexpr,
    NUM_VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    i_head = tl.program_id(0)
    i_group = tl.load(tiles_ptr + 2 * tl.program_id(1))
    i_tile = tl.load(tiles_ptr + 2 * tl.program_id(1) + 1)
    num_channels = 2 * NUM_KEY_HEADS * KEY_DIM + NUM_VALUE_HEADS * VALUE_DIM
    is_query, is_value, i_key, i_value, dim, first = head_of(i_head, NUM_KEY_HEADS, KEY_DIM, VALUE_DIM)
    offs = tl.arange(0, BLOCK)
    mask = offs < dim
    channels = first + offs

    slot = tl.load(slots_ptr + i_group).to(tl.int64)
    start = tl.load(starts_ptr + i_group)
    first_row = tl.load(cu_rows_ptr + i_group).to(tl.int64)
    num_rows = tl.load(cu_rows_ptr + i_group + 1) - first_row.to(tl.int32)
    offs_t = i_tile * ROWS + tl.arange(0, ROWS)
    mask_t = offs_t < num_rows
    rows = first_row + offs_t
    p_ring = ring_x_ptr + slot * conv_len * num_channels + channels

    total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for tap in tl.static_range(WIDTH):
        back = WIDTH - 1 - tap
        source = offs_t - back  # below 0: a row before the group's
        weight = tl.load(weight_ptr + channels * WIDTH + tap, mask=mask, other=0.0)
        is_new = mask_t & (source >= 0)
        x = tl.load(
            x_ptr + (rows - back)[:, None] * ROW_STRIDE + channels[None, :],
            mask=is_new[:, None] & mask[None, :],
            other=0.0,
        ).to(tl.float32)
        is_old = mask_t & (source < 0) & (start + source >= 0)
        at = (start + source + conv_len) % conv_len
        x += tl.load(
            p_ring[None, :] + at.to(tl.int64)[:, None] * num_channels,
            mask=is_old[:, None] & mask[None, :],
            other=0.0,
        ).to(tl.float32)
        total = tl.fma(x, weight[None, :], total)
    mixed = total / (1.0 + tl.exp(-total))
    norm = tl.sum(mixed * mixed, axis=1)
    normed = mixed * (1.0 / tl.sqrt(norm + eps))[:, None]
    mask_rows = mask_t[:, None] & mask[None, :]
    if is_value:
        p_v = v_ptr + (rows[:, None] * NUM_VALUE_HEADS + i_value) * VALUE_DIM + offs[None, :]
        tl.store(p_v, mixed.to(v_ptr.dtype.element_ty), mask=mask_rows)
        p_b = x_ptr + rows * ROW_STRIDE + (ROW_STRIDE - 2 * NUM_VALUE_HEADS) + i_value
        b = tl.load(p_b, mask=mask_t, other=0.0).to(tl.float32)
        a = tl.load(p_b + NUM_VALUE_HEADS, mask=mask_t, other=0.0).to(tl.float32)
        a += tl.load(dt_bias_ptr + i_value)
        g = tl.load(neg_exp_a_ptr + i_value) * softplus(a)
        tl.store(beta_ptr + rows * NUM_VALUE_HEADS + i_value, sigmoid(b), mask=mask_t)
        tl.store(g_ptr + rows * NUM_VALUE_HEADS + i_value, g, mask=mask_t)
    elif is_query:
        p_q = q_ptr + (rows[:, None] * NUM_KEY_HEADS + i_head) * KEY_DIM + offs[None, :]
        tl.store(p_q, (normed * scale).to(q_ptr.dtype.element_ty), mask=mask_rows)
    else:
        p_k = k_ptr + (rows[:, None] * NUM_KEY_HEADS + i_key) * KEY_DIM + offs[None, :]
        tl.store(p_k, normed.to(k_ptr.dtype.element_ty), mask=mask_rows)

    if i_tile == 0:
        # this program alone reads the old rows, so it alone may replace them
        tl.debug_barrier()
        for i in range(tl.maximum(num_rows - conv_len, 0), num_rows):
            last = tl.load(x_ptr + (first_row + i) * ROW_STRIDE + channels, mask=mask, other=0.0)
            tl.store(p_ring + ((start + i) % conv_len).to(tl.int64) * num_channels, last, mask=mask)


def conv_prefill(
    projected: Tensor,
    conv_weight: Tensor,
    neg_exp_a: Tensor,
    dt_bias: Tensor,
    ring_x: Tensor,
    ring_k: Tensor,
    ring_g: Tensor,
    groups: Groups,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`conv_verify` for prompt rows: any number of rows a group, returns (q, k, v, g, beta).

    Shapes as in `conv_verify`, plus k [T, Hk, dk] activation and g [T, Hv] float32, which go to the chunked recurrence
    instead of the rings. `ring_k` and `ring_g` give shapes only. `ring_x` receives the chunk's last rows, at most Wc.
    A program computes BLOCK_ROWS rows of one head.

    Requires and source: as `conv_verify`.
    """
    shapes = check_layer("conv_prefill", projected, conv_weight, neg_exp_a, dt_bias, ring_x, ring_k, ring_g)
    num_rows = projected.shape[0]
    q, v, beta = outputs(projected, ring_k, ring_g, shapes["VALUE_DIM"])
    k, g = torch.empty_like(q), torch.empty_like(beta)
    num_heads = 2 * shapes["NUM_KEY_HEADS"] + shapes["NUM_VALUE_HEADS"]
    if groups.num_rows != num_rows:
        raise ValueError(f"conv_prefill: projected: expected {groups.num_rows} rows, got {num_rows}")
    tiles = groups.tiles(BLOCK_ROWS)
    launch(
        _conv_prefill_kernel,
        (num_heads, tiles.shape[0]),
        projected,
        conv_weight,
        neg_exp_a,
        dt_bias,
        ring_x,
        groups.slots,
        groups.starts,
        groups.cu_rows,
        tiles,
        q,
        k,
        v,
        g,
        beta,
        ring_x.shape[1],
        L2_EPS,
        shapes["KEY_DIM"] ** -0.5,
        **shapes,
        ROWS=BLOCK_ROWS,
        num_warps=NUM_WARPS,
        enable_fp_fusion=True,
    )
    return q, k, v, g, beta
