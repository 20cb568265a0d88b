"""The network in training form: parameters named as in the checkpoint, and forwards over whole sequences."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tiny_training.config import TinyConfig
from tiny_training.gated_delta import chunk_inputs, chunk_outputs


class Rope(NamedTuple):
    """Rotation tables by position, [T, rotary_dim] each."""

    cos: Tensor
    sin: Tensor

    def at(self, start: int, length: int) -> "Rope":
        return Rope(self.cos[start : start + length], self.sin[start : start + length])


class Sizes(NamedTuple):
    """What the functions below must know besides their tensors; hashable, so that a compiled function keeps it."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    chunk: int
    eps: float


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (1 + weight)


def l2_norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """Turn the first rotary_dim channels of x [B, T, heads, head_dim] by their positions."""
    size = rope.cos.shape[-1]
    turned, kept = x[..., :size], x[..., size:]
    first, second = turned.chunk(2, dim=-1)
    cos, sin = rope.cos[:, None], rope.sin[:, None]
    return torch.cat((turned * cos + torch.cat((-second, first), dim=-1) * sin, kept), dim=-1)


def mlp_block(x: Tensor, norm: Tensor, gate: Tensor, up: Tensor, down: Tensor, sizes: Sizes) -> Tensor:
    """x [B, T, H] plus the gated MLP of its norm."""
    normed = rms_norm(x, norm, sizes.eps)
    return x + F.linear(F.silu(F.linear(normed, gate)) * F.linear(normed, up), down)


def attention_inputs(
    x: Tensor,
    norm: Tensor,
    q_w: Tensor,
    k_w: Tensor,
    v_w: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    rope: Rope,
    sizes: Sizes,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q [B, heads, T, d], k and v [B, kv heads, T, d], and the output gate [B, T, heads * d]."""
    batch, length, _ = x.shape
    normed = rms_norm(x, norm, sizes.eps)
    q, gate = F.linear(normed, q_w).view(batch, length, sizes.num_heads, 2 * sizes.head_dim).chunk(2, dim=-1)
    k = F.linear(normed, k_w).view(batch, length, sizes.num_kv_heads, sizes.head_dim)
    v = F.linear(normed, v_w).view(batch, length, sizes.num_kv_heads, sizes.head_dim)
    q = rotate(rms_norm(q, q_norm, sizes.eps), rope)
    k = rotate(rms_norm(k, k_norm, sizes.eps), rope)
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), gate.flatten(2)


def repeat_heads(x: Tensor, repeats: int) -> Tensor:
    """[B, heads, ...] -> [B, heads * repeats, ...], each head `repeats` times in a row."""
    return x.repeat_interleave(repeats, dim=1)


def attention_block(x: Tensor, *weights: Tensor, o_w: Tensor, rope: Rope, sizes: Sizes) -> Tensor:
    """x [B, T, H] plus causal gated attention; `weights` as attention_inputs takes them."""
    q, k, v, gate = attention_inputs(x, *weights, rope, sizes)
    repeats = sizes.num_heads // sizes.num_kv_heads
    out = F.scaled_dot_product_attention(
        q, repeat_heads(k, repeats), repeat_heads(v, repeats), is_causal=True
    )
    return x + F.linear(out.transpose(1, 2).flatten(2) * gate.sigmoid(), o_w)


def causal_conv(x: Tensor, weight: Tensor) -> Tensor:
    """Depthwise causal convolution of x [B, T, C] with weight [C, 1, W]."""
    length, width = x.shape[1], weight.shape[-1]
    padded = F.pad(x, (0, 0, width - 1, 0))
    return sum(padded[:, tap : tap + length] * weight[:, 0, tap] for tap in range(width))


def gdn_rates(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Natural log of the decay (<= 0), and the write strength in (0, 1)."""
    return -a_log.exp() * F.softplus(a + dt_bias), b.sigmoid()


def gdn_heads(mixed: Tensor, sizes: Sizes) -> tuple[Tensor, Tensor, Tensor]:
    """Cut the convolved [..., 2kd + vd] into q, k, v [..., value heads, d]; q and k normalised and repeated."""
    key_dim = sizes.num_key_heads * sizes.key_head_dim
    q, k, v = mixed.split([key_dim, key_dim, sizes.num_value_heads * sizes.value_head_dim], dim=-1)
    repeats = sizes.num_value_heads // sizes.num_key_heads
    q = l2_norm(q.unflatten(-1, (sizes.num_key_heads, -1))) * sizes.key_head_dim**-0.5
    k = l2_norm(k.unflatten(-1, (sizes.num_key_heads, -1)))
    v = v.unflatten(-1, (sizes.num_value_heads, -1))
    return q.repeat_interleave(repeats, dim=-2), k.repeat_interleave(repeats, dim=-2), v


def gdn_inputs(
    x: Tensor,
    norm: Tensor,
    qkv_w: Tensor,
    z_w: Tensor,
    b_w: Tensor,
    a_w: Tensor,
    conv_w: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    sizes: Sizes,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The output gate z [B, T, vd], and what chunk_outputs takes."""
    normed = rms_norm(x, norm, sizes.eps)
    q, k, v = gdn_heads(F.silu(causal_conv(F.linear(normed, qkv_w), conv_w)), sizes)
    log_decay, beta = gdn_rates(F.linear(normed, a_w), F.linear(normed, b_w), a_log, dt_bias)
    return F.linear(normed, z_w), chunk_inputs(q, k, v, log_decay, beta, sizes.chunk)


def gdn_result(x: Tensor, core: Tensor, z: Tensor, norm: Tensor, out_w: Tensor, sizes: Sizes) -> Tensor:
    """x [B, T, H] plus the projection of the normed and gated operator output, core [B, T, value heads, dv]."""
    normed = core * torch.rsqrt(core.square().mean(-1, keepdim=True) + sizes.eps) * norm
    return x + F.linear(normed.flatten(2) * F.silu(z), out_w)


OUTPUTS = ("o_proj.weight", "out_proj.weight", "down_proj.weight")
"""What writes into the residual stream, by the ends of names."""


def draw_dt_bias(
    dt_bias: Tensor, log_rates: tuple[float, float], generator: torch.Generator | None = None
) -> None:
    """Fill with the inverse softplus of a decay per token, drawn evenly in its natural logarithm."""
    rates = torch.empty_like(dt_bias).uniform_(*log_rates, generator=generator).exp()
    dt_bias.copy_(torch.log(torch.expm1(rates)))


class Operators(NamedTuple):
    """The functions between the serial parts: eager, or compiled for one shape."""

    mlp_block: Callable[..., Tensor]
    attention_block: Callable[..., Tensor]
    gdn_inputs: Callable[..., Any]
    gdn_result: Callable[..., Tensor]


EAGER = Operators(mlp_block, attention_block, gdn_inputs, gdn_result)


def compile_operators() -> Operators:
    """Compile what is elementwise; the chunk scan stays eager, since a compiled triangular solve gives NaN."""
    return Operators(*(torch.compile(function, dynamic=False) for function in EAGER))


class Weight(nn.Module):
    """One parameter under the name `weight`."""

    def __init__(self, *shape: int, value: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full(shape, value))


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class MLP(nn.Module):
    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.gate_proj = linear(config.hidden_size, config.intermediate_size)
        self.up_proj = linear(config.hidden_size, config.intermediate_size)
        self.down_proj = linear(config.intermediate_size, config.hidden_size)


class Attention(nn.Module):
    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        size, kv_size = (
            heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads)
        )
        self.q_proj = linear(config.hidden_size, 2 * size)
        self.k_proj = linear(config.hidden_size, kv_size)
        self.v_proj = linear(config.hidden_size, kv_size)
        self.o_proj = linear(size, config.hidden_size)
        self.q_norm = Weight(config.head_dim)
        self.k_norm = Weight(config.head_dim)


class GatedDeltaNet(nn.Module):
    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        heads, mixed = config.linear_num_value_heads, 2 * config.key_dim + config.value_dim
        self.in_proj_qkv = linear(config.hidden_size, mixed)
        self.in_proj_z = linear(config.hidden_size, config.value_dim)
        self.in_proj_b = linear(config.hidden_size, heads)
        self.in_proj_a = linear(config.hidden_size, heads)
        self.conv1d = Weight(mixed, 1, config.linear_conv_kernel_dim)
        self.A_log = nn.Parameter(torch.zeros(heads))
        self.dt_bias = nn.Parameter(torch.zeros(heads))
        self.norm = Weight(config.linear_value_head_dim, value=1.0)
        self.out_proj = linear(config.value_dim, config.hidden_size)


class Layer(nn.Module):
    def __init__(self, config: TinyConfig, layer_type: str) -> None:
        super().__init__()
        if layer_type == "linear_attention":
            self.linear_attn = GatedDeltaNet(config)
        else:
            self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = Weight(config.hidden_size)
        self.post_attention_layernorm = Weight(config.hidden_size)

    @property
    def is_linear(self) -> bool:
        return hasattr(self, "linear_attn")

    def attention_weights(self) -> tuple[Tensor, ...]:
        """The weights of attention_inputs, in its order."""
        attn = self.self_attn
        modules = (self.input_layernorm, attn.q_proj, attn.k_proj, attn.v_proj, attn.q_norm, attn.k_norm)
        return tuple(module.weight for module in modules)

    def gdn_weights(self) -> tuple[Tensor, ...]:
        """The weights of gdn_inputs, in its order."""
        gdn = self.linear_attn
        modules = (
            self.input_layernorm,
            gdn.in_proj_qkv,
            gdn.in_proj_z,
            gdn.in_proj_b,
            gdn.in_proj_a,
            gdn.conv1d,
        )
        return (*(module.weight for module in modules), gdn.A_log, gdn.dt_bias)

    def mlp_weights(self) -> tuple[Tensor, ...]:
        """The weights of mlp_block, in its order."""
        mlp = self.mlp
        modules = (self.post_attention_layernorm, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        return tuple(module.weight for module in modules)

    def forward(self, x: Tensor, rope: Rope, sizes: Sizes, operators: Operators) -> Tensor:
        """x [B, T, H] at the positions of `rope`; T is a multiple of the chunk for a linear layer."""
        if self.is_linear:
            gdn = self.linear_attn
            z, parts = operators.gdn_inputs(x, *self.gdn_weights(), sizes)
            core = chunk_outputs(x.shape[0], parts)
            x = operators.gdn_result(x, core, z, gdn.norm.weight, gdn.out_proj.weight, sizes)
        else:
            o_w = self.self_attn.o_proj.weight
            x = operators.attention_block(x, *self.attention_weights(), o_w=o_w, rope=rope, sizes=sizes)
        return operators.mlp_block(x, *self.mlp_weights(), sizes)


class Trunk(nn.Module):
    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, layer_type) for layer_type in config.layer_types)
        self.norm = Weight(config.hidden_size)


class Head(nn.Module):
    """The MTP head: one attention layer that drafts tokens behind the trunk's next one."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.pre_fc_norm_embedding = Weight(config.hidden_size)
        self.pre_fc_norm_hidden = Weight(config.hidden_size)
        self.fc = linear(2 * config.hidden_size, config.hidden_size)
        self.layers = nn.ModuleList([Layer(config, "full_attention")])
        self.norm = Weight(config.hidden_size)


class Network(nn.Module):
    """Trunk and head; the state dict has exactly the checkpoint's names. Operators decide how layers run."""

    def __init__(self, config: TinyConfig, chunk: int = 32) -> None:
        super().__init__()
        self.config = config
        self.operators = EAGER
        self.sizes = Sizes(
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            config.linear_num_key_heads,
            config.linear_num_value_heads,
            config.linear_key_head_dim,
            config.linear_value_head_dim,
            chunk,
            config.rms_norm_eps,
        )
        self.model = Trunk(config)
        self.mtp = Head(config)
        exponents = torch.arange(0, config.rotary_dim, 2, dtype=torch.float32) / config.rotary_dim
        angles = torch.arange(config.max_position_embeddings).float()[:, None] * config.rope_theta**-exponents
        angles = torch.cat((angles, angles), dim=-1)
        self.rope = Rope(angles.cos(), angles.sin())

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Random weights; norms keep their neutral values."""
        generator = torch.Generator().manual_seed(seed)
        residual_std = 0.02 * (2 * self.config.num_hidden_layers) ** -0.5
        for name, parameter in self.named_parameters():
            if name.endswith("conv1d.weight"):
                parameter.uniform_(-0.5, 0.5, generator=generator)
            elif name.endswith("dt_bias"):
                draw_dt_bias(parameter, (-6.9, -1.6), generator)  # from 1/1000 to 1/5
            elif parameter.ndim == 2:
                parameter.normal_(0.0, residual_std if name.endswith(OUTPUTS) else 0.02, generator=generator)

    @property
    def unembedding(self) -> Tensor:
        """The tied output matrix [V, H]."""
        return self.model.embed_tokens.weight

    def trunk(self, ids: Tensor, entering: list[Tensor] | None = None) -> Tensor:
        """Hidden states after the final norm [B, T, H] for ids [B, T].

        What enters each full-attention layer [B, padded T, H] is appended to `entering`.
        """
        length = ids.shape[1]
        padding = -length % self.sizes.chunk  # behind the text, where causality hides it
        x = self.model.embed_tokens(F.pad(ids, (0, padding)))
        rope = self.rope.at(0, length + padding)
        for layer in self.model.layers:
            if entering is not None and not layer.is_linear:
                entering.append(x)
            x = layer(x, rope, self.sizes, self.operators)
        return rms_norm(x, self.model.norm.weight, self.sizes.eps)[:, :length]

    def head_input(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """fc of the normed embedding of the next token, then the normed hidden state; both [B, T]."""
        head, eps = self.mtp, self.sizes.eps
        embedded = rms_norm(self.model.embed_tokens(ids), head.pre_fc_norm_embedding.weight, eps)
        return head.fc(torch.cat((embedded, rms_norm(hidden, head.pre_fc_norm_hidden.weight, eps)), dim=-1))

    def head(self, hidden: Tensor, next_ids: Tensor) -> Tensor:
        """The head's first step for every position: hidden [B, T, H] of the trunk, next_ids [B, T] one token on."""
        x = self.head_input(hidden, next_ids)
        x = self.mtp.layers[0](x, self.rope.at(0, x.shape[1]), self.sizes, self.operators)
        return rms_norm(x, self.mtp.norm.weight, self.sizes.eps)
