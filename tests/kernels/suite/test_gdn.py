"""`conv_verify`, `gdn_verify`, `conv_prefill` and `gdn_chunk`: parity over steps, and rows that do not see one another."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from metrale import reference
from metrale.kernels import gdn_chunk as chunk_module
from metrale.kernels.conv_prefill import conv_prefill
from metrale.kernels.conv_verify import conv_verify
from metrale.kernels.gdn_chunk import gdn_chunk
from metrale.kernels.gdn_verify import gdn_verify
from metrale.kernels.ops import Ops
from metrale.kernels.products import NUM_PARTS
from tests.kernels.suite.cases import (
    DTYPES,
    GDN_SHAPES,
    GdnPool,
    GdnShape,
    Layer,
    assert_near,
)
from tests.reference.oracles import groups_of

SHAPE = GDN_SHAPES[0]
ORACLE = reference.ops()
Triples = list[tuple[int, int, int]]


def verify(
    table: Ops | None, pool: GdnPool, layer: Layer, rows: Tensor, triples: Triples, fold: int
) -> Tensor:
    """A verify of rows of `layer.projected` by the kernels (None) or an oracle."""
    conv, gdn = (conv_verify, gdn_verify) if table is None else (table.conv_verify, table.gdn_verify)
    groups = groups_of(triples)
    q, v, beta = conv(rows, *layer.weights, pool.ring_x, pool.ring_k, pool.ring_g, groups)
    rings = (pool.ring_k, pool.ring_u, pool.ring_g)
    return gdn(
        q.contiguous(), v.contiguous(), beta.contiguous(), *rings, pool.ssm, pool.num_folded, groups, fold
    )


def prefill(table: Ops | None, pool: GdnPool, layer: Layer, rows: Tensor, triples: Triples) -> Tensor:
    conv, gdn = (conv_prefill, gdn_chunk) if table is None else (table.conv_prefill, table.gdn_chunk)
    groups = groups_of(triples)
    parts = conv(rows, *layer.weights, pool.ring_x, pool.ring_k, pool.ring_g, groups)
    return gdn(*(part.contiguous() for part in parts), pool.ssm, pool.num_folded, groups)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", GDN_SHAPES, ids=str)
def test_parity_over_steps(shape: GdnShape, dtype: torch.dtype) -> None:
    """Prompts, then ragged verifies with and without folds: outputs, rings and states."""
    layer = Layer(shape, 200, dtype)
    ours, theirs = GdnPool(shape, dtype), GdnPool(shape, dtype)
    rows = layer.projected[:78].contiguous()
    triples = [(0, 0, 65), (2, 0, 13)]
    assert_near(
        prefill(None, ours, layer, rows, triples), prefill(ORACLE, theirs, layer, rows, triples), dtype
    )
    ours.assert_near(theirs, dtype)
    starts, first = [65, 0, 13], 78
    for counts, fold in (((1, 3, 17), 8), ((2, 0, 1), 8), ((5, 1, 1), 8), ((1, 1, 2), 0)):
        ours.copy_from(theirs)
        triples = [(slot, starts[slot], counts[slot]) for slot in range(3)]
        rows = layer.projected[first : first + sum(counts)].contiguous()
        found = verify(None, ours, layer, rows, triples, fold)
        assert_near(found, verify(ORACLE, theirs, layer, rows, triples, fold), dtype)
        ours.assert_near(theirs, dtype)
        starts = [start + n for start, n in zip(starts, counts, strict=True)]
        first += sum(counts)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_chunk_parity_with_operands_in_parts(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products as a device makes them, of 3 and of 2 parts an operand."""
    monkeypatch.setattr(chunk_module, "num_parts", NUM_PARTS.__getitem__)
    layer = Layer(SHAPE, 70, dtype)
    ours, theirs = GdnPool(SHAPE, dtype), GdnPool(SHAPE, dtype)
    found = prefill(None, ours, layer, layer.projected, [(1, 0, 70)])
    assert_near(found, prefill(ORACLE, theirs, layer, layer.projected, [(1, 0, 70)]), dtype)
    ours.assert_near(theirs, dtype)


def test_cuts_folds_and_rejected_drafts_change_no_bit() -> None:
    layer, rejected = Layer(SHAPE, 30, torch.float32), Layer(SHAPE, 17, torch.float32, seed=50)
    outputs, states = [], []
    for fold, cut in [
        (0, [(1, 0)] * 30),
        (8, [(3, 0), (1, 16), (5, 4), (16, 1), (2, 7), (3, 5)]),
        (0, [(17, 0), (1, 3), (1, 2), (5, 5), (6, 1)]),
    ]:
        pool, at, found = GdnPool(SHAPE, torch.float32), 0, []
        for kept, drafted in cut:
            rows = torch.cat([layer.projected[at : at + kept], rejected.projected[:drafted]])
            found.append(verify(None, pool, layer, rows, [(1, at, kept + drafted)], fold)[:kept])
            at += kept
        empty = layer.projected[:0]
        verify(None, pool, layer, empty, [(1, at, 0)], 0)  # a fold alone
        outputs.append(torch.cat(found))
        states.append(pool.ssm[1].clone())
        assert (pool.num_folded[1] == 30).all()
    assert all(torch.equal(o, outputs[0]) for o in outputs)
    assert all(torch.equal(s, states[0]) for s in states)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_groups_do_not_see_one_another(dtype: torch.dtype) -> None:
    """Alone, among others, in other slots: the same bits; other slots are not touched."""
    counts = (4, 1, 6)
    layer = Layer(SHAPE, sum(counts), dtype)
    parts = layer.projected.split(counts)
    alone = [verify(None, GdnPool(SHAPE, dtype), layer, part, [(0, 0, len(part))], 0) for part in parts]
    for order in itertools.permutations(range(3)):
        pool = GdnPool(SHAPE, dtype)
        rows = torch.cat([parts[i] for i in order])
        triples = [(slot, 0, counts[i]) for slot, i in enumerate(order)]
        found = verify(None, pool, layer, rows, triples, 0).split([counts[i] for i in order])
        assert all(torch.equal(part, alone[i]) for part, i in zip(found, order, strict=True))
        assert pool.ring_x[3].isnan().all()
        assert pool.ring_u[3].isnan().all()


def test_a_prompt_in_pieces_and_in_company_has_the_bits_of_one_alone() -> None:
    layer = Layer(SHAPE, 150, torch.float32)
    whole = GdnPool(SHAPE, torch.float32)
    expected = prefill(None, whole, layer, layer.projected, [(1, 0, 150)])
    pieces = GdnPool(SHAPE, torch.float32)
    found = [
        prefill(None, pieces, layer, layer.projected[a:b].contiguous(), [(1, a, b - a)])
        for a, b in ((0, 64), (64, 128), (128, 150))
    ]
    assert torch.equal(torch.cat(found), expected)
    company = GdnPool(SHAPE, torch.float32)
    rows = torch.cat([layer.projected[90:], layer.projected])
    assert torch.equal(prefill(None, company, layer, rows, [(0, 0, 60), (1, 0, 150)])[60:], expected)
    for pool in (pieces, company):
        assert torch.equal(pool.ssm[1], whole.ssm[1])
        last = torch.arange(150 - 3, 150) % pool.ring_x.shape[1]
        assert torch.equal(pool.ring_x[1][last], whole.ring_x[1][last])


def test_no_rows() -> None:
    pool = GdnPool(SHAPE, torch.float32)
    layer = Layer(SHAPE, 0, torch.float32)
    assert verify(None, pool, layer, layer.projected, [], 0).shape == (0, SHAPE.value_heads, SHAPE.value_dim)
    assert prefill(None, pool, layer, layer.projected, []).shape == (0, SHAPE.value_heads, SHAPE.value_dim)
    assert pool.ssm.isnan().all()


def test_a_prompt_group_without_rows_keeps_its_state() -> None:
    layer = Layer(SHAPE, 5, torch.float32)
    for table in (None, ORACLE):
        pool = GdnPool(SHAPE, torch.float32)
        pool.num_folded[:2] = 64
        pool.ssm[0] = 0.5
        prefill(table, pool, layer, layer.projected, [(0, 64, 0), (1, 0, 0), (2, 0, 5)])
        assert (pool.ssm[0] == 0.5).all()
        assert (pool.ssm[1] == 0.0).all()
        assert pool.ring_x[:2].isnan().all()
        assert pool.num_folded.flatten(1).amax(1).tolist() == [64, 0, 5, 0]


def test_a_bad_prompt_row_reaches_no_other_group_and_no_earlier_chunk() -> None:
    layer = Layer(SHAPE, 150, torch.float32)
    whole, broken = GdnPool(SHAPE, torch.float32), GdnPool(SHAPE, torch.float32)
    triples = [(0, 0, 20), (1, 0, 110), (2, 0, 20)]
    expected = prefill(None, whole, layer, layer.projected, triples)
    rows = layer.projected.clone()
    rows[20 + 100] = torch.nan
    found = prefill(None, broken, layer, rows, triples)
    is_touched = (found.view(torch.int32) != expected.view(torch.int32)).flatten(1).any(-1)
    assert not is_touched[: 20 + 64].any()
    assert not is_touched[130:].any()
    assert found[120:130].isnan().all()
    for slot in (0, 2):
        assert torch.equal(broken.ssm[slot], whole.ssm[slot])
    assert broken.ssm[1].isnan().all()


def test_refusals() -> None:
    pool, layer = GdnPool(SHAPE, torch.float32), Layer(SHAPE, 3, torch.float32)
    with pytest.raises(ValueError, match="conv_verify: projected: expected 2 rows, got 3"):
        verify(None, pool, layer, layer.projected, [(0, 0, 2)], 0)
    with pytest.raises(ValueError, match="conv_verify: ring_g: expected aligned contiguous float32"):
        conv_verify(
            layer.projected,
            *layer.weights,
            pool.ring_x,
            pool.ring_k,
            pool.ring_g.double(),
            groups_of([(0, 0, 3)]),
        )
    for operator in (conv_verify, conv_prefill):
        weights = (layer.weights[0][:-1].contiguous(), *layer.weights[1:])
        with pytest.raises(
            ValueError, match="conv_weight: expected 2 x 2 heads of 20 channels and a multiple of 4"
        ):
            operator(layer.projected, *weights, pool.ring_x, pool.ring_k, pool.ring_g, groups_of([(0, 0, 3)]))
    small = GdnPool(SHAPE, torch.float32, max_rows=2)
    with pytest.raises(ValueError, match="conv_verify: ring_x: expected 6 rows or more"):
        verify(None, small, layer, layer.projected, [(0, 0, 3)], 0)
    with pytest.raises(ValueError, match="gdn_chunk: groups: expected a start at a multiple of 64, got 3"):
        prefill(None, pool, layer, layer.projected, [(0, 3, 3)])
