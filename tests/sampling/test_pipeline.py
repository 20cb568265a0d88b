"""The pick: ranges and ties, the stages against a naive oracle, distribution and independence."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from metrale import reference
from metrale.kernels.ops import Ops
from metrale.kernels.picks import Picks
from metrale.reference.pick import NUCLEUS_WIDTH, processed
from metrale.sampling.params import SamplingParams
from metrale.sampling.pipeline import PickRow, choose, pick

OPS = reference.ops()
NAN, INF = math.nan, math.inf
GREEDY = SamplingParams(temperature=0)
STAGES = [
    GREEDY,
    SamplingParams(temperature=0.7),
    SamplingParams(top_k=3),
    SamplingParams(top_p=0.5),
    SamplingParams(min_p=0.3),
    SamplingParams(temperature=1.3, top_k=5, top_p=0.8, min_p=0.05),
]


def rows_of(params: SamplingParams, num_rows: int, seed: int = 1) -> list[PickRow]:
    return [PickRow(params, seed, 0, position) for position in range(num_rows)]


def tokens(
    logits: Tensor, rows: Sequence[PickRow], num_valid: int | None = None, ops: Ops = OPS
) -> list[int]:
    return [p.token_id for p in pick(logits, rows, ops, logits.shape[1] if num_valid is None else num_valid)]


def with_block_noise(ops: Ops = OPS) -> Ops:
    """Row m draws from Philox blocks of its own within one long row: noise for many rows at once."""

    def gumbel(
        seeds: Sequence[tuple[int, int, int]], num_ids: int, device: torch.device | None = None
    ) -> Tensor:
        assert num_ids % 4 == 0
        return reference.gumbel(seeds[:1], len(seeds) * num_ids, device).reshape(len(seeds), num_ids)

    def masked_argmax(logits: Tensor, num_valid: int, **options: Any) -> Picks:
        scores = processed(
            logits,
            num_valid,
            None,
            None,
            options["temperatures"],
            options["thresholds"],
            options["noise"],
            gumbel,
        )
        return ops.masked_argmax(scores, num_valid)

    return dataclasses.replace(ops, masked_argmax=masked_argmax)


def kept_ids(logits: Tensor, params: SamplingParams) -> set[int]:
    """Ids that the stages leave a chance: what is not below the threshold."""
    seen: list[Tensor] = []

    def masked_argmax(logits: Tensor, num_valid: int, **options: Any) -> Picks:
        limits = {name: options.get(name) for name in ("temperatures", "thresholds")}
        seen.append(
            processed(
                logits, num_valid, None, None, limits["temperatures"], limits["thresholds"], None, OPS.linear
            )
        )
        return OPS.masked_argmax(logits, num_valid, **options)

    tokens(logits[None], rows_of(params, 1), ops=dataclasses.replace(OPS, masked_argmax=masked_argmax))
    return set((seen[0][0] > -INF).nonzero().flatten().tolist())


def oracle_kept(logits: Sequence[float], params: SamplingParams) -> set[int]:
    """The stages by the book: sort, float64, every id equal to a threshold stays."""
    scaled = [float(np.float32(logit) / np.float32(params.temperature)) for logit in logits]
    kept = {i for i, x in enumerate(scaled) if x > -INF}
    if params.top_k:
        threshold = sorted((scaled[i] for i in kept), reverse=True)[: params.top_k][-1]
        kept = {i for i in kept if scaled[i] >= threshold}
    if params.top_p < 1.0:
        weights = {i: math.exp(scaled[i] - max(scaled)) for i in kept}
        total, mass = math.fsum(weights.values()), 0.0
        for i in sorted(kept, key=lambda i: (-scaled[i], i)):
            mass += weights[i]
            if mass / total >= params.top_p:
                break
        kept = {j for j in kept if scaled[j] >= scaled[i]}
    if params.min_p:
        kept = {i for i in kept if math.exp(scaled[i] - max(scaled)) >= params.min_p}
    return kept


def chi_square(counts: Sequence[int], probabilities: Sequence[float]) -> float:
    total = sum(counts)
    return sum((c - total * p) ** 2 / (total * p) for c, p in zip(counts, probabilities, strict=True))


# Range


@pytest.mark.parametrize("params", STAGES)
def test_an_invalid_row_gives_no_token_and_harms_nobody(params: SamplingParams) -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 100)
    bad = logits.clone()
    bad[1] = NAN
    bad[2, 17] = NAN
    bad[4] = -INF
    good = tokens(logits, rows_of(params, 6))
    assert tokens(bad, rows_of(params, 6)) == [good[0], -1, -1, good[3], -1, good[5]]


@pytest.mark.parametrize("params", STAGES)
def test_a_nan_above_or_below_every_threshold_is_seen(params: SamplingParams) -> None:
    for place in (0, 3, 7):
        logits = torch.arange(8.0)[None].repeat(1, 1)
        logits[0, place] = NAN
        assert tokens(logits, rows_of(params, 1)) == [-1]


@pytest.mark.parametrize("params", STAGES)
@pytest.mark.parametrize("padding", [50.0, 0.0, NAN, INF])
def test_padded_columns_do_not_exist(params: SamplingParams, padding: float) -> None:
    torch.manual_seed(0)
    logits = torch.randn(5, 100) - 5
    padded = torch.cat([logits, torch.full((5, 60), padding)], dim=1)
    assert tokens(padded, rows_of(params, 5), num_valid=100) == tokens(logits, rows_of(params, 5))


def test_invalid_row_has_no_logprobs() -> None:
    logits = torch.tensor([[0.0, NAN], [0.0, 1.0]])
    first, second = pick(logits, rows_of(SamplingParams(temperature=0, logprobs=1), 2), OPS, 2)
    assert first == (-1, None)
    assert second.logprobs is not None


@pytest.mark.parametrize("params", STAGES)
def test_plus_infinity_is_certain(params: SamplingParams) -> None:
    logits = torch.tensor([[0.0, 9.0, INF, 1.0, INF, -3.0]])
    assert tokens(logits, rows_of(params, 1)) == [2]


@pytest.mark.parametrize("params", STAGES)
def test_one_finite_id_is_picked(params: SamplingParams) -> None:
    logits = torch.full((1, 9), -INF)
    logits[0, 6] = -4.0
    assert tokens(logits, rows_of(params, 1)) == [6]


def test_no_rows() -> None:
    assert pick(torch.empty(0, 8), [], OPS, 8) == []
    assert choose(torch.empty(0, 8), [], OPS, 8) == []


def test_row_count_must_agree() -> None:
    with pytest.raises(ValueError, match="2 rows, expected 1"):
        pick(torch.zeros(2, 4), rows_of(GREEDY, 1), OPS, 4)


# Ties


def test_greedy_takes_the_lowest_of_tied_ids() -> None:
    logits = torch.zeros(4, 1500)
    logits[0, [5, 1029]] = 1.0
    logits[1, [1029, 1030]] = 1.0
    logits[2] = -5.0
    logits[3, 0] = -0.0
    assert tokens(logits, rows_of(GREEDY, 4)) == [5, 1029, 0, 0]


def test_greedy_ignores_the_other_stages() -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 50)
    params = SamplingParams(temperature=0, top_k=2, top_p=0.1, min_p=0.9)
    assert tokens(logits, rows_of(params, 3)) == logits.argmax(dim=-1).tolist()


@pytest.mark.parametrize(
    "params",
    [SamplingParams(top_k=4), SamplingParams(top_k=1), SamplingParams(top_p=0.3), SamplingParams(min_p=1.0)],
)
def test_tied_ids_keep_their_share(params: SamplingParams) -> None:
    draws = tokens(torch.zeros(10_000, 4), rows_of(params, 10_000), ops=with_block_noise())
    assert chi_square(np.bincount(draws, minlength=4).tolist(), [0.25] * 4) < 21.1  # p = 1e-4


# Stages against the oracle


@settings(deadline=None, max_examples=300)
@given(
    quarters=st.lists(st.integers(-16, 16) | st.just(None), min_size=1, max_size=30).filter(
        lambda q: any(x is not None for x in q)
    ),
    temperature=st.sampled_from([0.3, 0.5, 0.7, 1.0, 1.7, 4.0]),
    top_k=st.sampled_from([0, 1, 2, 3, 5, 10, 29, 30, 100]),
    top_p=st.floats(0.01, 1.0),
    min_p=st.just(0.0) | st.floats(0.001, 0.999),
)
def test_stages_keep_what_the_oracle_keeps(
    quarters: list[int | None], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = [-INF if quarter is None else quarter / 4 for quarter in quarters]
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    assert kept_ids(torch.tensor(logits), params) == oracle_kept(logits, params)


@pytest.mark.parametrize("top_p", [0.001, 0.3, 0.9, 0.9999])
@pytest.mark.parametrize("spread", [0.01, 1.0, 6.0])
@pytest.mark.parametrize("num_ids", [NUCLEUS_WIDTH - 1, NUCLEUS_WIDTH + 1, 6000])
def test_top_p_over_many_ids(num_ids: int, spread: float, top_p: float) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(num_ids) * spread * 64).round() / 64  # ties everywhere
    params = SamplingParams(top_p=top_p)
    assert kept_ids(logits, params) == oracle_kept(logits.tolist(), params)


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (SamplingParams(top_k=2), {0, 1, 2}),
        (SamplingParams(top_k=-1), {0, 1, 2, 3, 4}),
        (SamplingParams(top_k=99), {0, 1, 2, 3, 4}),
        (SamplingParams(top_p=0.39), {0}),
        (SamplingParams(top_p=0.45), {0, 1, 2}),
        (SamplingParams(top_p=0.85), {0, 1, 2, 3}),
        (SamplingParams(min_p=0.49), {0, 1, 2}),
        (SamplingParams(top_k=1, top_p=0.01, min_p=1.0), {0}),
    ],
)
def test_stages_by_hand(params: SamplingParams, kept: set[int]) -> None:
    assert kept_ids(torch.tensor([0.4, 0.2, 0.2, 0.1, 0.1 - 1e-6]).log(), params) == kept


def test_top_p_sees_what_top_k_left() -> None:
    logits = torch.tensor([0.3, 0.25, 0.24, 0.21]).log()
    assert kept_ids(logits, SamplingParams(top_p=0.54)) == {0, 1}
    assert kept_ids(logits, SamplingParams(top_k=2, top_p=0.54)) == {0}


def test_the_logits_are_not_changed() -> None:
    torch.manual_seed(0)
    logits = torch.randn(len(STAGES), 64)
    before = logits.clone()
    rows = [PickRow(params, 1, 0, 0) for params in STAGES]
    pick(logits, rows, OPS, 60)
    choose(logits, rows, OPS, 60)
    assert torch.equal(logits, before)


# Distribution and independence


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    logits = torch.tensor([1.0, -0.5, 0.3, -2.0])
    rows = rows_of(SamplingParams(temperature=temperature), 200_000, seed=2**63 + 5)
    draws = tokens(logits.expand(200_000, 4), rows, ops=with_block_noise())
    want = (logits.double() / temperature).softmax(dim=-1).tolist()
    assert chi_square(np.bincount(draws, minlength=4).tolist(), want) < 21.1  # p = 1e-4


def test_draws_follow_what_the_stages_leave() -> None:
    logits = torch.tensor([1.0, -0.5, 0.3, -2.0])
    draws = tokens(logits.expand(20_000, 4), rows_of(SamplingParams(top_k=2), 20_000), ops=with_block_noise())
    counts = np.bincount(draws, minlength=4).tolist()
    want = torch.tensor([1.0, 0.3]).double().softmax(dim=-1).tolist()
    assert counts[1] == counts[3] == 0
    assert chi_square([counts[0], counts[2]], want) < 15.1  # p = 1e-4


@pytest.mark.parametrize(
    "name",
    [lambda i: (i, 0, 0), lambda i: (7, i, 0), lambda i: (7, 0, i)],
    ids=["seed", "sample", "position"],
)
def test_each_counter_draws_on_its_own(name: Callable[[int], tuple[int, int, int]]) -> None:
    num = 1000
    logits = torch.tensor([1.0, -0.5, 0.3, -2.0])
    rows = [PickRow(SamplingParams(), *name(i)) for i in range(num)]
    draws = tokens(logits.expand(num, 4), rows)
    assert (
        chi_square(np.bincount(draws, minlength=4).tolist(), logits.double().softmax(dim=-1).tolist()) < 21.1
    )


def test_a_row_is_the_same_alone_and_in_any_company() -> None:
    torch.manual_seed(0)
    params = [dataclasses.replace(p, logprobs=n) for p in [*STAGES, SamplingParams()] for n in (None, 0, 3)]
    logits = torch.randn(len(params), 301) * 3
    rows = [PickRow(p, 42 + i, i % 2, i) for i, p in enumerate(params)]
    solo = [pick(logits[i : i + 1], [row], OPS, 299)[0] for i, row in enumerate(rows)]
    drafted = [choose(logits[i : i + 1], [row], OPS, 299)[0] for i, row in enumerate(rows)]
    for order in (range(len(rows)), reversed(range(len(rows))), torch.randperm(len(rows)).tolist()):
        at = list(order)
        company = [rows[i] for i in at]
        assert pick(logits[at], company, OPS, 299) == [solo[i] for i in at]
        assert choose(logits[at], company, OPS, 299) == [drafted[i] for i in at]


def test_the_formula() -> None:
    """argmax(logits / T + Gumbel(seed, sample, position, id)), nothing else."""
    torch.manual_seed(0)
    logits = torch.randn(20, 77)
    rows = [PickRow(SamplingParams(temperature=0.6), 9, 3, i) for i in range(20)]
    noise = reference.gumbel([(9, 3, i) for i in range(20)], 77)
    want = (logits / torch.tensor(0.6) + noise).argmax(dim=-1).tolist()
    assert tokens(logits, rows) == want


# Logprobs and drafts


@pytest.mark.parametrize("params", STAGES)
def test_logprobs_come_from_the_raw_logits(params: SamplingParams) -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, 50) * 2
    padded = torch.cat([logits, torch.full((4, 14), 9.0)], dim=1)
    picks = pick(padded, rows_of(dataclasses.replace(params, logprobs=3), 4), OPS, 50)
    exact = logits.double().log_softmax(dim=-1)
    for row, (token_id, logprobs) in enumerate(picks):
        assert logprobs is not None
        assert next(iter(logprobs)) == token_id
        assert len(logprobs) in (3, 4)
        assert sorted(logprobs, key=lambda i: -exact[row, i])[:3] == exact[row].topk(3).indices.tolist()
        for i, entry in logprobs.items():
            assert entry.logprob == pytest.approx(float(exact[row, i]), abs=1e-5)


def test_a_draft_is_the_target_s_own_pick() -> None:
    torch.manual_seed(0)
    logits = torch.randn(len(STAGES), 50)
    rows = [PickRow(params, 3, 0, i) for i, params in enumerate(STAGES)]
    assert choose(logits, rows, OPS, 48) == tokens(logits, rows, num_valid=48)


def test_a_draft_from_an_invalid_row() -> None:
    logits = torch.tensor([[0.0, 1.0], [NAN, 0.0], [-INF, -INF]])
    assert choose(logits, rows_of(GREEDY, 3), OPS, 2) == [1, -1, -1]
