"""`conv_verify` and `conv_prefill` against the reference, ring wraps and row splits included."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from metrale import reference
from metrale.native.conv import conv_prefill, conv_verify
from tests.native.cases import GDN_SHAPES, GdnPool, GdnShape, gdn_weights, groups, randn, same_bits

SHAPE = GDN_SHAPES[1]


def verify(pool: GdnPool, projected: Tensor, triples: list[tuple[int, int, int]]) -> tuple[Tensor, ...]:
    return conv_verify(
        projected, *gdn_weights(pool.shape), pool.ring_x, pool.ring_k, pool.ring_g, groups(triples)
    )


def prefill(pool: GdnPool, projected: Tensor, triples: list[tuple[int, int, int]]) -> tuple[Tensor, ...]:
    return conv_prefill(
        projected, *gdn_weights(pool.shape), pool.ring_x, pool.ring_k, pool.ring_g, groups(triples)
    )


@pytest.mark.parametrize("shape", GDN_SHAPES, ids=str)
def test_verify_parity_over_steps(shape: GdnShape) -> None:
    """Steps of many sizes, zero rows included, on three slots, until every ring has wrapped."""
    ours, theirs = GdnPool(shape), GdnPool(shape)
    weights = gdn_weights(shape)
    starts = [0, 0, 0]
    for step, rows in enumerate([(1, 3, 17), (2, 0, 1), (1, 5, 17), (17, 1, 2), (1, 1, 1), (9, 17, 6)]):
        projected = randn(sum(rows), shape.width, seed=step)
        batch = groups([(slot, starts[slot], rows[slot]) for slot in range(3)])
        found = conv_verify(projected, *weights, ours.ring_x, ours.ring_k, ours.ring_g, batch)
        expected = reference.ops().conv_verify(
            projected, *weights, theirs.ring_x, theirs.ring_k, theirs.ring_g, batch
        )
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        starts = [start + n for start, n in zip(starts, rows, strict=True)]
    assert same_bits(ours.ring_x, theirs.ring_x)
    for a, b in ((ours.ring_k, theirs.ring_k), (ours.ring_g, theirs.ring_g)):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert ours.ring_x[3].isnan().all()
    assert ours.ssm.isnan().all()
    assert ours.is_intact()


@pytest.mark.parametrize("shape", GDN_SHAPES, ids=str)
def test_prefill_parity(shape: GdnShape) -> None:
    ours, theirs = GdnPool(shape), GdnPool(shape)
    for step, triples in enumerate([[(0, 0, 64), (2, 0, 2)], [(0, 64, 65)], [(1, 0, 1), (2, 2, 0)]]):
        projected = randn(sum(t[2] for t in triples), shape.width, seed=step)
        found = prefill(ours, projected, triples)
        expected = reference.ops().conv_prefill(
            projected, *gdn_weights(shape), theirs.ring_x, theirs.ring_k, theirs.ring_g, groups(triples)
        )
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert same_bits(ours.ring_x, theirs.ring_x)
    assert ours.ring_k.isnan().all()
    assert ours.ring_g.isnan().all()
    assert ours.is_intact()


def test_splits_and_drafts_change_no_bit() -> None:
    """Rows of one sequence in any cut, with rejected drafts after each cut, equal rows one by one."""
    projected, rejected = randn(40, SHAPE.width), randn(40, SHAPE.width, seed=9) * 50
    single = GdnPool(SHAPE)
    expected = [verify(single, projected[p : p + 1], [(1, p, 1)]) for p in range(40)]
    cut, at = GdnPool(SHAPE), 0
    for accepted, drafted in [(3, 0), (1, 16), (5, 4), (17, 0), (2, 7), (12, 5)]:
        rows = torch.cat([projected[at : at + accepted], rejected[:drafted]])
        found = verify(cut, rows, [(1, at, accepted + drafted)])
        for i in range(accepted):
            assert all(same_bits(f[i : i + 1], e) for f, e in zip(found, expected[at + i], strict=True))
        at += accepted
    last = torch.arange(40 - 20, 40) % single.ring_x.shape[1]
    assert same_bits(cut.ring_x[1][last[-3:]], single.ring_x[1][last[-3:]])


def test_groups_do_not_see_one_another() -> None:
    rows = [4, 0, 3]
    parts = [randn(n, SHAPE.width, seed=n) for n in rows]
    together = GdnPool(SHAPE)
    found = verify(together, torch.cat(parts), [(0, 0, 4), (1, 0, 0), (3, 0, 3)])
    alone = GdnPool(SHAPE)
    last = verify(alone, parts[2], [(3, 0, 3)])
    first = verify(alone, parts[0], [(0, 0, 4)])
    assert all(
        same_bits(f[:4], a) and same_bits(f[4:], b) for f, a, b in zip(found, first, last, strict=True)
    )
    assert together.differences(alone) == []


def test_prefill_and_verify_share_their_bits() -> None:
    projected = randn(5, SHAPE.width)
    q, _, v, _, beta = prefill(GdnPool(SHAPE), projected, [(0, 0, 5)])
    assert all(
        same_bits(a, b)
        for a, b in zip(verify(GdnPool(SHAPE), projected, [(0, 0, 5)]), (q, v, beta), strict=True)
    )


def test_no_rows() -> None:
    q, v, beta = verify(GdnPool(SHAPE), randn(0, SHAPE.width), [])
    assert (q.shape[0], v.shape[0], beta.shape[0]) == (0, 0, 0)


def test_refusals_leave_the_pool_alone() -> None:
    pool = GdnPool(SHAPE)
    with pytest.raises(ValueError, match="slot is out of range"):
        verify(pool, randn(2, SHAPE.width), [(0, 0, 1), (4, 0, 1)])
    with pytest.raises(ValueError, match="do not fit the ring"):
        verify(pool, randn(18, SHAPE.width), [(0, 0, 18)])
    for operator in (verify, prefill):
        with pytest.raises(ValueError, match="a start is below 0"):
            operator(pool, randn(2, SHAPE.width), [(0, -1, 2)])
    with pytest.raises(ValueError, match="conv_verify: groups: expected 3 rows"):
        verify(pool, randn(3, SHAPE.width), [(0, 0, 2)])
    with pytest.raises(ValueError, match="conv_verify: projected, conv_weight"):
        verify(pool, randn(2, SHAPE.width + 1), [(0, 0, 2)])
    assert pool.differences(GdnPool(SHAPE)) == []
