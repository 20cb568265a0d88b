"""`gdn_verify` and `gdn_chunk`: parity, and that folds, cuts and mates change no bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from metrale import reference
from metrale.native.gdn import gdn_chunk, gdn_verify
from tests.native.cases import GDN_SHAPES, GdnPool, GdnShape, groups, randn, same_bits

SHAPE = GDN_SHAPES[1]


class Rows:
    """Inputs of `count` consecutive rows of one sequence, keys and decays included."""

    def __init__(self, shape: GdnShape, count: int, seed: int = 0) -> None:
        self.q = torch.nn.functional.normalize(
            randn(count, shape.key_heads, shape.key_dim, seed=seed), dim=-1
        )
        self.k = torch.nn.functional.normalize(
            randn(count, shape.key_heads, shape.key_dim, seed=seed + 1), dim=-1
        )
        self.v = randn(count, shape.value_heads, shape.value_dim, seed=seed + 2)
        self.beta = torch.sigmoid(randn(count, shape.value_heads, seed=seed + 3))
        self.g = -randn(count, shape.value_heads, seed=seed + 4).abs()


def step(
    operator: Callable[..., Tensor],
    pool: GdnPool,
    parts: list[tuple[Rows, slice, int, int]],
    fold_threshold: int,
) -> Tensor:
    """Run `operator` over (rows, which of them, slot, start) of each group, after filling the rings as conv_verify does."""
    for rows, at, slot, start in parts:
        ring = torch.arange(start, start + at.stop - at.start) % pool.ring_k.shape[1]
        pool.ring_k[slot, ring], pool.ring_g[slot, ring] = rows.k[at], rows.g[at]
    q, v, beta = (torch.cat([getattr(rows, n)[at] for rows, at, _, _ in parts]) for n in ("q", "v", "beta"))
    batch = groups([(slot, start, at.stop - at.start) for _, at, slot, start in parts])
    return operator(
        q, v, beta, pool.ring_k, pool.ring_u, pool.ring_g, pool.ssm, pool.num_folded, batch, fold_threshold
    )


def test_a_prompt_group_without_rows_has_the_zero_state() -> None:
    pool, rows = GdnPool(SHAPE), Rows(SHAPE, 3)
    pool.ssm.fill_(torch.nan)
    gdn_chunk(
        rows.q, rows.k, rows.v, rows.g, rows.beta, pool.ssm, pool.num_folded, groups([(0, 0, 0), (1, 0, 3)])
    )
    assert not pool.ssm[0].any()
    assert pool.ssm[1].isfinite().all()


@pytest.mark.parametrize("fold_threshold", [0, 8])
@pytest.mark.parametrize("shape", GDN_SHAPES, ids=str)
def test_verify_parity_over_steps(shape: GdnShape, fold_threshold: int) -> None:
    ours, theirs = GdnPool(shape), GdnPool(shape)
    rows, starts = [Rows(shape, 50, seed=slot) for slot in range(3)], [0, 0, 0]
    for counts in [(1, 3, 17), (2, 0, 1), (1, 5, 1), (17, 1, 2), (1, 1, 1), (9, 8, 6)]:
        parts = [(rows[s], slice(starts[s], starts[s] + counts[s]), s, starts[s]) for s in range(3)]
        found = step(gdn_verify, ours, parts, fold_threshold)
        expected = step(reference.ops().gdn_verify, theirs, parts, fold_threshold)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(ours.num_folded, theirs.num_folded)
        starts = [start + n for start, n in zip(starts, counts, strict=True)]
    for name in ("ring_u", "ssm"):
        torch.testing.assert_close(
            getattr(ours, name), getattr(theirs, name), rtol=1e-5, atol=1e-5, equal_nan=True
        )
    assert ours.ssm[3].isnan().all()
    assert ours.is_intact()


@pytest.mark.parametrize("shape", [GDN_SHAPES[1], GDN_SHAPES[3], GDN_SHAPES[5], GDN_SHAPES[6]], ids=str)
def test_cuts_folds_and_rejected_drafts_change_no_bit(shape: GdnShape) -> None:
    rows, rejected = Rows(shape, 48), Rows(shape, 20, seed=50)
    outputs, states = [], []
    for fold_threshold, cut in [
        (0, [(1, 0)] * 48),
        (8, [(1, 0)] * 48),
        (8, [(3, 0), (1, 16), (5, 4), (17, 0), (2, 7), (12, 5), (8, 1)]),
        (0, [(17, 0), (1, 3), (1, 2), (5, 5), (16, 1), (8, 8)]),
        (16, [(2, 2)] * 24),
    ]:
        pool, at, parts = GdnPool(shape, fold_threshold=16), 0, []
        for accepted, drafted in cut:
            mixed = Rows(shape, 0)
            for name in ("q", "k", "v", "beta", "g"):
                joined = torch.cat(
                    [getattr(rows, name)[at : at + accepted], getattr(rejected, name)[:drafted]]
                )
                setattr(mixed, name, joined)
            out = step(gdn_verify, pool, [(mixed, slice(0, accepted + drafted), 2, at)], fold_threshold)
            parts.append(out[:accepted])
            at += accepted
        assert at == 48
        step(gdn_verify, pool, [(rows, slice(0, 0), 2, 48)], 0)  # a fold alone
        assert (pool.num_folded[2] == 48).all()
        outputs.append(torch.cat(parts))
        states.append(pool.ssm[2].clone())
    assert all(same_bits(out, outputs[0]) for out in outputs)
    assert all(same_bits(state, states[0]) for state in states)


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0], [1], [2, 1, 0]])
def test_groups_do_not_see_one_another(order: list[int]) -> None:
    rows = [Rows(SHAPE, 20, seed=slot) for slot in range(3)]
    counts = [4, 1, 7]
    pool, alone = GdnPool(SHAPE), GdnPool(SHAPE)
    for target in (pool, alone):
        for s in range(3):
            step(gdn_verify, target, [(rows[s], slice(0, 5), s, 0)], 8)
    expected = {s: step(gdn_verify, alone, [(rows[s], slice(5, 5 + counts[s]), s, 5)], 0) for s in order}
    found = step(gdn_verify, pool, [(rows[s], slice(5, 5 + counts[s]), s, 5) for s in order], 0)
    assert same_bits(found, torch.cat([expected[s] for s in order]))
    assert pool.differences(alone) == []


@pytest.mark.parametrize("shape", GDN_SHAPES, ids=str)
def test_chunk_parity(shape: GdnShape) -> None:
    ours, theirs = GdnPool(shape), GdnPool(shape)
    for seed, triples in enumerate(
        [[(0, 0, 64), (1, 0, 1), (2, 0, 129)], [(0, 64, 17)], [(0, 0, 128)], [(0, 128, 3)]]
    ):
        rows = Rows(shape, sum(t[2] for t in triples), seed=seed)
        inputs = (rows.q, rows.k, rows.v, rows.g, rows.beta)
        found = gdn_chunk(*inputs, ours.ssm, ours.num_folded, groups(triples))
        expected = reference.ops().gdn_chunk(*inputs, theirs.ssm, theirs.num_folded, groups(triples))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(ours.ssm, theirs.ssm, rtol=1e-4, atol=2e-5, equal_nan=True)
    assert torch.equal(ours.num_folded, theirs.num_folded)
    assert ours.is_intact()


@pytest.mark.parametrize("shape", [GDN_SHAPES[1], GDN_SHAPES[3], GDN_SHAPES[6]], ids=str)
def test_cuts_of_a_prompt_change_no_bit(shape: GdnShape) -> None:
    """Any cut at multiples of 64, and fewer rows after a row, leave its bits and the state's alone."""
    rows = Rows(shape, 200)

    def run(pool: GdnPool, first: int, last: int) -> Tensor:
        inputs = (x[first:last] for x in (rows.q, rows.k, rows.v, rows.g, rows.beta))
        return gdn_chunk(*inputs, pool.ssm, pool.num_folded, groups([(1, first, last - first)]))

    whole = GdnPool(shape)
    expected = run(whole, 0, 200)
    for edges in ([0, 64, 200], [0, 128, 200], [0, 64, 128, 192, 200]):
        pool = GdnPool(shape)
        found = torch.cat([run(pool, a, b) for a, b in itertools.pairwise(edges)])
        assert same_bits(found, expected)
        assert pool.differences(whole) == []
    assert same_bits(run(GdnPool(shape), 0, 37), expected[:37])


def test_chunk_then_verify_follow_the_plain_recurrence() -> None:
    rows, pool, plain = Rows(SHAPE, 80), GdnPool(SHAPE), GdnPool(SHAPE)
    gdn_chunk(
        *(x[:70] for x in (rows.q, rows.k, rows.v, rows.g, rows.beta)),
        pool.ssm,
        pool.num_folded,
        groups([(0, 0, 70)]),
    )
    after = torch.cat([step(gdn_verify, pool, [(rows, slice(p, p + 5), 0, p)], 8) for p in (70, 75)])
    one_by_one = [step(gdn_verify, plain, [(rows, slice(p, p + 1), 0, p)], 8) for p in range(80)]
    torch.testing.assert_close(after, torch.cat(one_by_one[70:]), rtol=1e-4, atol=2e-5)


def test_refusals_leave_the_pool_alone() -> None:
    pool, rows = GdnPool(SHAPE), Rows(SHAPE, 64)
    before = GdnPool(SHAPE).copy_from(pool)
    inputs = (rows.q, rows.k, rows.v, rows.g, rows.beta)
    with pytest.raises(ValueError, match="gdn_chunk: groups: a prompt group starts off the 64-row grid"):
        gdn_chunk(*inputs, pool.ssm, pool.num_folded, groups([(0, 32, 64)]))
    with pytest.raises(ValueError, match="gdn_chunk: groups: a prompt group starts off"):
        gdn_chunk(*inputs, pool.ssm, pool.num_folded, groups([(0, 64, 64)]))
    with pytest.raises(ValueError, match="gdn_chunk: groups: a slot is out of range"):
        gdn_chunk(*inputs, pool.ssm, pool.num_folded, groups([(-1, 0, 64)]))
    some = (rows.q[:2], rows.v[:2], rows.beta[:2], pool.ring_k, pool.ring_u, pool.ring_g, pool.ssm)
    with pytest.raises(ValueError, match="gdn_verify: groups: pending and new rows do not fit the ring"):
        gdn_verify(*some, pool.num_folded, groups([(0, 33, 2)]), 8)
    with pytest.raises(ValueError, match="gdn_verify: num_folded"):
        gdn_verify(*some, pool.num_folded.long(), groups([(0, 0, 2)]), 8)
    with pytest.raises(ValueError, match="gdn_verify: ssm"):
        gdn_verify(*some[:-1], pool.ssm.bfloat16(), pool.num_folded, groups([(0, 0, 2)]), 8)
    assert pool.differences(before) == []
