"""The tensors of a model, by layer. Big matrices are in the weight dtype, all else is float32."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class GdnWeights:
    """A Gated DeltaNet mixer. C = 2 * Hk * dk + Hv * dv channels.

    in_proj [C + Hv*dv + 2*Hv, D], rows q|k|v|z|b|a; conv_weight [C, W]; neg_exp_a [Hv] = -exp(A_log);
    dt_bias [Hv]; norm [dv], the plain weight of the gated norm; out_proj [D, Hv*dv].
    """

    in_proj: Tensor
    conv_weight: Tensor
    neg_exp_a: Tensor
    dt_bias: Tensor
    norm: Tensor
    out_proj: Tensor


@dataclass(frozen=True)
class AttentionWeights:
    """A full-attention mixer.

    qkv_proj [2*H*dh + 2*Hkv*dh, D]: per head query then gate, then keys, then values; q_norm, k_norm [dh],
    both 1 + w; o_proj [D, H*dh].
    """

    qkv_proj: Tensor
    q_norm: Tensor
    k_norm: Tensor
    o_proj: Tensor


@dataclass(frozen=True)
class DenseWeights:
    """A dense MLP: gate_up [2I, D], gate rows then up rows; down [D, I]."""

    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True)
class MoeWeights:
    """A mixture of E experts beside a shared expert with its own sigmoid gate.

    router [E, D]; gate_up [E, 2I, D]; down [E, D, I]; shared_gate_up [2*Is, D]; shared_down [D, Is];
    shared_gate [1, D].
    """

    router: Tensor
    gate_up: Tensor
    down: Tensor
    shared_gate_up: Tensor
    shared_down: Tensor
    shared_gate: Tensor


@dataclass(frozen=True)
class LayerWeights:
    """A decoder layer: x += mixer(norm(x)); x += mlp(norm(x)). Norms [D] = 1 + w."""

    input_norm: Tensor
    mixer: GdnWeights | AttentionWeights
    post_norm: Tensor
    mlp: DenseWeights | MoeWeights


@dataclass(frozen=True)
class TrunkWeights:
    """The target. embed [V, D]; norm [D] = 1 + w; lm_head [V, D], the same tensor as embed when tied."""

    embed: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    lm_head: Tensor


@dataclass(frozen=True)
class MtpWeights:
    """The multi-token-prediction head; embedding and output head are the trunk's.

    pair_norm [2, D], of the embedding and of the hidden row, and norm [D] are 1 + w; fc [D, 2D], embedding
    columns first; layer, a full-attention decoder layer.
    """

    pair_norm: Tensor
    fc: Tensor
    layer: LayerWeights
    norm: Tensor
