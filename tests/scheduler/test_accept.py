"""The accepted prefix, against a loop by the book."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metrale.scheduler.accept import accept

IDS = st.integers(-1, 2)  # few ids, so that drafts and picks often agree


@settings(deadline=None)
@given(st.lists(st.tuples(IDS, IDS), max_size=17), IDS)
def test_longest_prefix_of_valid_equal_ids(pairs: list[tuple[int, int]], last_pick: int) -> None:
    drafts = [draft for draft, _ in pairs]
    picks = [*(pick for _, pick in pairs), last_pick]
    prefixes = [n for n in range(len(drafts) + 1) if drafts[:n] == picks[:n] and -1 not in picks[:n]]
    assert accept(drafts, picks) == max(prefixes)


@settings(deadline=None)
@given(st.lists(st.integers(0, 5), max_size=17), st.data())
def test_a_draft_that_is_the_truth_up_to_a_point(truth: list[int], data: st.DataObject) -> None:
    wrong_at = data.draw(st.integers(0, len(truth)))
    drafts = [token if i != wrong_at else token + 1 for i, token in enumerate(truth)]
    assert accept(drafts, [*truth, 3]) == wrong_at


def test_an_invalid_pick_equals_no_draft() -> None:
    assert accept([-1], [-1, 4]) == 0
    assert accept([7, -1, 8], [7, -1, 8, 9]) == 1


@pytest.mark.parametrize("num_picks", [0, 1, 2, 4])
def test_counts_must_agree(num_picks: int) -> None:
    with pytest.raises(ValueError, match=f"accept: {num_picks} picks for 2 drafts, expected 3"):
        accept([1, 2], [1] * num_picks)
