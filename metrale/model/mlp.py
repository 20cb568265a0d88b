"""The MLP of a decoder layer, dense or a mixture of experts, over a table of operators."""

from __future__ import annotations

from torch import Tensor

from metrale.kernels.ops import Ops
from metrale.model.layers import DenseWeights, MoeWeights


def mlp(
    x: Tensor,
    norm: Tensor,
    weights: DenseWeights | MoeWeights,
    ops: Ops,
    num_generated: int,
    top_k: int,
    norm_topk: bool,
    eps: float,
) -> Tensor:
    """x + mlp(RMSNorm of x with scales `norm`), [T, D].

    `top_k` and `norm_topk` matter to a mixture of experts alone.
    """
    if isinstance(weights, DenseWeights):
        inner = ops.linear(x, weights.gate_up, num_generated, silu_mul=True, norm=norm, eps=eps)  # [T, I]
        return ops.linear(inner, weights.down, num_generated, x)
    return ops.moe(
        ops.rms_norm(x, norm, eps),
        weights.router,
        weights.gate_up,
        weights.down,
        weights.shared_gate_up,
        weights.shared_down,
        weights.shared_gate,
        top_k,
        norm_topk,
        num_generated,
        x,
    )
