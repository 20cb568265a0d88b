"""Plain generation, one token a step for a whole batch: what the evaluation drafts against."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from tiny_training.gated_delta import gated_delta_step
from tiny_training.network import (
    Layer,
    Network,
    attention_inputs,
    gdn_heads,
    gdn_rates,
    mlp_block,
    repeat_heads,
    rms_norm,
)


class AttentionState:
    """Keys and values of one layer so far."""

    def __init__(self, network: Network, batch: int, length: int) -> None:
        sizes = network.sizes
        self.network = network
        self.keys = torch.zeros(batch, sizes.num_kv_heads, length, sizes.head_dim)
        self.values = torch.zeros_like(self.keys)
        self.length = 0

    def step(self, layer: Layer, x: Tensor) -> Tensor:
        """x [B, 1, H] plus the layer's attention; appends one key and one value."""
        sizes, end = self.network.sizes, self.length + 1
        rope = self.network.rope.at(self.length, 1)
        q, k, v, gate = attention_inputs(x, *layer.attention_weights(), rope, sizes)
        self.keys[:, :, self.length : end], self.values[:, :, self.length : end] = k, v
        self.length = end
        repeats = sizes.num_heads // sizes.num_kv_heads
        keys, values = (repeat_heads(cache[:, :, :end], repeats) for cache in (self.keys, self.values))
        out = F.scaled_dot_product_attention(q, keys, values)
        return x + F.linear(out.transpose(1, 2).flatten(2) * gate.sigmoid(), layer.self_attn.o_proj.weight)


class GatedDeltaState:
    """Recurrent state and the convolution's last inputs of one layer."""

    def __init__(self, network: Network, batch: int) -> None:
        config, sizes = network.config, network.sizes
        self.sizes = sizes
        self.state = torch.zeros(batch, sizes.num_value_heads, sizes.key_head_dim, sizes.value_head_dim)
        mixed = 2 * config.key_dim + config.value_dim
        self.window = torch.zeros(batch, mixed, config.linear_conv_kernel_dim)

    def step(self, layer: Layer, x: Tensor) -> Tensor:
        """x [B, 1, H] plus the layer's gated delta rule; advances the state by one token."""
        norm, qkv_w, z_w, b_w, a_w, conv_w, a_log, dt_bias = layer.gdn_weights()
        gdn, eps = layer.linear_attn, self.sizes.eps
        normed = rms_norm(x[:, 0], norm, eps)
        self.window = torch.cat((self.window[..., 1:], F.linear(normed, qkv_w)[..., None]), dim=-1)
        q, k, v = gdn_heads(F.silu((self.window * conv_w[:, 0]).sum(-1)), self.sizes)
        log_decay, beta = gdn_rates(F.linear(normed, a_w), F.linear(normed, b_w), a_log, dt_bias)
        out, self.state = gated_delta_step(self.state, q, k, v, log_decay, beta)
        out = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + eps) * gdn.norm.weight
        return x + F.linear(out.flatten(1) * F.silu(F.linear(normed, z_w)), gdn.out_proj.weight)[:, None]


@torch.no_grad()
def generate(
    network: Network, prompts: Tensor, num_tokens: int, pick: Callable[[Tensor, int], Tensor]
) -> Tensor:
    """Continue prompts [B, P] by num_tokens: pick(logits [B, V], position) chooses the ids at `position`."""
    batch, prompt_length = prompts.shape
    total = prompt_length + num_tokens
    states = [
        GatedDeltaState(network, batch) if layer.is_linear else AttentionState(network, batch, total)
        for layer in network.model.layers
    ]
    ids = F.pad(prompts, (0, num_tokens))
    for position in range(total - 1):
        x = network.model.embed_tokens(ids[:, position, None])
        for layer, state in zip(network.model.layers, states, strict=True):
            x = mlp_block(state.step(layer, x), *layer.mlp_weights(), network.sizes)
        if position + 1 >= prompt_length:
            hidden = rms_norm(x[:, 0], network.model.norm.weight, network.sizes.eps)
            ids[:, position + 1] = pick(hidden @ network.unembedding.T, position + 1)
    return ids
