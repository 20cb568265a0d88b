"""`conv_verify` in Triton: convolution, SiLU, L2 norm and gates of a GDN layer, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from metrale.kernels.groups import Groups
from metrale.kernels.launch import check, describe, kernel, launch, next_power_of_2, only_if, shape_of

L2_EPS = 1e-6
MAX_WIDTH = 4
NUM_WARPS = 1


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def softplus(x):
    # log1p by way of atanh's series argument keeps the small results exact enough: log(1 + y), y in (0, 1]
    y = tl.exp(-tl.abs(x))
    total = 1.0 + y
    rest = y - (total - 1.0)
    return tl.log(total) + rest / total + tl.maximum(x, 0.0)


@triton.jit
def head_of(i_head, NUM_KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr):
    """What head `i_head` is, in the order of the channels (queries, keys, values), its size and its first channel."""
    is_value = i_head >= 2 * NUM_KEY_HEADS
    is_query = i_head < NUM_KEY_HEADS
    i_value = tl.maximum(i_head - 2 * NUM_KEY_HEADS, 0)
    i_key = tl.minimum(tl.maximum(i_head - NUM_KEY_HEADS, 0), NUM_KEY_HEADS - 1)
    dim = tl.where(is_value, VALUE_DIM, KEY_DIM)
    first = tl.where(is_value, 2 * NUM_KEY_HEADS * KEY_DIM + i_value * VALUE_DIM, i_head * KEY_DIM)
    return is_query, is_value, i_key, i_value, dim, first


@kernel(
    sizes=["conv_len", "ring_len"],
    indices=["slots_ptr", "starts_ptr", "cu_rows_ptr"],
)
def _conv_verify_kernel(
    x_ptr,
    weight_ptr,
    neg_exp_a_ptr,
    dt_bias_ptr,
    ring_x_ptr,
    ring_k_ptr,
    ring_g_ptr,
    slots_ptr,
    starts_ptr,
    cu_rows_ptr,
    q_ptr,
    v_ptr,
    beta_ptr,
    conv_len,
    ring_len,
    eps,
    scale,
    ROW_STRIDE: tl.constexpr,
    NUM_KEY_HEADS: tl.constexpr,
    NUM_VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_head = tl.program_id(0)
    i_group = tl.program_id(1)
    num_channels = 2 * NUM_KEY_HEADS * KEY_DIM + NUM_VALUE_HEADS * VALUE_DIM
    is_query, is_value, i_key, i_value, dim, first = head_of(i_head, NUM_KEY_HEADS, KEY_DIM, VALUE_DIM)
    offs = tl.arange(0, BLOCK)
    mask = offs < dim
    channels = first + offs

    slot = tl.load(slots_ptr + i_group).to(tl.int64)
    start = tl.load(starts_ptr + i_group)
    row = tl.load(cu_rows_ptr + i_group).to(tl.int64)
    num_rows = tl.load(cu_rows_ptr + i_group + 1) - row.to(tl.int32)

    # taps from the oldest to the newest; a narrower convolution has zeros in front
    width = tl.full((BLOCK,), WIDTH, dtype=tl.int32)
    p_tap = weight_ptr + channels * WIDTH
    tap0 = tl.load(p_tap + (WIDTH - 4), mask=mask & (width >= 4), other=0.0)
    tap1 = tl.load(p_tap + (WIDTH - 3), mask=mask & (width >= 3), other=0.0)
    tap2 = tl.load(p_tap + (WIDTH - 2), mask=mask & (width >= 2), other=0.0)
    tap3 = tl.load(p_tap + (WIDTH - 1), mask=mask, other=0.0)
    p_ring = ring_x_ptr + slot * conv_len * num_channels + channels
    at = (start % conv_len).to(tl.int64)
    at0 = tl.where(at < 3, at + conv_len - 3, at - 3)
    at1 = tl.where(at < 2, at + conv_len - 2, at - 2)
    at2 = tl.where(at < 1, at + conv_len - 1, at - 1)
    x0 = tl.load(p_ring + at0 * num_channels, mask=only_if(start >= 3, mask & (width >= 4)), other=0.0).to(
        tl.float32
    )
    x1 = tl.load(p_ring + at1 * num_channels, mask=only_if(start >= 2, mask & (width >= 3)), other=0.0).to(
        tl.float32
    )
    x2 = tl.load(p_ring + at2 * num_channels, mask=only_if(start >= 1, mask & (width >= 2)), other=0.0).to(
        tl.float32
    )

    a_scale = tl.load(neg_exp_a_ptr + i_value, mask=is_value, other=0.0)
    a_bias = tl.load(dt_bias_ptr + i_value, mask=is_value, other=0.0)
    p_row = x_ptr + row * ROW_STRIDE
    p_b = p_row + (ROW_STRIDE - 2 * NUM_VALUE_HEADS) + i_value
    raw = tl.load(p_row + channels, mask=only_if(num_rows > 0, mask), other=0.0)
    b = tl.load(p_b, mask=is_value & (num_rows > 0), other=0.0)
    a = tl.load(p_b + NUM_VALUE_HEADS, mask=is_value & (num_rows > 0), other=0.0)
    ring_at = (start % ring_len).to(tl.int64)
    for i in range(num_rows):
        p_row += ROW_STRIDE
        p_b += ROW_STRIDE
        is_more = i + 1 < num_rows
        next_raw = tl.load(p_row + channels, mask=only_if(is_more, mask), other=0.0)
        next_b = tl.load(p_b, mask=is_value & is_more, other=0.0)
        next_a = tl.load(p_b + NUM_VALUE_HEADS, mask=is_value & is_more, other=0.0)

        tl.store(p_ring + at * num_channels, raw, mask=mask)
        x3 = raw.to(tl.float32)
        total = tl.fma(x3, tap3, tl.fma(x2, tap2, tl.fma(x1, tap1, x0 * tap0)))
        mixed = total / (1.0 + tl.exp(-total))
        norm = tl.sum(mixed * mixed, axis=0)
        normed = mixed * (1.0 / tl.sqrt(norm + eps))
        if is_value:
            p_v = v_ptr + (row * NUM_VALUE_HEADS + i_value) * VALUE_DIM + offs
            tl.store(p_v, mixed.to(v_ptr.dtype.element_ty), mask=mask)
            tl.store(beta_ptr + row * NUM_VALUE_HEADS + i_value, sigmoid(b.to(tl.float32)))
            g = a_scale * softplus(a.to(tl.float32) + a_bias)
            tl.store(ring_g_ptr + (slot * ring_len + ring_at) * NUM_VALUE_HEADS + i_value, g)
        elif is_query:
            p_q = q_ptr + (row * NUM_KEY_HEADS + i_head) * KEY_DIM + offs
            tl.store(p_q, (normed * scale).to(q_ptr.dtype.element_ty), mask=mask)
        else:
            p_k = ring_k_ptr + ((slot * ring_len + ring_at) * NUM_KEY_HEADS + i_key) * KEY_DIM + offs
            tl.store(p_k, normed.to(ring_k_ptr.dtype.element_ty), mask=mask)
        x0, x1, x2 = x1, x2, x3
        raw, b, a = next_raw, next_b, next_a
        row += 1
        at = tl.where(at + 1 == conv_len, 0, at + 1)
        ring_at = tl.where(ring_at + 1 == ring_len, 0, ring_at + 1)


def conv_verify(
    projected: Tensor,
    conv_weight: Tensor,
    neg_exp_a: Tensor,
    dt_bias: Tensor,
    ring_x: Tensor,
    ring_k: Tensor,
    ring_g: Tensor,
    groups: Groups,
) -> tuple[Tensor, Tensor, Tensor]:
    """Everything of a GDN layer between the input projection and the recurrence, for generated rows: one launch.

    | tensor | shape | dtype | dir | meaning |
    | --- | --- | --- | --- | --- |
    | projected | [T, C + Hv dv + 2 Hv] | activation | in | q, k, v, z, b, a side by side; C = 2 Hk dk + Hv dv |
    | conv_weight | [C, W] | float32 | in | depthwise taps, the newest row last; W from 1 to 4 |
    | neg_exp_a | [Hv] | float32 | in | -exp(A_log) |
    | dt_bias | [Hv] | float32 | in | |
    | ring_x | [S, Wc, C] | activation | inout | raw convolution input of row p at p mod Wc |
    | ring_k | [S, Wr, Hk, dk] | activation | out | normalised key of row p at p mod Wr |
    | ring_g | [S, Wr, Hv] | float32 | out | log decay of row p, natural log, <= 0 |
    | groups | | | in | the row groups; rows of a group stand at positions start, start + 1, ... |
    | result q | [T, Hk, dk] | activation | out | L2-normalised, times dk^-1/2 |
    | result v | [T, Hv, dv] | activation | out | |
    | result beta | [T, Hv] | float32 | out | write strength in (0, 1) |

    A program walks one group's rows for one head and keeps the window in registers: every input is read once.
    Positions below 0 count as zero rows and are never loaded. Logical state is untouched: rows at and past `start`
    are draft rows until they are committed.

    Requires: contiguous 16-byte aligned tensors; Wc >= W - 1 + rows of the largest group, and as much of Wr for its own
    bound (`state.pool` states both).
    Source: Yang et al. 2024, Gated Delta Networks (arXiv:2412.06464); layout of the published checkpoints.
    """
    shapes = check_layer("conv_verify", projected, conv_weight, neg_exp_a, dt_bias, ring_x, ring_k, ring_g)
    num_rows = projected.shape[0]
    num_taps = conv_weight.shape[1]
    if groups.num_rows and not (
        groups.most_rows + num_taps - 1 <= ring_x.shape[1] and groups.most_rows <= ring_k.shape[1]
    ):
        raise ValueError(
            f"conv_verify: ring_x: expected {groups.most_rows + num_taps - 1} rows or more, and {groups.most_rows} in "
            f"ring_k, got {ring_x.shape[1]} and {ring_k.shape[1]}"
        )
    q, v, beta = outputs(projected, ring_k, ring_g, shapes["VALUE_DIM"])
    num_heads = 2 * shapes["NUM_KEY_HEADS"] + shapes["NUM_VALUE_HEADS"]
    if groups.num_rows != num_rows:
        raise ValueError(f"conv_verify: projected: expected {groups.num_rows} rows, got {num_rows}")
    launch(
        _conv_verify_kernel,
        (num_heads, groups.num_groups),
        projected,
        conv_weight,
        neg_exp_a,
        dt_bias,
        ring_x,
        ring_k,
        ring_g,
        groups.slots,
        groups.starts,
        groups.cu_rows,
        q,
        v,
        beta,
        ring_x.shape[1],
        ring_k.shape[1],
        L2_EPS,
        shapes["KEY_DIM"] ** -0.5,
        **shapes,
        num_warps=NUM_WARPS,
        enable_fp_fusion=True,
    )
    return q, v, beta


def outputs(
    projected: Tensor, ring_k: Tensor, ring_g: Tensor, value_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Empty (q, v, beta) for the rows of `projected`."""
    num_rows, num_value_heads = projected.shape[0], ring_g.shape[2]
    q = projected.new_empty(num_rows, *ring_k.shape[2:])
    v = projected.new_empty(num_rows, num_value_heads, value_dim)
    return q, v, ring_g.new_empty(num_rows, num_value_heads)


def check_layer(
    operator: str,
    projected: Tensor,
    conv_weight: Tensor,
    neg_exp_a: Tensor,
    dt_bias: Tensor,
    ring_x: Tensor,
    ring_k: Tensor,
    ring_g: Tensor,
) -> dict[str, int]:
    """The model's shape as the kernels' constants."""
    num_slots, ring_len, num_key_heads, key_dim = shape_of(operator, "ring_k", ring_k, 4)
    num_channels, width = shape_of(operator, "conv_weight", conv_weight, 2)
    (num_value_heads,) = shape_of(operator, "neg_exp_a", neg_exp_a, 1)
    value_dim, odd = divmod(num_channels - 2 * num_key_heads * key_dim, max(num_value_heads, 1))
    if odd or value_dim < 1 or num_value_heads % num_key_heads:
        raise ValueError(
            f"{operator}: conv_weight: expected 2 x {num_key_heads} heads of {key_dim} channels and a multiple of "
            f"{num_value_heads}, got {describe(conv_weight)}"
        )
    columns = num_channels + num_value_heads * (value_dim + 2)
    f32, kinds = (torch.float32,), (projected.dtype,)
    if not 1 <= width <= MAX_WIDTH:
        raise ValueError(
            f"{operator}: conv_weight: expected 1 to {MAX_WIDTH} taps, got {describe(conv_weight)}"
        )
    for name, tensor, shape, dtypes in (
        ("projected", projected, (None, columns), (torch.float32, torch.bfloat16)),
        ("conv_weight", conv_weight, (num_channels, width), f32),
        ("neg_exp_a", neg_exp_a, (num_value_heads,), f32),
        ("dt_bias", dt_bias, (num_value_heads,), f32),
        ("ring_x", ring_x, (num_slots, None, num_channels), kinds),
        ("ring_k", ring_k, (num_slots, ring_len, num_key_heads, key_dim), kinds),
        ("ring_g", ring_g, (num_slots, ring_len, num_value_heads), f32),
    ):
        check(operator, name, tensor, shape, *dtypes)
    return {
        "ROW_STRIDE": columns,
        "NUM_KEY_HEADS": num_key_heads,
        "NUM_VALUE_HEADS": num_value_heads,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "WIDTH": width,
        "BLOCK": next_power_of_2(max(key_dim, value_dim)),
    }
