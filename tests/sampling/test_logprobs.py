"""Log-probabilities against a float64 oracle, ranks and ties included."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from metrale.sampling.logprobs import token_logprobs


@settings(deadline=None)
@given(
    # quarters: many ties, and every value exact in float32
    quarters=st.lists(st.integers(-12, 12), min_size=1, max_size=40),
    pick=st.integers(0, 10**6),
    num_top=st.integers(0, 50),
)
def test_equals_oracle(quarters: list[int], pick: int, num_top: int) -> None:
    logits = [quarter / 4 for quarter in quarters]
    token_id = pick % len(logits)
    got = token_logprobs(torch.tensor(logits), token_id, num_top)
    log_total = math.log(math.fsum(math.exp(logit) for logit in logits))
    top = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[:num_top]
    assert list(got) == [token_id, *(i for i in top if i != token_id)]
    for i, entry in got.items():
        assert entry.rank == 1 + sum(logit > logits[i] for logit in logits)
        assert entry.logprob == pytest.approx(logits[i] - log_total, abs=1e-5)


def test_emitted_token_first_then_falling() -> None:
    got = token_logprobs(torch.tensor([0.0, 3.0, 1.0, 2.0]), 0, 2)
    assert [(i, entry.rank) for i, entry in got.items()] == [(0, 4), (1, 1), (3, 2)]


def test_zero_top_gives_the_emitted_token_alone() -> None:
    assert list(token_logprobs(torch.tensor([0.0, 3.0]), 0, 0)) == [0]


def test_masked_ids_have_no_probability() -> None:
    got = token_logprobs(torch.tensor([0.0, -math.inf, 0.0]), 2, 3)
    assert [(i, entry.rank) for i, entry in got.items()] == [(2, 1), (0, 1), (1, 3)]
    assert got[1].logprob == -math.inf


@pytest.mark.parametrize("num_ids", [1, 7, 1000, 50_001])
def test_bits_do_not_depend_on_the_row_s_place(num_ids: int) -> None:
    torch.manual_seed(0)
    solo = torch.randn(num_ids) * 5
    token_id = int(solo.argmax())
    want = token_logprobs(solo, token_id, 3)
    for place, width in ((1, num_ids), (2, num_ids + 3)):
        batch = torch.randn(4, width)
        batch[place, :num_ids] = solo
        assert token_logprobs(batch[place, :num_ids], token_id, 3) == want
