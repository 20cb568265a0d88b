"""`rotary_store` and attention over pages against a plain softmax in float64, shuffled pages, any company."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from metrale.reference.attention import attention_prefill, attention_verify, rotary_store
from tests.reference.oracles import groups_of, plain_attention, randn, relative_error

PAGE_SIZE = 16
NUM_POSITIONS = 160
EPS = 1e-6
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class Shape:
    num_heads: int = 6
    num_kv_heads: int = 2
    dim: int = 10
    rotary_dim: int = 4

    @property
    def width(self) -> int:
        return 2 * self.dim * (self.num_heads + self.num_kv_heads)


SHAPES = [Shape(), Shape(2, 2, 7, 6), Shape(4, 1, 16, 16), Shape(3, 3, 5, 2)]


class Rows(NamedTuple):
    """A sequence's new rows at `start`."""

    start: int
    projected: Tensor  # [rows, width]


@dataclass
class Cache:
    """Norms, rotary tables and pages that start as NaN; each sequence owns pages drawn at random."""

    shape: Shape
    dtype: torch.dtype = torch.float32
    seed: int = 0
    pages: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        s, num_pages = self.shape, 60
        self.free = random.Random(self.seed).sample(range(num_pages), num_pages)
        size = (num_pages, PAGE_SIZE, s.num_kv_heads, s.dim)
        self.k_cache = torch.full(size, torch.nan, dtype=self.dtype)
        self.v_cache = torch.full(size, torch.nan, dtype=self.dtype)
        self.norms = (1 + 0.3 * randn(s.dim), 1 + 0.3 * randn(s.dim, seed=1))
        angles = torch.arange(NUM_POSITIONS)[:, None] * 0.3 ** torch.arange(s.rotary_dim // 2)
        self.rotary = (angles.cos(), angles.sin())

    def run(self, rows: dict[int, Rows], *, is_prompt: bool) -> dict[int, Tensor]:
        """Outputs [rows, H dh] by sequence, for new rows by sequence."""
        for n in rows:
            if n not in self.pages:
                self.pages[n] = [self.free.pop() for _ in range(NUM_POSITIONS // PAGE_SIZE)]
        positions = torch.cat([torch.arange(r.start, r.start + len(r.projected)) for r in rows.values()])
        at = [self._at(n, torch.arange(r.start, r.start + len(r.projected))) for n, r in rows.items()]
        projected = torch.cat([r.projected for r in rows.values()])
        caches = (self.k_cache, self.v_cache)
        q = rotary_store(projected, *self.norms, *self.rotary, positions, torch.cat(at), *caches, EPS)
        triples = [(n, r.start, len(r.projected)) for n, r in rows.items()]
        groups = groups_of(triples, [self.pages[n] for n in rows])
        attend = attention_prefill if is_prompt else attention_verify
        out = attend(q, projected, *caches, groups)
        return dict(zip(rows, out.split([len(r.projected) for r in rows.values()]), strict=True))

    def _at(self, n: int, positions: Tensor) -> Tensor:
        return torch.tensor(self.pages[n])[positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE

    def stored(self, n: int, num_rows: int) -> tuple[Tensor, Tensor]:
        at = self._at(n, torch.arange(num_rows))
        return self.k_cache.flatten(0, 1)[at], self.v_cache.flatten(0, 1)[at]


def plain_rows(cache: Cache, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(q, k, v, gate) of projected rows from position 0, norms and rotation by the book."""
    s, x = cache.shape, x.double()
    queries, keys, values = x.split(
        [2 * s.num_heads * s.dim, s.num_kv_heads * s.dim, s.num_kv_heads * s.dim], dim=1
    )
    q, gate = queries.view(len(x), s.num_heads, 2, s.dim).unbind(2)
    k = keys.view(len(x), s.num_kv_heads, s.dim)
    q, k = (
        y / (y.square().mean(-1, keepdim=True) + EPS).sqrt() * norm.double()
        for y, norm in zip((q, k), cache.norms, strict=True)
    )
    half = s.rotary_dim // 2
    for y in (q, k):
        for p in range(len(x)):
            for i in range(half):
                cos, sin = float(cache.rotary[0][p, i]), float(cache.rotary[1][p, i])
                first, second = y[p, :, i].clone(), y[p, :, i + half].clone()
                y[p, :, i], y[p, :, i + half] = first * cos - second * sin, second * cos + first * sin
    return q, k, values.view(len(x), s.num_kv_heads, s.dim), gate


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_sequence_against_plain_softmax(shape: Shape, dtype: torch.dtype) -> None:
    """A prompt of one unit and a tail, then ragged verifies over the block edge at 128."""
    cache, x = Cache(shape, dtype), randn(140, shape.width).to(dtype)
    parts, start = [], 0
    for num_rows, is_prompt in [
        (64, True),
        (33, True),
        (1, False),
        (17, False),
        (13, False),
        (5, False),
        (7, False),
    ]:
        parts.append(cache.run({1: Rows(start, x[start : start + num_rows])}, is_prompt=is_prompt)[1])
        start += num_rows
    assert start == 140
    q, k, v, gate = plain_rows(cache, x)
    expected = torch.stack([plain_attention(q[p], k, v, gate[p], p) for p in range(140)])
    assert relative_error(torch.cat(parts).view(expected.shape), expected) < TOLERANCE[dtype]
    keys, values = cache.stored(1, 140)
    assert relative_error(keys, k) < TOLERANCE[dtype]
    assert torch.equal(values, x[:, -shape.num_kv_heads * shape.dim :].view(values.shape))
    untouched = cache.k_cache[cache.free]
    assert untouched.isnan().all(), "a page that nobody owns was written"


@pytest.mark.parametrize("is_prompt", [True, False])
def test_company_order_and_pages_change_no_bit(is_prompt: bool) -> None:
    shape, rng = Shape(), random.Random(0)
    sizes = [1, 30, 5, 64, 2] if is_prompt else [1, 17, 5, 9, 2]
    starts = [0, 64, 0, 64, 128] if is_prompt else [3, 64, 1, 60, 127]
    known = [randn(start, shape.width, seed=start + n) for n, start in enumerate(starts)]
    new = [randn(size, shape.width, seed=50 + n) for n, size in enumerate(sizes)]

    def run(chosen: list[int], seed: int) -> dict[int, Tensor]:
        cache = Cache(shape, seed=seed)
        for n in chosen:
            cache.run({n: Rows(0, known[n])}, is_prompt=True)
        return cache.run({n: Rows(starts[n], new[n]) for n in chosen}, is_prompt=is_prompt)

    alone = {n: run([n], seed=0)[n] for n in range(len(sizes))}
    for seed in range(1, 6):
        chosen = rng.sample(range(len(sizes)), rng.randint(2, len(sizes)))
        got = run(chosen, seed)
        assert all(torch.equal(got[n], alone[n]) for n in chosen)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_together_equal_rows_one_by_one(dtype: torch.dtype) -> None:
    shape, x = Shape(), randn(80, Shape().width).to(dtype)
    single, several = Cache(shape, dtype), Cache(shape, dtype, seed=1)
    expected = torch.cat([single.run({0: Rows(p, x[p : p + 1])}, is_prompt=False)[0] for p in range(80)])
    start = 0
    for k in (0, 16, 3, 8, 1, 15, 2, 11, 7, 6):
        got = several.run({0: Rows(start, x[start : start + k + 1])}, is_prompt=False)[0]
        assert torch.equal(got, expected[start : start + k + 1])
        start += (k + 2) // 2


def test_prompt_pieces_equal_the_whole() -> None:
    shape, x = Shape(), randn(150, Shape().width)
    expected = Cache(shape).run({0: Rows(0, x)}, is_prompt=True)[0]
    cache = Cache(shape, seed=1)
    parts = [cache.run({0: Rows(a, x[a:b])}, is_prompt=True)[0] for a, b in ((0, 64), (64, 128), (128, 150))]
    assert torch.equal(torch.cat(parts), expected)


@pytest.mark.parametrize("num_right", [0, 1, 2, 4])
def test_a_later_row_never_reaches_an_earlier_one(num_right: int) -> None:
    """A draft row that holds NaN spoils itself and the drafts after it, nothing before."""
    shape, x = Shape(), randn(40, Shape().width)
    expected = Cache(shape).run({0: Rows(0, x[:5])}, is_prompt=False)[0]
    bad = x[:5].clone()
    bad[num_right:] = torch.nan
    got = Cache(shape).run({0: Rows(0, bad)}, is_prompt=False)[0]
    assert torch.equal(got[:num_right], expected[:num_right])
    assert got[num_right:].isnan().all()


def test_a_width_that_is_no_projection_is_refused() -> None:
    cache = Cache(Shape())
    with pytest.raises(ValueError, match="rotary_store: projected has"):
        cache.run({0: Rows(0, randn(2, cache.shape.width + 1))}, is_prompt=False)
