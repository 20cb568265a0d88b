"""NgramIndex against a search of the whole history, and its cost."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Sequence
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metrale.drafters.ngram import NgramIndex
from metrale.errors import ConfigError


def index_of(history: Sequence[int], min_match: int, max_match: int) -> NgramIndex:
    index = NgramIndex(min_match, max_match)
    index.extend(history)
    return index


def oracle(
    history: Sequence[int], min_match: int, max_match: int, num_tokens: int
) -> tuple[int, tuple[int, ...]]:
    """(match length, proposal) by trying every length and every place."""
    grown = list(history)
    for length in range(min(max_match, len(history) - 1), min_match - 1, -1):
        suffix = grown[len(history) - length :]
        for end in range(len(history) - 2, length - 2, -1):
            if grown[end - length + 1 : end + 1] == suffix:
                for place in range(end + 1, end + 1 + num_tokens):
                    grown.append(grown[place])
                return length, tuple(grown[len(history) :])
    return 0, ()


@pytest.mark.parametrize(
    ("history", "min_match", "max_match", "num_tokens", "want"),
    [
        ([1, 2, 3, 4, 5, 1, 2, 3], 2, 4, 1, (4,)),
        ([1, 2, 3, 4, 5, 1, 2, 3], 2, 4, 3, (4, 5, 1)),
        ([10, 20, 30, 10, 20, 30, 10, 20], 2, 4, 2, (30, 10)),
        ([5, 6, 7, 8, 9, 10, 11, 7, 8], 2, 4, 3, (9, 10, 11)),
        # the latest place of the longest match
        ([1, 2, 7, 1, 2, 8, 1, 2], 2, 4, 1, (8,)),
        ([1, 2, 7, 4, 2, 8, 1, 2], 1, 4, 1, (7,)),
        ([1, 2, 7, 4, 2, 8, 1, 2], 1, 1, 1, (8,)),
        ([1, 2, 3, 9, 2, 3, 8, 3], 1, 3, 3, (8, 3, 8)),
        ([1, 2, 3, 9, 2, 3, 8, 2, 3], 1, 3, 1, (8,)),
        ([1, 2, 3, 9, 2, 3, 8, 1, 2, 3], 1, 3, 1, (9,)),
        # a copy that runs over the end
        ([5, 5, 5, 5], 2, 4, 4, (5, 5, 5, 5)),
        ([5, 5], 1, 4, 3, (5, 5, 5)),
        ([1, 2, 1, 2, 1, 2], 2, 4, 5, (1, 2, 1, 2, 1)),
        ([3, 1, 2, 1, 2], 2, 16, 3, (1, 2, 1)),
        # nothing to copy
        ([], 1, 4, 4, ()),
        ([7], 1, 4, 4, ()),
        ([1, 2], 1, 4, 4, ()),
        ([1, 2], 2, 4, 4, ()),
        ([5, 5], 2, 4, 4, ()),
        ([1, 2, 3, 4, 1], 2, 4, 4, ()),
        ([1, 2, 3, 1, 2], 3, 8, 4, ()),
        # no draft wanted
        ([1, 2, 1, 2], 2, 4, 0, ()),
    ],
)
def test_by_hand(
    history: list[int], min_match: int, max_match: int, num_tokens: int, want: tuple[int, ...]
) -> None:
    assert index_of(history, min_match, max_match).propose(num_tokens) == want
    assert oracle(history, min_match, max_match, num_tokens)[1] == want


HISTORIES = st.integers(1, 4).flatmap(lambda v: st.lists(st.integers(0, v), max_size=80))


@settings(deadline=None, max_examples=500)
@given(history=HISTORIES, low=st.integers(1, 5), span=st.integers(0, 12), num_tokens=st.integers(0, 9))
def test_equals_a_search_at_every_length(history: list[int], low: int, span: int, num_tokens: int) -> None:
    index = NgramIndex(low, low + span)
    for length, token_id in enumerate(history, start=1):
        index.extend([token_id])
        want = oracle(history[:length], low, low + span, num_tokens)
        assert (index.match_length, index.propose(num_tokens)) == want
        assert len(index) == length


@settings(deadline=None)
@given(
    history=HISTORIES,
    cuts=st.lists(st.integers(0, 80), max_size=5),
    keep=st.integers(0, 80),
    more=st.lists(st.integers(0, 2), max_size=20),
)
def test_a_function_of_the_history_alone(
    history: list[int], cuts: list[int], keep: int, more: list[int]
) -> None:
    """However it grew, shrank and was asked on the way."""
    index = NgramIndex(2, 6)
    edges = [0, *sorted(cut for cut in cuts if cut <= len(history)), len(history)]
    for start, end in itertools.pairwise(edges):
        index.extend(history[start:end])
        assert index.propose(4) == index.propose(4)
    index.truncate(keep)
    index.extend(more)
    final = history[:keep] + more
    fresh = index_of(final, 2, 6)
    assert len(index) == len(final)
    assert (index.match_length, index.propose(5)) == (fresh.match_length, fresh.propose(5))


def test_the_history_is_only_read() -> None:
    history = [1, 2, 3, 1, 2]
    index = index_of(history, 2, 4)
    history.append(9)
    assert index.propose(1) == (3,)
    index.extend([3])
    assert history == [1, 2, 3, 1, 2, 9]


@pytest.mark.parametrize(("min_match", "max_match"), [(4, 2), (0, 2), (-1, -1)])
def test_bounds(min_match: int, max_match: int) -> None:
    with pytest.raises(ConfigError, match=f"prompt_lookup_min={min_match}, prompt_lookup_max={max_match}"):
        NgramIndex(min_match, max_match)


def text_like(num_tokens: int, seed: int) -> list[int]:
    """Tokens with the repeats of code: a Zipf vocabulary, and passages copied from before."""
    rng = random.Random(seed)
    tokens: list[int] = []
    while len(tokens) < num_tokens:
        if len(tokens) > 300 and rng.random() < 0.02:
            start = rng.randrange(len(tokens) - 200)
            tokens += tokens[start : start + rng.randrange(20, 200)]
        else:
            tokens.append(int(rng.paretovariate(0.7)) % 50_000)
    return tokens[:num_tokens]


def step_seconds(index: NgramIndex, tokens: Sequence[int]) -> float:
    """Median CPU time of a step: three tokens in, one proposal out."""
    took = []
    for at in range(0, len(tokens) - 2, 3):
        start = time.thread_time()
        index.extend(tokens[at : at + 3])
        index.propose(4)
        took.append(time.thread_time() - start)
    return median(took)


def test_a_step_costs_the_same_at_any_length() -> None:
    tokens = text_like(100_600, seed=0)
    short, long = NgramIndex(2, 64), NgramIndex(2, 64)
    short.extend(tokens[:1_000])
    long.extend(tokens[:100_000])
    assert step_seconds(long, tokens[100_000:]) < 4 * step_seconds(short, tokens[1_000:1_600])


@pytest.mark.parametrize("period", [1, 2, 63, 65])
def test_a_loop_costs_no_more(period: int) -> None:
    index = NgramIndex(2, 64)
    index.extend(list(range(period)) * (20_000 // period))
    assert step_seconds(index, list(range(period)) * (600 // period + 1)) < 1e-3


def test_a_batch_of_64() -> None:
    indices = [index_of(text_like(2_000, seed=seed), 2, 64) for seed in range(64)]
    news = [text_like(2_300, seed=seed)[2_000:] for seed in range(64)]
    took = []
    for at in range(0, 300, 3):
        start = time.thread_time()
        for index, new in zip(indices, news, strict=True):
            index.extend(new[at : at + 3])
            index.propose(4)
        took.append(time.thread_time() - start)
    assert median(took) < 2e-3
