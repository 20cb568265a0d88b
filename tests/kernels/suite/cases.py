"""Inputs, tolerances and pools that the kernel tests share."""

from __future__ import annotations

import torch
from torch import Tensor

from metrale.kernels.gdn_verify import num_tiles
from tests.reference import oracles
from tests.reference.oracles import GdnShape

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Most difference of a result, relative to its largest element, by activation dtype."""


def randn(*size: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return oracles.randn(*size, seed=seed).to(dtype)


def permutation(size: int) -> Tensor:
    return torch.randperm(size, generator=torch.Generator().manual_seed(size), device="cpu")


def assert_near(got: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Equal shapes and dtypes, NaN at the same places, all else within the dtype's tolerance."""
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    assert torch.equal(got.isnan(), expected.isnan())
    a, b = got.double().nan_to_num(), expected.double().nan_to_num()
    if a.numel():
        assert float((a - b).abs().max()) <= TOLERANCES[dtype] * max(float(b.abs().max()), 1e-9)


GDN_SHAPES = [
    GdnShape(2, 2, 20, 24, 4),
    GdnShape(1, 3, 16, 40, 3),
    GdnShape(1, 2, 9, 40, 2),  # two tiles a head
    GdnShape(1, 4, 32, 64, 4),
]


class GdnPool:
    """The state of one Gated DeltaNet layer, NaN throughout but for `num_folded`."""

    NAMES = ("ring_x", "ring_k", "ring_u", "ring_g", "ssm", "num_folded")

    def __init__(self, shape: GdnShape, dtype: torch.dtype, num_slots: int = 4, max_rows: int = 17) -> None:
        ring, heads = 2 * max_rows, shape.value_heads
        self.ring_x = torch.full(
            (num_slots, shape.conv_width - 1 + max_rows, shape.num_channels), torch.nan, dtype=dtype
        )
        self.ring_k = torch.full((num_slots, ring, shape.key_heads, shape.key_dim), torch.nan, dtype=dtype)
        self.ring_u = torch.full((num_slots, ring, heads, shape.value_dim), torch.nan)
        self.ring_g = torch.full((num_slots, ring, heads), torch.nan)
        self.ssm = torch.full((num_slots, heads, shape.value_dim, shape.key_dim), torch.nan)
        tiles = num_tiles(shape.key_dim, shape.value_dim)
        self.num_folded = torch.zeros(num_slots, heads, tiles, dtype=torch.int32)

    def copy_from(self, other: GdnPool) -> None:
        for name in self.NAMES:
            getattr(self, name).copy_(getattr(other, name))

    def assert_near(self, other: GdnPool, dtype: torch.dtype) -> None:
        for name in self.NAMES[:-1]:
            assert_near(getattr(self, name), getattr(other, name), dtype)
        assert torch.equal(self.num_folded, other.num_folded)


class Layer:
    """Random weights and rows of one Gated DeltaNet layer."""

    def __init__(self, shape: GdnShape, num_rows: int, dtype: torch.dtype, seed: int = 0) -> None:
        self.projected = randn(num_rows, shape.width, seed=seed, dtype=dtype)
        self.weights = (
            randn(shape.num_channels, shape.conv_width, seed=1),
            -randn(shape.value_heads, seed=2).abs(),
            randn(shape.value_heads, seed=3),
        )
