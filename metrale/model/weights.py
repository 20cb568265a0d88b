"""From the named tensors of a checkpoint to the tensors of a model: fused, de-interleaved, converted."""

from __future__ import annotations

import torch
from torch import Tensor

from metrale.errors import ConfigError
from metrale.model.checkpoint import Checkpoint
from metrale.model.config import LINEAR, ModelConfig
from metrale.model.layers import (
    AttentionWeights,
    DenseWeights,
    GdnWeights,
    LayerWeights,
    MoeWeights,
    MtpWeights,
    TrunkWeights,
)
from metrale.model.layout import EMBED, LM_HEAD, MTP_LAYER


class WeightReader:
    """Builds a model's tensors from a checkpoint whose names and shapes were checked.

    Every tensor is copied out of the mapped file once, straight to its place in the fused tensor, its dtype
    and its device: nothing of the checkpoint is held in memory beside the model.
    """

    def __init__(
        self, checkpoint: Checkpoint, config: ModelConfig, weight_dtype: torch.dtype, device: torch.device
    ) -> None:
        self._checkpoint = checkpoint
        self._config = config
        self._dtype = weight_dtype
        self._device = device

    def trunk(self) -> TrunkWeights:
        """The target's tensors. ConfigError where a tied head is stored and differs from the embedding."""
        config = self._config
        layers = tuple(
            self._layer(f"model.layers.{i}", is_gdn=kind == LINEAR, is_moe=config.moe_layers[i])
            for i, kind in enumerate(config.layer_types)
        )
        embed = self._matrix(EMBED)
        if not config.tie_word_embeddings:
            lm_head = self._matrix(LM_HEAD)
        else:
            lm_head = embed
            if LM_HEAD in self._checkpoint.tensors and not torch.equal(self._matrix(LM_HEAD), embed):
                raise ConfigError(
                    f"config.json ties the output head to the embedding, but {LM_HEAD} differs from {EMBED}; "
                    "set tie_word_embeddings to false or remove the tensor"
                )
        return TrunkWeights(embed=embed, layers=layers, norm=self._norm("model.norm.weight"), lm_head=lm_head)

    def mtp(self) -> MtpWeights:
        """The MTP head's tensors."""
        return MtpWeights(
            pair_norm=torch.stack(
                [self._norm(f"mtp.pre_fc_norm_{part}.weight") for part in ("embedding", "hidden")]
            ),
            fc=self._matrix("mtp.fc.weight"),
            layer=self._layer(MTP_LAYER, is_gdn=False, is_moe=self._config.is_moe),
            norm=self._norm("mtp.norm.weight"),
        )

    def _layer(self, prefix: str, *, is_gdn: bool, is_moe: bool) -> LayerWeights:
        return LayerWeights(
            input_norm=self._norm(f"{prefix}.input_layernorm.weight"),
            mixer=self._gdn(f"{prefix}.linear_attn") if is_gdn else self._attention(f"{prefix}.self_attn"),
            post_norm=self._norm(f"{prefix}.post_attention_layernorm.weight"),
            mlp=self._moe(f"{prefix}.mlp") if is_moe else self._dense(f"{prefix}.mlp"),
        )

    def _gdn(self, prefix: str) -> GdnWeights:
        interleaved = self._config.family == "qwen3_next"
        return GdnWeights(
            in_proj=self._interleaved_in_proj(prefix) if interleaved else self._flat_in_proj(prefix),
            conv_weight=self._vector(f"{prefix}.conv1d.weight").squeeze(1),
            neg_exp_a=-self._vector(f"{prefix}.A_log").exp(),
            dt_bias=self._vector(f"{prefix}.dt_bias"),
            norm=self._vector(f"{prefix}.norm.weight"),
            out_proj=self._matrix(f"{prefix}.out_proj.weight"),
        )

    def _flat_in_proj(self, prefix: str) -> Tensor:
        return self._stack(*(f"{prefix}.in_proj_{part}.weight" for part in ("qkv", "z", "b", "a")))

    def _interleaved_in_proj(self, prefix: str) -> Tensor:
        """q|k|v|z|b|a from two projections that are grouped by key head: (q, k, v, z) and (b, a) of each."""
        config = self._config
        heads, dk = config.linear_num_key_heads, config.linear_key_head_dim
        ratio = config.linear_num_value_heads // heads
        rv = ratio * config.linear_value_head_dim
        num_rows = config.num_conv_channels + config.value_width + 2 * config.linear_num_value_heads
        out = self._empty(num_rows, config.hidden_size)
        first = 0
        for name, sizes in (("in_proj_qkvz", (dk, dk, rv, rv)), ("in_proj_ba", (ratio, ratio))):
            stored = self._checkpoint.take(f"{prefix}.{name}.weight")
            for part in torch.split(stored.view(heads, sum(sizes), -1), list(sizes), dim=1):  # [Hk, size, D]
                end = first + heads * part.shape[1]
                out[first:end].view(part.shape).copy_(part)
                first = end
        return out

    def _attention(self, prefix: str) -> AttentionWeights:
        return AttentionWeights(
            qkv_proj=self._stack(*(f"{prefix}.{part}_proj.weight" for part in "qkv")),
            q_norm=self._norm(f"{prefix}.q_norm.weight"),
            k_norm=self._norm(f"{prefix}.k_norm.weight"),
            o_proj=self._matrix(f"{prefix}.o_proj.weight"),
        )

    def _dense(self, prefix: str) -> DenseWeights:
        return DenseWeights(gate_up=self._gate_up(prefix), down=self._matrix(f"{prefix}.down_proj.weight"))

    def _gate_up(self, prefix: str) -> Tensor:
        return self._stack(f"{prefix}.gate_proj.weight", f"{prefix}.up_proj.weight")

    def _moe(self, prefix: str) -> MoeWeights:
        shared = self._dense(f"{prefix}.shared_expert")
        fused = f"{prefix}.experts.gate_up_proj"
        if fused in self._checkpoint.tensors:
            gate_up, down = self._matrix(fused), self._matrix(f"{prefix}.experts.down_proj")
        else:
            gate_up, down = self._experts(f"{prefix}.experts")
        return MoeWeights(
            router=self._matrix(f"{prefix}.gate.weight"),
            gate_up=gate_up,
            down=down,
            shared_gate_up=shared.gate_up,
            shared_down=shared.down,
            shared_gate=self._matrix(f"{prefix}.shared_expert_gate.weight"),
        )

    def _experts(self, prefix: str) -> tuple[Tensor, Tensor]:
        """Fused (gate_up [E, 2I, D], down [E, D, I]) from experts that are stored one by one."""
        config = self._config
        width, inner = config.hidden_size, config.moe_intermediate_size
        gate_up = self._empty(config.num_experts, 2 * inner, width)
        down = self._empty(config.num_experts, width, inner)
        for n in range(config.num_experts):
            gate_up[n, :inner].copy_(self._checkpoint.take(f"{prefix}.{n}.gate_proj.weight"))
            gate_up[n, inner:].copy_(self._checkpoint.take(f"{prefix}.{n}.up_proj.weight"))
            down[n].copy_(self._checkpoint.take(f"{prefix}.{n}.down_proj.weight"))
        return gate_up, down

    def _stack(self, *names: str) -> Tensor:
        """The tensors one under the other, in the weight dtype."""
        parts = [self._checkpoint.take(name) for name in names]
        out = self._empty(sum(part.shape[0] for part in parts), *parts[0].shape[1:])
        for part, place in zip(parts, torch.split(out, [part.shape[0] for part in parts]), strict=True):
            place.copy_(part)
        return out

    def _matrix(self, name: str) -> Tensor:
        return self._stack(name)

    def _vector(self, name: str) -> Tensor:
        """A small tensor, float32."""
        stored = self._checkpoint.take(name)
        return torch.empty(stored.shape, dtype=torch.float32, device=self._device).copy_(stored)

    def _norm(self, name: str) -> Tensor:
        """The scale 1 + w of a norm whose weight is stored centred on 0, float32."""
        return self._vector(name) + 1.0

    def _empty(self, *size: int) -> Tensor:
        return torch.empty(size, dtype=self._dtype, device=self._device)
