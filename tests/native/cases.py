"""Inputs that several tests of the kernels draw from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from metrale.kernels.groups import Groups

CANARY = 12345.0
GUARD = 256
CPU = torch.device("cpu")


def randn(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed + sum(size)))


class Guarded:
    """A tensor filled with `fill` between two runs of canaries."""

    def __init__(self, *size: int, fill: float = torch.nan, dtype: torch.dtype = torch.float32) -> None:
        count = torch.Size(size).numel()
        self._memory = torch.full((count + 2 * GUARD,), CANARY, dtype=dtype)
        self.tensor = self._memory[GUARD : GUARD + count].view(size).fill_(fill)

    def is_intact(self) -> bool:
        return bool((self._memory[:GUARD] == CANARY).all() and (self._memory[-GUARD:] == CANARY).all())


@dataclass(frozen=True)
class GdnShape:
    key_heads: int = 2
    value_heads: int = 4
    key_dim: int = 20
    value_dim: int = 24
    num_taps: int = 4

    @property
    def num_channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def width(self) -> int:
        return self.num_channels + self.value_heads * (self.value_dim + 2)


GDN_SHAPES = [
    GdnShape(1, 1, 16, 16, 3),
    GdnShape(2, 4, 20, 24, 4),
    GdnShape(1, 3, 48, 20, 3),
    GdnShape(2, 2, 64, 64, 4),
    GdnShape(1, 4, 96, 48, 4),
    GdnShape(1, 2, 128, 128, 2),
    GdnShape(3, 3, 9, 7, 5),
]


class GdnPool:
    """The state of one Gated DeltaNet layer, NaN throughout but for `num_folded`, between canaries."""

    def __init__(
        self, shape: GdnShape, num_slots: int = 4, max_rows: int = 17, fold_threshold: int = 8
    ) -> None:
        ring = max(fold_threshold, max_rows) + max_rows
        self.shape = shape
        self.guards = {
            "ring_x": Guarded(num_slots, shape.num_taps - 1 + max_rows, shape.num_channels),
            "ring_k": Guarded(num_slots, ring, shape.key_heads, shape.key_dim),
            "ring_u": Guarded(num_slots, ring, shape.value_heads, shape.value_dim),
            "ring_g": Guarded(num_slots, ring, shape.value_heads),
            "ssm": Guarded(num_slots, shape.value_heads, shape.value_dim, shape.key_dim),
            "num_folded": Guarded(num_slots, shape.value_heads, 1, fill=0, dtype=torch.int32),
        }

    def __getattr__(self, name: str) -> Tensor:
        return self.__dict__["guards"][name].tensor

    def copy_from(self, other: GdnPool) -> GdnPool:
        for name, guard in self.guards.items():
            guard.tensor.copy_(other.guards[name].tensor)
        return self

    def differences(self, other: GdnPool) -> list[str]:
        """Names of the tensors that differ in a bit; NaN equals NaN."""
        pairs = {name: (guard.tensor, other.guards[name].tensor) for name, guard in self.guards.items()}
        return [name for name, (a, b) in pairs.items() if not same_bits(a, b)]

    def is_intact(self) -> bool:
        return all(guard.is_intact() for guard in self.guards.values())


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.view(torch.int32), b.view(torch.int32))


def groups(triples: Sequence[tuple[int, int, int]], pages: Sequence[Sequence[int]] | None = None) -> Groups:
    """Groups from (slot, start, num_rows) triples."""
    return Groups.build(list(triples), [list(p) for p in pages] if pages else [[] for _ in triples], CPU)


def gdn_weights(shape: GdnShape) -> tuple[Tensor, Tensor, Tensor]:
    """(conv_weight, neg_exp_a, dt_bias)."""
    return (
        randn(shape.num_channels, shape.num_taps, seed=1),
        -randn(shape.value_heads, seed=2).exp(),
        randn(shape.value_heads, seed=3),
    )
