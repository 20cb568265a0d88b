"""`conv_prefill` and `gdn_chunk` against a loop over rows in float64, ragged, in pieces, and in any company."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from metrale.reference.conv import conv_prefill
from metrale.reference.gdn import CHUNK, gdn_chunk
from tests.reference.oracles import SHAPES, GdnShape, PlainLayer, groups_of, randn, relative_error

LENGTHS = (1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 129)
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2}


class Out(NamedTuple):
    rows: Tensor  # [T, Hv, dv]
    ssm: Tensor
    ring_x: Tensor


@dataclass
class Layer:
    """One layer's weights and a pool of its state, NaN throughout."""

    shape: GdnShape
    dtype: torch.dtype = torch.float32
    num_slots: int = len(LENGTHS) + 1
    conv_ring: int = 9

    def __post_init__(self) -> None:
        s, nan = self.shape, torch.nan
        self.weights = (
            randn(s.num_channels, s.conv_width, seed=1),
            -randn(s.value_heads, seed=2).exp(),
            randn(s.value_heads, seed=3),
        )
        self.ring_x = torch.full((self.num_slots, self.conv_ring, s.num_channels), nan, dtype=self.dtype)
        self.ring_k = torch.full((self.num_slots, 8, s.key_heads, s.key_dim), nan, dtype=self.dtype)
        self.ring_g = torch.full((self.num_slots, 8, s.value_heads), nan)
        self.ssm = torch.full((self.num_slots, s.value_heads, s.value_dim, s.key_dim), nan)
        self.num_folded = torch.zeros(self.num_slots, s.value_heads, 1, dtype=torch.int32)

    def run(self, projected: Tensor, triples: list[tuple[int, int, int]]) -> Tensor:
        groups = groups_of(triples)
        q, k, v, g, beta = conv_prefill(
            projected, *self.weights, self.ring_x, self.ring_k, self.ring_g, groups
        )
        return gdn_chunk(q, k, v, g, beta, self.ssm, self.num_folded, groups)


def prompts(shape: GdnShape, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [randn(n, shape.width, seed=n).to(dtype) for n in LENGTHS]


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [*((shape, torch.float32) for shape in SHAPES), (SHAPES[0], torch.bfloat16), (SHAPES[5], torch.bfloat16)],
)
def test_ragged_batch_against_the_loop(shape: GdnShape, dtype: torch.dtype) -> None:
    layer, inputs = Layer(shape, dtype), prompts(shape, dtype)
    triples = [(slot + 1, 0, len(x)) for slot, x in enumerate(inputs)]
    out = layer.run(torch.cat(inputs), triples)
    first = 0
    for (slot, _, num_rows), x in zip(triples, inputs, strict=True):
        plain = PlainLayer(shape, *layer.weights)
        expected = torch.stack([plain.row(row) for row in x])
        assert relative_error(out[first : first + num_rows], expected) < TOLERANCE[dtype], num_rows
        assert relative_error(layer.ssm[slot], plain.rule.state) < TOLERANCE[dtype], num_rows
        assert layer.num_folded[slot].unique().tolist() == [num_rows]
        kept = range(max(0, num_rows - layer.conv_ring), num_rows)
        assert all(
            torch.equal(layer.ring_x[slot, p % layer.conv_ring], x[p, : shape.num_channels]) for p in kept
        )
        first += num_rows
    assert layer.ssm[0].isnan().all(), "a slot outside the batch was written"
    assert layer.ring_k.isnan().all()
    assert layer.ring_g.isnan().all(), "prompt rows leave the recurrence's rings alone"


@pytest.mark.parametrize("cuts", [[64, 128], [64], [128]])
def test_a_prompt_in_pieces(cuts: list[int]) -> None:
    """Cut at multiples of 64 into several calls: not one bit of rows or state differs."""
    shape = GdnShape(ratio=3)
    x = randn(170, shape.width)
    whole, pieces = Layer(shape), Layer(shape)
    expected = whole.run(x, [(1, 0, 170)])
    bounds = [0, *cuts, 170]
    parts = [pieces.run(x[first:last], [(2, first, last - first)]) for first, last in pairwise(bounds)]
    assert torch.equal(torch.cat(parts), expected)
    assert torch.equal(pieces.ssm[2], whole.ssm[1])
    ends = torch.arange(170 - shape.conv_width + 1, 170) % whole.conv_ring
    assert torch.equal(pieces.ring_x[2, ends], whole.ring_x[1, ends])


def test_company_and_order_change_no_bit() -> None:
    shape = GdnShape(ratio=2)
    inputs = prompts(shape)
    alone = {}
    for n, x in enumerate(inputs):
        layer = Layer(shape)
        rows = layer.run(x, [(3, 0, len(x))])
        alone[n] = Out(rows, layer.ssm[3], layer.ring_x[3])
    rng = random.Random(0)
    for _ in range(6):
        chosen = rng.sample(range(len(inputs)), rng.randint(2, len(inputs)))
        layer = Layer(shape)
        slots = rng.sample(range(layer.num_slots), len(chosen))
        out = layer.run(
            torch.cat([inputs[n] for n in chosen]),
            [(s, 0, len(inputs[n])) for s, n in zip(slots, chosen, strict=True)],
        )
        for slot, n, rows in zip(slots, chosen, out.split([len(inputs[n]) for n in chosen]), strict=True):
            assert torch.equal(rows, alone[n].rows)
            assert torch.equal(layer.ssm[slot], alone[n].ssm)
            assert torch.equal(layer.ring_x[slot].nan_to_num(), alone[n].ring_x.nan_to_num())


@pytest.mark.parametrize("start", [1, 63, 65, 100])
def test_a_start_off_the_grid_is_refused(start: int) -> None:
    layer = Layer(GdnShape())
    layer.num_folded.fill_(start)
    with pytest.raises(ValueError, match=f"gdn_chunk: group at row {start} needs a multiple of {CHUNK}"):
        layer.run(randn(2, layer.shape.width), [(0, start, 2)])


@pytest.mark.parametrize("num_folded", [0, 60, 65, 128])
def test_pending_rows_are_refused(num_folded: int) -> None:
    """As after a chunk that raised half-way: the state has moved, so the prompt must start over."""
    layer = Layer(GdnShape())
    layer.num_folded.fill_(num_folded)
    with pytest.raises(ValueError, match="with nothing pending"):
        layer.run(randn(2, layer.shape.width), [(0, 64, 2)])


def test_no_groups() -> None:
    layer = Layer(GdnShape())
    out = layer.run(torch.empty(0, layer.shape.width), [])
    assert out.shape == (0, layer.shape.value_heads, layer.shape.value_dim)


def test_strong_decay_and_full_write() -> None:
    """Gates at their ends: decay to nothing and beta near 1 overflow nothing."""
    shape = GdnShape()
    x = randn(129, shape.width)
    x[::3, -shape.value_heads :] = 60.0  # softplus(60): the state is forgotten
    x[:, -2 * shape.value_heads : -shape.value_heads] = 30.0
    layer = Layer(shape)
    out = layer.run(x, [(0, 0, 129)])
    plain = PlainLayer(shape, *layer.weights)
    expected = torch.stack([plain.row(row) for row in x])
    assert relative_error(out, expected) < 1e-4
