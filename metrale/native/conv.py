"""`conv_verify` and `conv_prefill` as C kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from metrale.kernels.groups import Groups
from metrale.native.build import Kernel
from metrale.native.checks import group_words, new_rows, refuse, refuse_tensors

MOST_TAPS = 8

_kernel = Kernel("conv", "q" * 25)


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
    """Everything of a GDN layer between the input projection and the recurrence, for generated rows.

    | tensor | shape | dtype | dir | meaning |
    | --- | --- | --- | --- | --- |
    | projected | [T, C + Hv dv + 2 Hv] | float32 | in | q, k, v, z, b, a side by side; C = 2 Hk dk + Hv dv |
    | conv_weight | [C, W] | float32 | in | depthwise taps, the newest row last; W <= 8 |
    | neg_exp_a | [Hv] | float32 | in | -exp(A_log) |
    | dt_bias | [Hv] | float32 | in | |
    | ring_x | [S, Wc, C] | float32 | inout | raw convolution input of row p at p mod Wc |
    | ring_k | [S, Wr, Hk, dk] | float32 | out | normalised key of row p at p mod Wr |
    | ring_g | [S, Wr, Hv] | float32 | out | log decay of row p, natural log, <= 0 |
    | groups | | | in | rows of a group stand at positions start, start + 1, ... |
    | result q | [T, Hk, dk] | float32 | out | L2-normalised, times dk^-1/2 |
    | result v | [T, Hv, dv] | float32 | out | |
    | result beta | [T, Hv] | float32 | out | write strength in (0, 1) |

    Positions below 0 count as zero rows and are never loaded. Rows at and past `start` are draft rows until they are
    committed, so logical state is untouched.

    Requires: contiguous tensors; Wc >= W - 1 + rows of the largest group, Wr >= those rows.
    Source: Yang et al. 2024, Gated Delta Networks; layout of the published checkpoints.
    """
    q, _, v, _, beta = _convolve(
        "conv_verify",
        projected,
        conv_weight,
        neg_exp_a,
        dt_bias,
        ring_x,
        ring_k,
        ring_g,
        groups,
        is_prompt=False,
    )
    return q, v, beta


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

    Shapes and arithmetic as in `conv_verify`, plus k [T, Hk, dk] and g [T, Hv], which go to the chunked recurrence
    instead of the rings. `ring_k` and `ring_g` give shapes only. `ring_x` receives the chunk's last rows, at most Wc.
    """
    return _convolve(
        "conv_prefill",
        projected,
        conv_weight,
        neg_exp_a,
        dt_bias,
        ring_x,
        ring_k,
        ring_g,
        groups,
        is_prompt=True,
    )


def _convolve(
    operator: str,
    projected: Tensor,
    conv_weight: Tensor,
    neg_exp_a: Tensor,
    dt_bias: Tensor,
    ring_x: Tensor,
    ring_k: Tensor,
    ring_g: Tensor,
    groups: Groups,
    *,
    is_prompt: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    num_rows, width = projected.shape
    num_slots, ring_x_rows, num_channels = ring_x.shape
    weight_channels, num_taps = conv_weight.shape
    ring_slots, ring_rows, key_heads, key_dim = ring_k.shape
    (value_heads,) = neg_exp_a.shape
    value_width = num_channels - 2 * key_heads * key_dim
    if (
        value_width % value_heads
        or width != num_channels + value_width + 2 * value_heads
        or weight_channels != num_channels
        or ring_slots != num_slots
        or dt_bias.shape != (value_heads,)
        or ring_g.shape != (num_slots, ring_rows, value_heads)
        or not (projected.dtype is conv_weight.dtype is neg_exp_a.dtype is dt_bias.dtype is torch.float32)
        or not (ring_x.dtype is ring_k.dtype is ring_g.dtype is torch.float32)
        or not (projected.is_contiguous() and conv_weight.is_contiguous() and neg_exp_a.is_contiguous())
        or not (dt_bias.is_contiguous() and ring_x.is_contiguous())
        or not (ring_k.is_contiguous() and ring_g.is_contiguous())
    ):
        raise refuse_tensors(
            operator,
            projected=projected,
            conv_weight=conv_weight,
            neg_exp_a=neg_exp_a,
            dt_bias=dt_bias,
            ring_x=ring_x,
            ring_k=ring_k,
            ring_g=ring_g,
        )
    if not 1 <= num_taps <= MOST_TAPS:
        raise refuse(operator, "conv_weight", f"1 to {MOST_TAPS} taps", num_taps)
    count, slots, starts, cu_rows, _ = group_words(operator, groups, num_rows)
    q = new_rows(num_rows, key_heads, key_dim)
    v = new_rows(num_rows, value_heads, value_width // value_heads)
    beta = new_rows(num_rows, value_heads)
    k, g = (new_rows(*q.shape), new_rows(*beta.shape)) if is_prompt else (q, beta)
    arguments = _kernel.pack(
        projected.data_ptr(),
        width,
        conv_weight.data_ptr(),
        neg_exp_a.data_ptr(),
        dt_bias.data_ptr(),
        ring_x.data_ptr(),
        ring_k.data_ptr(),
        ring_g.data_ptr(),
        count,
        slots,
        starts,
        cu_rows,
        num_slots,
        num_channels,
        num_taps,
        ring_x_rows,
        ring_rows,
        key_heads,
        key_dim,
        value_heads,
        q.data_ptr(),
        k.data_ptr() if is_prompt else 0,
        v.data_ptr(),
        g.data_ptr() if is_prompt else 0,
        beta.data_ptr(),
    )
    if status := _kernel.run(arguments):
        raise _kernel.fail(status, operator)
    return q, k, v, g, beta
