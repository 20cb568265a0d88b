"""`conv_verify` and `gdn_verify` against a loop over rows in float64: K 0 to 16, ragged, folds, any company."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from metrale.reference.conv import conv_verify
from metrale.reference.gdn import gdn_verify
from metrale.state.pool import ring_lengths
from tests.reference.oracles import SHAPES, GdnShape, PlainLayer, groups_of, randn, relative_error

MAX_ROWS = 17
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-2}
STATE = ("ring_x", "ring_k", "ring_u", "ring_g", "ssm", "num_folded")


@dataclass
class Layer:
    """One layer's weights, a pool of its state that is NaN throughout, and how far each slot is committed."""

    shape: GdnShape
    dtype: torch.dtype = torch.float32
    fold_threshold: int = 8
    num_slots: int = 8

    def __post_init__(self) -> None:
        s = self.shape
        self.weights = (
            randn(s.num_channels, s.conv_width, seed=1),
            -randn(s.value_heads, seed=2).exp(),
            randn(s.value_heads, seed=3),
        )
        ring, conv_ring = ring_lengths(s.conv_width, MAX_ROWS, self.fold_threshold)

        def nan(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.full((self.num_slots, *size), torch.nan, dtype=dtype)

        self.ring_x = nan(conv_ring, s.num_channels, dtype=self.dtype)
        self.ring_k = nan(ring, s.key_heads, s.key_dim, dtype=self.dtype)
        self.ring_u = nan(ring, s.value_heads, s.value_dim)
        self.ring_g = nan(ring, s.value_heads)
        self.ssm = nan(s.value_heads, s.value_dim, s.key_dim)
        self.num_folded = torch.zeros(self.num_slots, s.value_heads, 1, dtype=torch.int32)
        self.length = [0] * self.num_slots

    def verify(self, rows: dict[int, Tensor]) -> dict[int, Tensor]:
        """Outputs by slot for new rows by slot, in the order given; nothing is committed."""
        groups = groups_of([(slot, self.length[slot], len(x)) for slot, x in rows.items()])
        projected = torch.cat([*rows.values(), torch.empty(0, self.shape.width, dtype=self.dtype)])
        rings = (self.ring_x, self.ring_k, self.ring_g)
        q, v, beta = conv_verify(projected, *self.weights, *rings, groups)
        state = (self.ring_k, self.ring_u, self.ring_g, self.ssm, self.num_folded)
        out = gdn_verify(q, v, beta, *state, groups, self.fold_threshold)
        return dict(zip(rows, out.split([len(x) for x in rows.values()]), strict=True))

    def decode(self, slot: int, x: Tensor) -> Tensor:
        """Rows one a step, all committed."""
        parts = []
        for row in x:
            parts.append(self.verify({slot: row[None]})[slot])
            self.length[slot] += 1
        return torch.cat(parts)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [*((shape, torch.float32) for shape in SHAPES), (SHAPES[0], torch.bfloat16), (SHAPES[5], torch.bfloat16)],
)
def test_ragged_groups_against_the_loop(shape: GdnShape, dtype: torch.dtype) -> None:
    """Every K from 0 to 16 and every count of kept rows comes up; wrong rows are random and leave no trace."""
    layer, rng = Layer(shape, dtype), random.Random(0)
    slots = [0, 2, 3, 6]
    plain = {slot: PlainLayer(shape, *layer.weights) for slot in slots}
    depths = [rng.sample(range(MAX_ROWS), MAX_ROWS) for _ in slots]
    worst = 0.0
    for step, ks in enumerate(zip(*depths, strict=True)):
        rows, kept = {}, {}
        for slot, k in zip(slots, ks, strict=True):
            rows[slot] = randn(k + 1, shape.width, seed=100 * step + slot).to(dtype)
            kept[slot] = rng.randint(0, k + 1)
        out = layer.verify(rows)
        for slot in slots:
            for i in range(kept[slot]):
                worst = max(worst, relative_error(out[slot][i], plain[slot].row(rows[slot][i])))
            layer.length[slot] += kept[slot]
            assert not out[slot].isnan().any()
    assert min(layer.length[slot] for slot in slots) > 40
    assert worst < TOLERANCE[dtype]
    others = [slot for slot in range(layer.num_slots) if slot not in slots]
    assert all(getattr(layer, name)[others].isnan().all() for name in STATE[:-1])
    assert not layer.num_folded[others].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [GdnShape(ratio=3, conv_width=3), GdnShape(ratio=1)], ids=str)
@pytest.mark.parametrize("fold_threshold", [0, 3, 16, 40])
def test_rows_together_equal_rows_one_by_one(
    fold_threshold: int, shape: GdnShape, dtype: torch.dtype
) -> None:
    """Bit for bit: K and the fold threshold are a question of speed."""
    x = randn(60, shape.width).to(dtype)
    expected = Layer(shape, dtype, fold_threshold=0).decode(1, x)
    layer, done, k = Layer(shape, dtype, fold_threshold), 0, 0
    while done < 60:
        rows = x[done : done + 1 + k]
        got = layer.verify({4: rows})[4]
        assert torch.equal(got, expected[done : done + len(rows)]), f"K {k} at row {done}"
        num_kept = max(1, len(rows) // 2)
        layer.length[4] += num_kept
        done, k = done + num_kept, (k + 5) % MAX_ROWS


def test_company_and_order_change_no_bit() -> None:
    """Groups added, removed and permuted: outputs and all state of a slot stay the same."""
    shape, rng = GdnShape(ratio=2), random.Random(1)
    sizes = [1, 17, 0, 5, 2, 9]
    before = [randn(3, shape.width, seed=n) for n in range(len(sizes))]
    new = [randn(size, shape.width, seed=50 + n) for n, size in enumerate(sizes)]

    def run(chosen: list[int]) -> tuple[Layer, dict[int, Tensor]]:
        layer = Layer(shape)
        for n in chosen:
            layer.decode(n, before[n])
        return layer, layer.verify({n: new[n] for n in chosen})

    alone = {n: run([n]) for n in range(len(sizes))}
    for _ in range(6):
        chosen = rng.sample(range(len(sizes)), rng.randint(2, len(sizes)))
        layer, out = run(chosen)
        for n in chosen:
            single, expected = alone[n]
            assert torch.equal(out[n], expected[n])
            for name in STATE:
                assert torch.equal(
                    getattr(layer, name)[n].nan_to_num(7.0), getattr(single, name)[n].nan_to_num(7.0)
                ), name


def test_a_verify_leaves_the_logical_state_alone() -> None:
    """The state moves by a fold alone, and a fold stores what the ring already says."""
    shape = GdnShape()
    layer = Layer(shape, fold_threshold=40)
    layer.decode(0, randn(6, shape.width))
    layer.verify({0: randn(17, shape.width, seed=9)})
    assert layer.ssm.isnan().all()
    assert not layer.num_folded.any()
    layer.fold_threshold = 0
    layer.verify({0: randn(0, shape.width)})
    assert layer.num_folded[0].unique().tolist() == [6]
    plain = PlainLayer(shape, *layer.weights)
    for row in randn(6, shape.width):
        plain.row(row)
    assert relative_error(layer.ssm[0], plain.rule.state) < 1e-5
    folded = layer.ssm[0].clone()
    layer.verify({0: randn(17, shape.width, seed=9)})
    assert torch.equal(layer.ssm[0], folded)


@pytest.mark.parametrize(("num_folded", "start", "num_rows"), [(0, 26, 9), (5, 4, 1), (0, 35, 0)])
def test_rows_that_do_not_fit_the_ring_are_refused(num_folded: int, start: int, num_rows: int) -> None:
    layer = Layer(GdnShape())
    assert layer.ring_k.shape[1] == 34
    layer.num_folded.fill_(num_folded)
    layer.length[0] = start
    before = layer.ring_u.clone()
    with pytest.raises(ValueError, match=f"gdn_verify: {start - num_folded} pending and {num_rows} new rows"):
        layer.verify({0: randn(num_rows, layer.shape.width)})
    assert torch.equal(before.nan_to_num(), layer.ring_u.nan_to_num())


def test_channels_must_agree() -> None:
    layer = Layer(GdnShape())
    x = randn(2, layer.shape.width)
    weight, *gates = layer.weights
    rings = (layer.ring_x, layer.ring_k, layer.ring_g)
    groups = groups_of([(0, 0, 2)])
    with pytest.raises(ValueError, match="conv_verify: conv_weight has"):
        conv_verify(x, weight[1:], *gates, *rings, groups)
    with pytest.raises(ValueError, match="conv_verify: projected has"):
        conv_verify(x[:, : layer.shape.num_channels], weight, *gates, *rings, groups)
