"""The step on a scripted target: acceptance patterns, row layout, drafts that cannot be used, what a commit advances."""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Seq

import pytest
import torch
from torch import Tensor

from metrale.core import Draft, Sequence, SequenceKey
from metrale.drafters.base import Ask, Committed
from metrale.engine.engine import DrafterFactory, Engine
from metrale.errors import CapacityError
from metrale.sampling.params import SamplingParams
from metrale.telemetry.statistics import SpeculationStats
from tests.engine.scripted import (
    EOS,
    SECOND_EOS,
    VOCAB_SIZE,
    Target,
    always_right,
    always_wrong,
    cycle,
    drafting,
    emitted,
    finish,
    greedy,
    make_engine,
    run,
    scripted,
)

PROMPTS = [(5,), (6, 7, 8), tuple(range(4, 44)) * 2, (9, 9), tuple(range(40, 4, -1)) * 4]


def plain(requests: Seq[tuple[Seq[int], SamplingParams]]) -> list[list[int]]:
    return [emitted(run(make_engine(Target(), max_num_seqs=1), [request])[0]) for request in requests]


class Fixed:
    """A drafter that answers every ask by one function of it, and notes the rows that it is told of."""

    needs_hidden = False

    def __init__(self, propose: Callable[[Seq[Ask]], list[Draft]]) -> None:
        self._propose = propose
        self.committed: list[tuple[SequenceKey, int, int]] = []

    def propose(self, asks: Seq[Ask]) -> list[Draft]:
        return self._propose(asks)

    def commit(self, committed: Seq[Committed], hidden: Tensor | None) -> None:
        assert hidden is None, "hidden rows are for drafters that need them"
        self.committed += [(rows.sequence.key, rows.start, rows.num_rows) for rows in committed]

    def restart(self, key: SequenceKey) -> None:
        raise AssertionError("no prompt starts over here")

    def release(self, key: SequenceKey) -> None:
        pass


def fixed(propose: Callable[[Seq[Ask]], list[Draft]]) -> DrafterFactory:
    return lambda loaded, pool, num_valid: Fixed(propose)


@pytest.mark.parametrize(
    "steps",
    [
        [(4, 2), (0, 0), (4, 4), (0, 0)],
        [(4, 0)],
        [(4, 4)],
        [(1, 0), (4, 1), (2, 2), (3, 1)],
        [(0, 0), (0, 0), (4, 3)],
    ],
    ids=str,
)
def test_patterns_equal_plain_decode(steps: list[tuple[int, int]]) -> None:
    """K=4 accept 2, none, K=4 accept 4, none, and so on for 100 tokens."""
    requests = [(prompt[:50], greedy(max_tokens=100)) for prompt in PROMPTS]
    target = Target()
    engine = make_engine(target, depth=4, drafter=drafting(target, cycle(*steps)))
    got = run(engine, requests)
    assert [emitted(s) for s in got] == plain(requests)
    for sequence in got:
        kept = {right for drafts, right in steps if drafts}
        others = [n for i, n in enumerate(sequence.stats.acceptance_histogram) if i not in kept]
        assert sum(others) <= 1, "only a round that the length cut short may keep another count"
        assert sequence.stats.num_drafts >= 10


def test_wrong_at_a_random_place_each_round() -> None:
    rng = random.Random(0)

    def script(sequence: Sequence, limit: int) -> tuple[int, int]:
        num_drafts = rng.randint(0, limit)
        return num_drafts, rng.randint(0, num_drafts)

    requests = [(prompt[:3], greedy(max_tokens=150)) for prompt in PROMPTS]
    target = Target()
    engine = make_engine(target, depth=7, drafter=drafting(target, script), max_num_seqs=3)
    assert [emitted(s) for s in run(engine, requests)] == plain(requests)


@pytest.mark.parametrize("depth", [0, 1, 2, 5, 8, 16])
@pytest.mark.parametrize("budget", [1, 32, 2048])
def test_any_depth_at_any_budget(depth: int, budget: int) -> None:
    requests = [(prompt, greedy(max_tokens=20)) for prompt in PROMPTS]
    target = Target()
    engine = make_engine(
        target, depth=depth, drafter=drafting(target, always_right), max_num_batched_tokens=budget
    )
    assert [emitted(s) for s in run(engine, requests)] == plain(requests)
    assert engine.scheduler.stats.draft_acceptance_rate == (1.0 if depth and budget > 1 else 0.0)


def test_rows_of_a_step() -> None:
    """Generated groups first, then prompt groups, each in slot order; logits of every generated row and of a prompt's last."""
    target = Target()
    engine = make_engine(target, depth=2, drafter=drafting(target, always_wrong), max_num_batched_tokens=80)
    for prompt in ((5,), (6, 7)):
        engine.add_request(prompt, greedy(max_tokens=30))
    engine.step()
    engine.abort(0)  # slot 0 goes to the long prompt, so that slots and arrival disagree
    engine.add_request(tuple(range(4, 44)) * 2, greedy(max_tokens=30))
    engine.add_request((8, 9), greedy(max_tokens=30))
    engine.step()
    batch = target.batches[-1]
    assert [tuple(g) for g in batch.generated.host] == [(1, 2, 0, 3)]
    assert [tuple(g) for g in batch.prompt.host] == [(0, 0, 0, 64), (2, 0, 64, 2)]
    assert batch.num_generated == 3
    assert batch.logit_rows.tolist() == [0, 1, 2, 68], "none for a chunk that does not end its prompt"
    assert batch.positions.tolist() == [2, 3, 4, *range(64), 0, 1]
    pages = {s.slot: s.pages for s in engine.scheduler.running.values()}
    for groups in (batch.generated, batch.prompt):
        for n, group in enumerate(groups.host):
            assert groups.page_table[n][: len(pages[group.slot])].tolist() == pages[group.slot]
    finish(engine, [])


@pytest.mark.parametrize("bad", [-1, -7, VOCAB_SIZE, VOCAB_SIZE + 1000])
@pytest.mark.parametrize("place", [0, 1, 3])
def test_a_draft_ends_at_what_is_no_token(bad: int, place: int) -> None:
    requests = [((5, 6), greedy(max_tokens=12))]
    (expected,) = plain(requests)

    def propose(asks: Seq[Ask]) -> list[Draft]:
        drafts = []
        for ask in asks:
            tokens = expected[ask.sequence.num_emitted :][: ask.num_drafts]
            drafts.append(
                Draft((*tokens[:place], bad, *tokens[place + 1 :]) if len(tokens) > place else tuple(tokens))
            )
        return drafts

    engine = make_engine(Target(), depth=4, drafter=fixed(propose))
    (got,) = run(engine, requests)
    assert emitted(got) == expected
    assert got.stats.num_trimmed_tokens > 0
    assert got.stats.num_accepted_tokens == got.stats.num_draft_tokens
    assert (got.stats.num_drafts > 0) == (place > 0)


def test_more_drafts_than_asked_are_dropped_and_counted() -> None:
    requests = [((5, 6), greedy(max_tokens=9))]
    (expected,) = plain(requests)
    engine = make_engine(
        Target(),
        depth=2,
        drafter=fixed(
            lambda asks: [Draft(tuple(expected[a.sequence.num_emitted :]) + (7,) * 5) for a in asks]
        ),
    )
    (got,) = run(engine, requests)
    assert emitted(got) == expected
    assert len(got.stats.acceptance_histogram) == 3
    assert got.stats.num_trimmed_tokens >= 5 * got.stats.num_drafts


@pytest.mark.parametrize(
    "answer", [lambda asks: [], lambda asks: [Draft() for _ in asks], lambda asks: [Draft((9,))]]
)
def test_fewer_drafts_than_asked(answer: Callable[[Seq[Ask]], list[Draft]]) -> None:
    requests = [((5, n), greedy(max_tokens=9)) for n in range(4, 7)]
    engine = make_engine(Target(), depth=3, drafter=fixed(answer))
    assert [emitted(s) for s in run(engine, requests)] == plain(requests)


def test_the_drafter_learns_what_was_committed_and_nothing_else() -> None:
    """Every position once and in order, prompt and generated, rejected rows never; not after the end."""
    target = Target()
    truth_of = drafting(target, cycle((3, 1), (3, 3), (0, 0)))(None, None, VOCAB_SIZE)  # type: ignore[arg-type]
    drafter = Fixed(truth_of.propose)
    engine = make_engine(target, depth=3, drafter=lambda *_: drafter, max_num_batched_tokens=100)
    sequences = run(engine, [(PROMPTS[4], greedy(max_tokens=15)), (PROMPTS[1], greedy(max_tokens=10))])
    for sequence in sequences:
        rows = [(start, n) for key, start, n in drafter.committed if key == sequence.key]
        ends = [start + n for start, n in rows]
        assert [start for start, _ in rows] == [0, *ends[:-1]]
        assert ends[-1] < sequence.prompt_len + len(emitted(sequence)) - 1, (
            "its last rows are nobody's business"
        )


def fresh_step(depth: int = 3) -> tuple[Engine, Target]:
    """Two sequences one token into their output, a third about to start its prompt."""
    target = Target()
    engine = make_engine(target, depth=depth, drafter=drafting(target, always_right))
    engine.add_request((5,), greedy(max_tokens=9))
    engine.add_request((6, 7), greedy(max_tokens=9))
    engine.step()
    engine.add_request((8, 9), greedy(max_tokens=9))
    engine.scheduler.admit()
    return engine, target


def test_a_run_commits_nothing_and_can_be_repeated() -> None:
    engine, _ = fresh_step()
    scheduler, pool = engine.scheduler, engine.pool
    before = [(s.token_ids.copy(), s.num_committed, s.last_step) for s in scheduler.running.values()]
    plan = scheduler.plan()
    first = engine._step.run(engine._step.prepare(plan, scheduler.running))
    assert [(s.token_ids, s.num_committed, s.last_step) for s in scheduler.running.values()] == before
    assert pool.num_committed[:3] == [1, 2, 0]
    second = engine._step.run(engine._step.prepare(plan, scheduler.running))
    assert second.verdicts == first.verdicts
    assert [v.num_rows for v in first.verdicts] == [4, 4, 2]
    assert [len(v.token_ids) for v in first.verdicts] == [4, 4, 1]
    engine._step.commit(second)
    assert pool.num_committed[:3] == [5, 6, 2]
    assert [s.num_committed for s in scheduler.running.values()] == [5, 6, 2]


def test_without_drafting_the_drafter_is_not_asked() -> None:
    engine, _ = fresh_step()

    def propose(asks: Seq[Ask]) -> list[Draft]:
        raise AssertionError("asked")

    engine._step._drafter = Fixed(propose)
    prepared = engine._step.prepare(engine.scheduler.plan(), engine.scheduler.running, drafting=False)
    outcome = engine._step.run(prepared)
    assert [v.num_rows for v in outcome.verdicts] == [1, 1, 2]


@pytest.mark.parametrize("what", ["rows above the ring", "past the pages"])
def test_a_plan_that_does_not_fit_raises_before_any_work(what: str) -> None:
    engine, target = fresh_step()
    plan = engine.scheduler.plan()
    first, *others = plan.generated
    if what == "rows above the ring":
        first = first._replace(num_drafts=4)
    else:
        first = first._replace(start=engine.scheduler.running[first.key].prompt_len + 15)
    num_batches = len(target.batches)
    with pytest.raises(CapacityError, match=f"do not fit slot {first.slot}"):
        engine._step.prepare(plan._replace(generated=(first, *others)), engine.scheduler.running)
    assert len(target.batches) == num_batches


@pytest.mark.parametrize("depth", [0, 2, 4])
def test_each_step_emits_for_everyone_that_it_holds(depth: int) -> None:
    """At least one token a step and generating sequence, and a first token with a prompt's last chunk."""
    target = Target()
    engine = make_engine(
        target,
        depth=depth,
        drafter=drafting(target, cycle((4, 0), (4, 3), (1, 1))),
        max_num_batched_tokens=70,
    )
    for prompt in PROMPTS:
        engine.add_request(prompt, greedy(max_tokens=11))
    num_steps = 0
    while engine.has_work:
        engine.scheduler.admit()
        plan = engine.scheduler.plan()
        ends = {
            g.key for g in plan.prompt if g.start + g.num_known == engine.scheduler.running[g.key].prompt_len
        }
        expected = {g.key for g in plan.generated} | ends
        events = engine.step()
        assert {e.sequence.key for e in events if e.token_ids} == expected
        num_steps += 1
    assert num_steps < 5 * 11 + sum(-(-len(p) // 64) for p in PROMPTS)


def test_an_eos_among_the_drafts_is_where_state_ends_too() -> None:
    """The trim comes before the commit: rows after the last fed token that counts are not committed."""
    said = [10, 11, EOS, 20, 21, 22, 23]
    target = Target(scripted({(5, 6): said}), eos=(EOS, SECOND_EOS))
    engine = make_engine(target, depth=6, drafter=drafting(target, always_right))
    engine.add_request((5, 6), greedy(max_tokens=20))
    engine.step()
    plan = engine.scheduler.plan()
    outcome = engine._step.run(engine._step.prepare(plan, engine.scheduler.running))
    (verdict,) = outcome.verdicts
    assert (verdict.token_ids, verdict.num_rows, verdict.finish_reason) == ((11, EOS), 2, "stop")
    assert (verdict.num_drafts, verdict.num_accepted) == (6, 2)


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 17])
def test_statistics_of_a_request_and_of_the_engine(num_tokens: int) -> None:
    target = Target()
    engine = make_engine(target, depth=3, drafter=drafting(target, cycle((3, 1), (0, 0), (2, 2))))
    got = run(engine, [(prompt, greedy(max_tokens=num_tokens)) for prompt in PROMPTS])
    assert [s.stats.num_emitted_tokens for s in got] == [num_tokens] * len(PROMPTS)
    assert engine.scheduler.stats == SpeculationStats.sum(s.stats for s in got)


def test_nothing_to_do_is_an_empty_step() -> None:
    engine = make_engine(Target())
    assert engine.step() == []
    assert torch.equal(torch.tensor(engine.pool.num_committed), torch.zeros(5, dtype=torch.int64))
