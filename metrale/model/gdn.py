"""The Gated DeltaNet mixer over a table of operators."""

from __future__ import annotations

import torch
from torch import Tensor

from metrale.kernels.ops import Ops
from metrale.model.batch import Batch
from metrale.model.layers import GdnWeights
from metrale.state.pool import Pool


def gdn_mixer(
    x: Tensor,
    norm: Tensor,
    weights: GdnWeights,
    ops: Ops,
    batch: Batch,
    pool: Pool,
    index: int,
    eps: float,
) -> Tensor:
    """x + mixer(RMSNorm of x with scales `norm`), [T, D]; works on the state of the pool's layer `index` of this kind.

    Generated rows run the sequential form and write rings alone (and a fold, which changes no logical state);
    prompt rows run the chunked form and advance the state.
    Source: Yang et al. 2024, Gated Delta Networks (arXiv:2412.06464).
    """
    num_generated = batch.num_generated
    num_rows = x.shape[0]
    projected = ops.linear(x, weights.in_proj, num_generated, norm=norm, eps=eps)  # [T, C + Hv*dv + 2*Hv]
    taps_and_gates = (weights.conv_weight, weights.neg_exp_a, weights.dt_bias)
    ring_x, ring_k, ring_g = pool.ring_x[index], pool.ring_k[index], pool.ring_g[index]
    state = (pool.ssm[index], pool.num_folded[index])

    parts = []
    if num_generated:
        rows, groups = projected[:num_generated], batch.generated
        q, v, beta = ops.conv_verify(rows, *taps_and_gates, ring_x, ring_k, ring_g, groups)
        rings = (ring_k, pool.ring_u[index], ring_g)
        parts.append(ops.gdn_verify(q, v, beta, *rings, *state, groups, pool.fold_threshold))
    if num_generated < num_rows:
        rows, groups = projected[num_generated:], batch.prompt
        q, k, v, g, beta = ops.conv_prefill(rows, *taps_and_gates, ring_x, ring_k, ring_g, groups)
        parts.append(ops.gdn_chunk(q, k, v, g, beta, *state, groups))
    out = parts[0] if len(parts) == 1 else torch.cat(parts)  # [T, Hv, dv]

    num_channels = weights.conv_weight.shape[0]
    value_width = out.shape[1] * out.shape[2]
    # as_strided keeps the row stride of a single row, which kernels are compiled for
    gate = projected.as_strided(out.shape, (projected.shape[1], out.shape[2], 1), num_channels)
    out = ops.gated_rms_norm(out, gate, weights.norm, eps)
    return ops.linear(out.view(num_rows, value_width), weights.out_proj, num_generated, x)
