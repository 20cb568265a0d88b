"""The counters' identities, for any run of verifies, for sums, and before the first one."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metrale.telemetry.statistics import SpeculationStats

# (drafts, accepted, emitted) of one verify without a cut
ROUNDS = st.integers(0, 16).flatmap(
    lambda drafts: st.integers(0, drafts).map(lambda accepted: (drafts, accepted, accepted + 1))
)
TRACES = st.lists(ROUNDS, max_size=30)


def of(trace: list[tuple[int, int, int]]) -> SpeculationStats:
    stats = SpeculationStats()
    for verify in trace:
        stats.record(*verify)
    return stats


@settings(deadline=None)
@given(TRACES)
def test_identities(trace: list[tuple[int, int, int]]) -> None:
    stats = of(trace)
    rounds = [(drafts, accepted) for drafts, accepted, _ in trace if drafts]
    assert stats.num_drafts == len(rounds)
    assert stats.num_draft_tokens == sum(drafts for drafts, _ in rounds)
    assert stats.num_accepted_tokens == sum(accepted for _, accepted in rounds)
    assert 0 <= stats.num_accepted_tokens <= stats.num_draft_tokens
    assert stats.num_emitted_tokens == stats.num_accepted_tokens + len(trace), "accepted + 1 a verify"

    histogram, per_pos = stats.acceptance_histogram, stats.num_accepted_tokens_per_pos
    assert histogram == [sum(a == i for _, a in rounds) for i in range(len(histogram))]
    assert per_pos == [sum(a > i for _, a in rounds) for i in range(len(per_pos))]
    deepest = max((drafts for drafts, _ in rounds), default=0)
    assert (len(per_pos), len(histogram)) == (deepest, deepest + 1 if rounds else 0)
    assert sum(per_pos) == stats.num_accepted_tokens == sum(i * n for i, n in enumerate(histogram))
    assert sum(histogram) == stats.num_drafts
    assert per_pos == sorted(per_pos, reverse=True)

    if rounds:
        assert stats.mean_acceptance_length == 1 + stats.num_accepted_tokens / len(rounds)
        assert stats.draft_acceptance_rate == stats.num_accepted_tokens / stats.num_draft_tokens
    assert 0 <= stats.draft_acceptance_rate <= 1 <= stats.mean_acceptance_length


@settings(deadline=None)
@given(TRACES)
def test_counters_never_fall(trace: list[tuple[int, int, int]]) -> None:
    stats, before = SpeculationStats(), SpeculationStats()
    for verify in trace:
        stats.record(*verify)
        for field in dataclasses.fields(SpeculationStats):
            old, new = getattr(before, field.name), getattr(stats, field.name)
            if isinstance(old, int):
                assert new >= old
            else:
                assert len(new) >= len(old)
                assert all(b >= a for a, b in zip(old, new, strict=False))
        before = SpeculationStats.sum([stats])


@settings(deadline=None)
@given(st.lists(TRACES, max_size=5))
def test_sum_is_one_trace_after_the_other(traces: list[list[tuple[int, int, int]]]) -> None:
    parts = [of(trace) for trace in traces]
    for number, part in enumerate(parts):
        part.num_trimmed_tokens = number
    total = SpeculationStats.sum(parts)
    expected = of([verify for trace in traces for verify in trace])
    expected.num_trimmed_tokens = sum(range(len(parts)))
    assert total == expected
    assert total.as_dict() == expected.as_dict()


def test_sum_leaves_its_parts_alone() -> None:
    part = of([(3, 1, 2)])
    total = SpeculationStats.sum([part])
    total.record(5, 5, 6)
    assert part == of([(3, 1, 2)])


def test_as_dict_is_a_copy_and_complete() -> None:
    stats = of([(2, 1, 2), (4, 4, 5), (0, 0, 1)])
    taken = stats.as_dict()
    assert {field.name for field in dataclasses.fields(stats)} <= set(taken)
    stats.record(4, 4, 5)
    assert taken == {
        "num_drafts": 2,
        "num_draft_tokens": 6,
        "num_accepted_tokens": 5,
        "num_accepted_tokens_per_pos": [2, 1, 1, 1],
        "acceptance_histogram": [0, 1, 0, 0, 1],
        "mean_acceptance_length": 3.5,
        "draft_acceptance_rate": 5 / 6,
        "num_trimmed_tokens": 0,
        "num_emitted_tokens": 8,
    }


@pytest.mark.parametrize("trace", [[], [(0, 0, 1)], [(0, 0, 0), (0, 0, 1)]])
def test_before_the_first_round(trace: list[tuple[int, int, int]]) -> None:
    """A scrape before any draft was verified divides by nothing."""
    taken = of(trace).as_dict()
    assert (taken["mean_acceptance_length"], taken["draft_acceptance_rate"]) == (1.0, 0.0)
    assert SpeculationStats.sum([]).as_dict()["mean_acceptance_length"] == 1.0


def test_a_cut_round_counts_what_it_kept() -> None:
    """Four of four accepted, cut at the second token: two accepted and two emitted."""
    stats = of([(4, 2, 2)])
    assert (stats.num_accepted_tokens, stats.num_emitted_tokens) == (2, 2)
    assert stats.acceptance_histogram == [0, 0, 1, 0, 0]


@pytest.mark.parametrize(("drafts", "accepted"), [(0, 1), (3, 4), (3, -1)])
def test_impossible_counts_are_refused(drafts: int, accepted: int) -> None:
    stats = SpeculationStats()
    with pytest.raises(ValueError, match=f"{accepted} accepted of {drafts} drafts"):
        stats.record(drafts, accepted, 1)
    assert stats == SpeculationStats()
