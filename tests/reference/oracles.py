"""Gated delta rule, convolution and attention by the book: one row at a time, float64, no state but Python lists."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from metrale.kernels.groups import Groups


def randn(*size: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(size))
    return torch.randn(*size, generator=generator, device="cpu").to(torch.get_default_device())


def relative_error(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected).abs().max() / expected.abs().max())


def groups_of(
    triples: Sequence[tuple[int, int, int]], pages: Sequence[Sequence[int]] | None = None
) -> Groups:
    """Groups from (slot, start, num_rows) triples, with a page list each where attention is meant."""
    return Groups.build(
        list(triples),
        [list(p) for p in pages] if pages else [[] for _ in triples],
        torch.get_default_device(),
    )


@dataclass(frozen=True)
class GdnShape:
    """Dimensions of one Gated DeltaNet layer."""

    key_heads: int = 2
    ratio: int = 2
    key_dim: int = 10
    value_dim: int = 7
    conv_width: int = 4

    @property
    def value_heads(self) -> int:
        return self.key_heads * self.ratio

    @property
    def num_channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def width(self) -> int:
        return self.num_channels + self.value_heads * (self.value_dim + 2)


SHAPES = [GdnShape(ratio=ratio, conv_width=width) for ratio in (1, 2, 3, 4) for width in (3, 4)]


@dataclass
class DeltaRule:
    """S = S e^g; u = beta (v - S k); S = S + u k^T; o = S q, with S [Hv, dv, dk] in float64."""

    shape: GdnShape
    state: Tensor = field(init=False)

    def __post_init__(self) -> None:
        s = self.shape
        self.state = torch.zeros(s.value_heads, s.value_dim, s.key_dim, dtype=torch.float64)

    def row(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        """q, k [Hk, dk]; v [Hv, dv]; g, beta [Hv]; the output [Hv, dv]."""
        out = torch.empty(self.shape.value_heads, self.shape.value_dim, dtype=torch.float64)
        for head in range(self.shape.value_heads):
            key, query = k[head // self.shape.ratio].double(), q[head // self.shape.ratio].double()
            state = self.state[head] * math.exp(float(g[head]))
            u = float(beta[head]) * (v[head].double() - state @ key)
            self.state[head] = state + torch.outer(u, key)
            out[head] = self.state[head] @ query
        return out


@dataclass
class PlainLayer:
    """Convolution, gates and recurrence of one sequence, fed one projected row at a time."""

    shape: GdnShape
    conv_weight: Tensor
    neg_exp_a: Tensor
    dt_bias: Tensor
    rule: DeltaRule = field(init=False)
    inputs: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rule = DeltaRule(self.shape)

    def row(self, projected: Tensor) -> Tensor:
        """The recurrence's output [Hv, dv] for a projected row q | k | v | z | b | a."""
        s, channels = self.shape, self.shape.num_channels
        self.inputs.append(projected[:channels].double())
        mixed = torch.zeros(channels, dtype=torch.float64)
        for back, x in enumerate(reversed(self.inputs[-s.conv_width :])):
            mixed += x * self.conv_weight[:, s.conv_width - 1 - back].double()
        mixed = mixed / (1 + torch.exp(-mixed))
        num_qk = s.key_heads * s.key_dim
        q, k = (mixed[i * num_qk : (i + 1) * num_qk].view(s.key_heads, s.key_dim) for i in (0, 1))
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        b, a = projected[-2 * s.value_heads :].double().view(2, s.value_heads)
        g = self.neg_exp_a.double() * torch.log1p(torch.exp(a + self.dt_bias.double()))
        v = mixed[2 * num_qk :].view(s.value_heads, s.value_dim)
        return self.rule.row(q * s.key_dim**-0.5, k, v, g, 1 / (1 + torch.exp(-b)))


def plain_attention(q: Tensor, keys: Tensor, values: Tensor, gate: Tensor, position: int) -> Tensor:
    """One row's [H, dh] over keys and values [n, Hkv, dh] of positions 0 .. `position`, times sigmoid(gate)."""
    ratio = q.shape[0] // keys.shape[1]
    out = torch.empty(q.shape, dtype=torch.float64)
    for head in range(q.shape[0]):
        seen = keys[: position + 1, head // ratio].double()
        weights = torch.softmax(seen @ q[head].double() * q.shape[1] ** -0.5, dim=0)
        out[head] = weights @ values[: position + 1, head // ratio].double()
    return out / (1 + torch.exp(-gate.double()))
