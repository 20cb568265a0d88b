"""The MTP head in plain torch, from the published layout: one row at a time, its own list of keys and values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


class PlainMtp:
    """A head over float32 tensors by their names on disk; `step` adds one row to its cache."""

    def __init__(self, tensors: dict[str, Tensor], config: dict[str, Any], embed: Tensor) -> None:
        self.t = {name.removeprefix("mtp."): tensor for name, tensor in tensors.items()}
        self.config = config
        self.embed = embed
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def step(self, token_id: int, hidden: Tensor, position: int) -> Tensor:
        """Output [D] of the row that pairs `hidden` [D] at `position` with the token after it."""
        pair = torch.cat(
            [
                self._norm(self.embed[token_id], "pre_fc_norm_embedding.weight"),
                self._norm(hidden, "pre_fc_norm_hidden.weight"),
            ]
        )
        x = self.t["fc.weight"] @ pair
        x = x + self._attention(self._norm(x, "layers.0.input_layernorm.weight"), position)
        x = x + self._mlp(self._norm(x, "layers.0.post_attention_layernorm.weight"))
        return self._norm(x, "norm.weight")

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1 + self.t[name])

    def _attention(self, x: Tensor, position: int) -> Tensor:
        heads, kv_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        dim = self.config["head_dim"]
        project = {p: self.t[f"layers.0.self_attn.{p}_proj.weight"] @ x for p in "qkv"}
        query, gate = project["q"].view(heads, 2, dim).unbind(1)
        query = self._rope(self._norm(query, "layers.0.self_attn.q_norm.weight"), position)
        key = self._rope(
            self._norm(project["k"].view(kv_heads, dim), "layers.0.self_attn.k_norm.weight"), position
        )
        del self.keys[position:], self.values[position:]
        assert len(self.keys) == position
        self.keys.append(key)
        self.values.append(project["v"].view(kv_heads, dim))
        outs = []
        for head in range(heads):
            kv = head // (heads // kv_heads)
            keys = torch.stack([k[kv] for k in self.keys])
            values = torch.stack([v[kv] for v in self.values])
            weights = torch.softmax(keys @ query[head] / dim**0.5, dim=0)
            outs.append(weights @ values * torch.sigmoid(gate[head]))
        return self.t["layers.0.self_attn.o_proj.weight"] @ torch.cat(outs)

    def _rope(self, x: Tensor, position: int) -> Tensor:
        rope = self.config["rope_parameters"]
        rotated = int(x.shape[-1] * rope["partial_rotary_factor"])
        angles = position / rope["rope_theta"] ** (torch.arange(0, rotated, 2) / rotated)
        cos, sin = angles.cos(), angles.sin()
        first, second, rest = x.split([rotated // 2, rotated // 2, x.shape[-1] - rotated], dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)

    def _mlp(self, x: Tensor) -> Tensor:
        if "layers.0.mlp.gate.weight" not in self.t:
            return self._swiglu(x, "layers.0.mlp")
        scores = torch.softmax(self.t["layers.0.mlp.gate.weight"] @ x, dim=0)
        chosen = scores.topk(self.config["num_experts_per_tok"])
        out = torch.sigmoid(self.t["layers.0.mlp.shared_expert_gate.weight"] @ x) * self._swiglu(
            x, "layers.0.mlp.shared_expert"
        )
        for score, expert in zip(chosen.values / chosen.values.sum(), chosen.indices.tolist(), strict=True):
            out = out + score * self._swiglu(x, f"layers.0.mlp.experts.{expert}")
        return out

    def _swiglu(self, x: Tensor, prefix: str) -> Tensor:
        gate, up, down = (self.t[f"{prefix}.{part}_proj.weight"] for part in ("gate", "up", "down"))
        return down @ (functional.silu(gate @ x) * (up @ x))
