"""The depth policy: the tightest of its caps, and never a draft row that could emit nothing."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metrale.core import SequenceKey, SequenceView
from metrale.scheduler.depth import Depth, depth


def view(num_remaining: int) -> SequenceView:
    return SequenceView(SequenceKey(0, 0), 0, 0, 10, 10, num_remaining, 0)


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 16), st.integers(0, 40))
def test_tightest_cap(num_remaining: int, num_running: int, configured: int, widest: int) -> None:
    got = depth(view(num_remaining), num_running, configured, widest)
    caps = {"configured": configured, "remaining": num_remaining - 1}
    if num_running > widest:
        caps["width"] = 0
    assert got.num_drafts == min(caps.values())
    assert caps[got.bound_by] == got.num_drafts
    assert 1 + got.num_drafts <= num_remaining, "a verify emits at most one token a row"


@pytest.mark.parametrize(
    ("num_remaining", "num_running", "expected"),
    [
        (9, 4, Depth(3, "configured")),
        (4, 4, Depth(3, "configured")),
        (3, 4, Depth(2, "remaining")),
        (1, 4, Depth(0, "remaining")),
        (9, 5, Depth(0, "width")),
    ],
)
def test_what_bound_it(num_remaining: int, num_running: int, expected: Depth) -> None:
    assert depth(view(num_remaining), num_running, 3, 4) == expected
