"""References of `conv_verify` and `conv_prefill`: causal convolution, SiLU, L2 norm and gates of a GDN layer."""

from __future__ import annotations

import torch
from torch import Tensor

from metrale.kernels.groups import Groups, HostGroup
from metrale.reference.numeric import sigmoid, silu, softplus

L2_EPS = 1e-6


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
    | projected | [T, C + Hv dv + 2 Hv] | activation | in | q, k, v, z, b, a side by side; C = 2 Hk dk + Hv dv |
    | conv_weight | [C, W] | float32 | in | depthwise taps, the newest row last |
    | neg_exp_a | [Hv] | float32 | in | -exp(A_log) |
    | dt_bias | [Hv] | float32 | in | |
    | ring_x | [S, Wc, C] | activation | inout | raw convolution input of row p at p mod Wc |
    | ring_k | [S, Wr, Hk, dk] | activation | out | normalised key of row p at p mod Wr |
    | ring_g | [S, Wr, Hv] | float32 | out | log decay of row p, natural log, <= 0 |
    | groups | | | in | the row groups; rows of a group stand at positions start, start + 1, ... |
    | result q | [T, Hk, dk] | activation | out | L2-normalised, times dk^-1/2 |
    | result v | [T, Hv, dv] | activation | out | |
    | result beta | [T, Hv] | float32 | out | write strength in (0, 1) |

    Positions below 0 count as zero rows and are never loaded. Logical state is untouched: rows at and past `start`
    are draft rows until they are committed.

    Requires: Wc >= W - 1 + rows of the largest group, Wr >= those rows.
    Source: Yang et al. 2024, Gated Delta Networks; layout of the published checkpoints.
    """
    num_channels = ring_x.shape[2]
    _check("conv_verify", projected, num_channels, conv_weight, neg_exp_a)
    mixed = []
    for group in groups.host:
        if group.num_rows + conv_weight.shape[1] - 1 > ring_x.shape[1] or group.num_rows > ring_k.shape[1]:
            raise ValueError(
                f"conv_verify: groups: {group.num_rows} rows do not fit rings of {ring_x.shape[1]} and {ring_k.shape[1]}"
            )
        rows = projected[group.first_row : group.first_row + group.num_rows, :num_channels]
        mixed.append(_convolve(rows, conv_weight, ring_x, group))
        positions = torch.arange(group.start, group.start + group.num_rows, device=projected.device)
        ring_x[group.slot, positions % ring_x.shape[1]] = rows
    q, k, v, g, beta = _activate(
        mixed, projected, neg_exp_a, dt_bias, ring_k.shape[2], ring_k.shape[3], num_channels
    )
    for group in groups.host:
        at = (
            torch.arange(group.start, group.start + group.num_rows, device=projected.device) % ring_k.shape[1]
        )
        ring_k[group.slot, at] = k[group.first_row : group.first_row + group.num_rows]
        ring_g[group.slot, at] = g[group.first_row : group.first_row + group.num_rows]
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

    Shapes and arithmetic as in `conv_verify`, plus k [T, Hk, dk] activation and g [T, Hv] float32, which go to the
    chunked recurrence instead of the rings. `ring_k` and `ring_g` give shapes only. `ring_x` receives the chunk's
    last rows, at most Wc.
    """
    num_channels = ring_x.shape[2]
    _check("conv_prefill", projected, num_channels, conv_weight, neg_exp_a)
    mixed = []
    for group in groups.host:
        rows = projected[group.first_row : group.first_row + group.num_rows, :num_channels]
        mixed.append(_convolve(rows, conv_weight, ring_x, group))
        num_kept = min(group.num_rows, ring_x.shape[1])
        end = group.start + group.num_rows
        at = torch.arange(end - num_kept, end, device=projected.device) % ring_x.shape[1]
        ring_x[group.slot, at] = rows[group.num_rows - num_kept :]
    return _activate(mixed, projected, neg_exp_a, dt_bias, ring_k.shape[2], ring_k.shape[3], num_channels)


def _convolve(rows: Tensor, conv_weight: Tensor, ring_x: Tensor, group: HostGroup) -> Tensor:
    """Convolution and SiLU of one group's rows, float32 [rows, C]; taps are added from the oldest to the newest."""
    width = conv_weight.shape[1]
    history = rows.new_zeros(width - 1, rows.shape[1])
    num_known = min(width - 1, group.start)
    if num_known:
        at = torch.arange(group.start - num_known, group.start, device=rows.device) % ring_x.shape[1]
        history[width - 1 - num_known :] = ring_x[group.slot, at]
    window = torch.cat([history, rows]).float()
    total = window[: rows.shape[0]] * conv_weight[:, 0]
    for tap in range(1, width):
        total = total + window[tap : tap + rows.shape[0]] * conv_weight[:, tap]
    return silu(total)


def _activate(
    mixed: list[Tensor],
    projected: Tensor,
    neg_exp_a: Tensor,
    dt_bias: Tensor,
    num_key_heads: int,
    key_dim: int,
    num_channels: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(q, k, v, g, beta) of all rows from the convolved channels and the gate columns of the projection."""
    num_value_heads = neg_exp_a.shape[0]
    x = torch.cat(mixed) if mixed else projected.new_empty(0, num_channels, dtype=torch.float32)
    num_qk = num_key_heads * key_dim
    q, k, v = x.split([num_qk, num_qk, num_channels - 2 * num_qk], dim=-1)
    b, a = projected[:, projected.shape[1] - 2 * num_value_heads :].float().chunk(2, dim=-1)
    q = _l2_norm(q.reshape(-1, num_key_heads, key_dim)) * key_dim**-0.5
    k = _l2_norm(k.reshape(-1, num_key_heads, key_dim))
    g = neg_exp_a * softplus(a + dt_bias)
    v = v.reshape(x.shape[0], num_value_heads, v.shape[1] // num_value_heads).to(projected.dtype)
    return q.to(projected.dtype), k.to(projected.dtype), v, g, sigmoid(b)


def _l2_norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def _check(
    operator: str, projected: Tensor, num_channels: int, conv_weight: Tensor, neg_exp_a: Tensor
) -> None:
    if conv_weight.shape[0] != num_channels:
        raise ValueError(
            f"{operator}: conv_weight has {conv_weight.shape[0]} channels, ring_x expects {num_channels}"
        )
    if projected.shape[1] <= num_channels + 2 * neg_exp_a.shape[0]:
        raise ValueError(
            f"{operator}: projected has {projected.shape[1]} columns, too few for {num_channels} channels"
        )
