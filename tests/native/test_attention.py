"""`rotary_store`, `attention_verify` and `attention_prefill` over paged caches full of NaN."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from metrale import reference
from metrale.kernels.groups import Groups
from metrale.native.attention import attention_prefill, attention_verify
from metrale.native.rotary import rotary_store
from tests.native.cases import Guarded, groups, randn, same_bits

EPS = 1e-6


@dataclass(frozen=True)
class Shape:
    num_heads: int = 4
    num_kv_heads: int = 2
    dim: int = 64
    rotary_dim: int = 16
    page_size: int = 16

    @property
    def width(self) -> int:
        return 2 * self.dim * (self.num_heads + self.num_kv_heads)


SHAPES = [
    Shape(),
    Shape(1, 1, 16, 16, 64),
    Shape(3, 1, 20, 10, 1),
    Shape(8, 2, 24, 6, 16),
    Shape(6, 3, 48, 12, 8),
    Shape(5, 1, 96, 48, 16),
    Shape(10, 2, 9, 2, 4),
    Shape(2, 2, 128, 0, 32),
    Shape(2, 1, 256, 64, 16),
]


class Cache:
    """One layer's pages, handed out in a scattered order, and the rotary table."""

    def __init__(self, shape: Shape, num_positions: int = 300, num_sequences: int = 3) -> None:
        self.shape = shape
        each = -(-num_positions // shape.page_size)
        order = torch.randperm(each * num_sequences + 2, generator=torch.Generator().manual_seed(3)).tolist()
        self.pages = [order[n * each : (n + 1) * each] for n in range(num_sequences)]
        size = (len(order), shape.page_size, shape.num_kv_heads, shape.dim)
        self.guards = [Guarded(*size), Guarded(*size)]
        self.k, self.v = (guard.tensor for guard in self.guards)
        angles = randn(num_positions, shape.rotary_dim // 2)
        self.cos, self.sin = angles.cos(), angles.sin()
        self.norms = randn(shape.dim, seed=1), randn(shape.dim, seed=2)

    def groups(self, triples: list[tuple[int, int, int]]) -> Groups:
        """Groups of (sequence, start, rows), the sequence as its own slot."""
        return groups(triples, [self.pages[n] for n, _, _ in triples])

    def index(self, triples: list[tuple[int, int, int]]) -> tuple[Tensor, Tensor]:
        """(positions, kv_index) of the groups' rows."""
        at = [(n, p) for n, start, rows in triples for p in range(start, start + rows)]
        size = self.shape.page_size
        places = [self.pages[n][p // size] * size + p % size for n, p in at]
        return torch.tensor([p for _, p in at], dtype=torch.int64), torch.tensor(places, dtype=torch.int64)

    def store(self, projected: Tensor, triples: list[tuple[int, int, int]]) -> Tensor:
        return rotary_store(
            projected, *self.norms, self.cos, self.sin, *self.index(triples), self.k, self.v, EPS
        )

    def verify(self, projected: Tensor, triples: list[tuple[int, int, int]]) -> Tensor:
        q = self.store(projected, triples)
        return attention_verify(q, projected, self.k, self.v, self.groups(triples))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rotary_store_parity(shape: Shape) -> None:
    ours, theirs = Cache(shape), Cache(shape)
    for seed, triples in enumerate([[(0, 0, 17), (1, 3, 1)], [(2, 299, 1)], []]):
        projected = randn(sum(t[2] for t in triples), shape.width, seed=seed)
        positions, kv_index = ours.index(triples)
        found = ours.store(projected, triples)
        expected = reference.ops().rotary_store(
            projected, *ours.norms, ours.cos, ours.sin, positions, kv_index, theirs.k, theirs.v, EPS
        )
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        for i in range(len(positions)):
            alone = rotary_store(
                projected[i : i + 1], *ours.norms, ours.cos, ours.sin, positions[i : i + 1], kv_index[i : i + 1],
                Cache(shape).k, Cache(shape).v, EPS,
            )  # fmt: skip
            assert same_bits(alone, found[i : i + 1])
    torch.testing.assert_close(ours.k, theirs.k, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert same_bits(ours.v, theirs.v)
    assert all(guard.is_intact() for guard in ours.guards)


@pytest.mark.parametrize("operator", ["attention_verify", "attention_prefill"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_parity(shape: Shape, operator: str) -> None:
    ours = {"attention_verify": attention_verify, "attention_prefill": attention_prefill}[operator]
    cache = Cache(shape)
    history = [(0, 0, 64), (1, 0, 17), (2, 0, 192)]
    cache.store(randn(273, shape.width, seed=3) * 2, history)
    steps = [[(0, 64, 17), (1, 17, 1), (2, 192, 3)], [(0, 0, 1)], [(0, 63, 2), (1, 5, 0), (2, 128, 90)], []]
    for seed, triples in enumerate(steps):
        projected = randn(sum(t[2] for t in triples), shape.width, seed=seed) * 2
        q, batch = cache.store(projected, triples), cache.groups(triples)
        before = cache.k.clone(), cache.v.clone()
        found = ours(q, projected, cache.k, cache.v, batch)
        expected = getattr(reference.ops(), operator)(q, projected, cache.k, cache.v, batch)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        assert same_bits(cache.k, before[0])
        assert same_bits(cache.v, before[1])


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[2], SHAPES[3], SHAPES[5]], ids=str)
def test_cuts_drafts_and_mates_change_no_bit(shape: Shape) -> None:
    rows, other = randn(150, shape.width), randn(150, shape.width, seed=7)
    plain = Cache(shape)
    expected = torch.cat([plain.verify(rows[p : p + 1], [(0, p, 1)]) for p in range(150)])
    cut, at = Cache(shape), 0
    for accepted, drafted in [(60, 0), (3, 13), (2, 15), (17, 0), (1, 9), (64, 3), (3, 0)]:
        mates = [(1, at, 5)] if drafted % 2 else []
        joined = torch.cat([rows[at : at + accepted], other[:drafted], other[at : at + 5 * len(mates)]])
        found = cut.verify(joined, [(0, at, accepted + drafted), *mates])
        assert same_bits(found[:accepted], expected[at : at + accepted])
        at += accepted
    assert at == 150


def test_a_later_row_of_nan_does_not_reach_back() -> None:
    shape = SHAPES[0]
    rows = randn(70, shape.width)
    expected = Cache(shape).verify(rows, [(0, 0, 70)])
    rows[66] = torch.nan
    found = Cache(shape).verify(rows, [(0, 0, 70)])
    assert same_bits(found[:66], expected[:66])
    assert found[66:].isnan().all()


def test_refusals_write_nothing() -> None:
    shape = SHAPES[0]
    cache = Cache(shape)
    projected = randn(2, shape.width)
    index = torch.tensor([0, 1])
    with pytest.raises(ValueError, match="rotary_store: positions"):
        rotary_store(projected, *cache.norms, cache.cos, cache.sin, index + 299, index, cache.k, cache.v, EPS)
    with pytest.raises(ValueError, match="rotary_store: page table or kv_index: a page"):
        rotary_store(projected, *cache.norms, cache.cos, cache.sin, index, index - 1, cache.k, cache.v, EPS)
    with pytest.raises(ValueError, match="rotary_store: positions and kv_index"):
        rotary_store(projected, *cache.norms, cache.cos, cache.sin, index.int(), index, cache.k, cache.v, EPS)
    q = randn(2, shape.num_heads, shape.dim)
    for pages in ([], [10_000], [-1]):
        with pytest.raises(ValueError, match="attention_verify: page table or kv_index: a page"):
            attention_verify(q, projected, cache.k, cache.v, groups([(0, 0, 2)], [pages]))
    with pytest.raises(ValueError, match="attention_verify: k_cache"):
        attention_verify(q, projected, cache.k.bfloat16(), cache.v, cache.groups([(0, 0, 2)]))
    assert cache.k.isnan().all()
    assert cache.v.isnan().all()
