"""The gated full-attention mixer over a table of operators, and its rotary tables."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from metrale.kernels.ops import Ops
from metrale.model.batch import Batch
from metrale.model.config import ModelConfig
from metrale.model.layers import AttentionWeights
from metrale.state.pool import Pool


class RotaryTables(NamedTuple):
    """cos and sin, float32 [max_positions, rotary_dim / 2]."""

    cos: Tensor
    sin: Tensor


def rotary_tables(config: ModelConfig, max_positions: int, device: torch.device) -> RotaryTables:
    """Tables of plain rotary embedding; angles are float32 products, as the checkpoints were trained with.

    Source: RoFormer (Su et al., arXiv:2104.09864), over the first `rotary_dim` dimensions of a head.
    """
    exponents = torch.arange(0, config.rotary_dim, 2, dtype=torch.float32, device="cpu") / config.rotary_dim
    inverse_frequencies = 1.0 / (config.rope_theta**exponents)
    angles = torch.arange(max_positions, dtype=torch.float32, device="cpu")[:, None] * inverse_frequencies
    return RotaryTables(angles.cos().to(device), angles.sin().to(device))


def attention_mixer(
    x: Tensor,
    norm: Tensor,
    weights: AttentionWeights,
    ops: Ops,
    batch: Batch,
    pool: Pool,
    index: int,
    rotary: RotaryTables,
    eps: float,
) -> Tensor:
    """x + mixer(RMSNorm of x with scales `norm`), [T, D]; writes keys and values to the pool's attention layer `index`.

    Heads are normed, then rotated; the output of each head is multiplied by sigmoid(gate) before o_proj.
    """
    num_generated = batch.num_generated
    k_cache, v_cache = pool.k_cache[index], pool.v_cache[index]
    projected = ops.linear(x, weights.qkv_proj, num_generated, norm=norm, eps=eps)  # [T, 2*H*dh + 2*Hkv*dh]
    q = ops.rotary_store(
        projected,
        weights.q_norm,
        weights.k_norm,
        rotary.cos,
        rotary.sin,
        batch.positions,
        batch.kv_index,
        k_cache,
        v_cache,
        eps,
    )  # [T, H, dh]
    parts = []
    if num_generated:
        rows = slice(0, num_generated)
        parts.append(ops.attention_verify(q[rows], projected[rows], k_cache, v_cache, batch.generated))
    if num_generated < x.shape[0]:
        rows = slice(num_generated, None)
        parts.append(ops.attention_prefill(q[rows], projected[rows], k_cache, v_cache, batch.prompt))
    out = parts[0] if len(parts) == 1 else torch.cat(parts)  # [T, H*dh]
    return ops.linear(out, weights.o_proj, num_generated, x)
