"""Admission in order, capacity to the last slot and page, what verdicts, aborts and restarts do."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq

import pytest
import torch
from torch import Tensor

from metrale.core import Draft, Sequence, SequenceKey, Verdict
from metrale.drafters.base import Ask, Committed
from metrale.errors import CapacityError
from metrale.sampling.params import SamplingParams
from metrale.scheduler.scheduler import Scheduler, SchedulerConfig
from metrale.state.pool import PAGE_SIZE, Pool, StateShape
from metrale.telemetry.statistics import SpeculationStats

SHAPE = StateShape(1, 1, 1, 1, 2, 2, 3, 1, 2)


class Recorder:
    """A drafter that notes what it is told."""

    needs_hidden = False

    def __init__(self) -> None:
        self.restarted: list[SequenceKey] = []
        self.released: list[SequenceKey] = []

    def propose(self, asks: Seq[Ask]) -> list[Draft]:
        return [Draft() for _ in asks]

    def commit(self, committed: Seq[Committed], hidden: Tensor | None) -> None:
        raise AssertionError("the step commits, not the scheduler")

    def restart(self, key: SequenceKey) -> None:
        self.restarted.append(key)

    def release(self, key: SequenceKey) -> None:
        self.released.append(key)


def make_pool(num_slots: int = 4, num_pages: int = 100) -> Pool:
    return Pool(SHAPE, num_slots, num_pages, 20, 4, torch.float32, torch.device("cpu"))


def make_scheduler(
    pool: Pool, drafter: Recorder | None = None, *, max_rows: int = 100, width: int = 32
) -> Scheduler:
    return Scheduler(SchedulerConfig(max_rows, 3, width), pool, drafter)


def make_sequence(
    number: int, prompt_len: int = 5, max_tokens: int = 9, request_id: int | None = None
) -> Sequence:
    return Sequence(
        key=SequenceKey(number, 0),
        request_id=number if request_id is None else request_id,
        sample=0,
        prompt_len=prompt_len,
        token_ids=list(range(1, prompt_len + 1)),
        params=SamplingParams(),
        seed=0,
        max_tokens=max_tokens,
        stats=SpeculationStats(),
    )


def verdict(
    sequence: Sequence, token_ids: tuple[int, ...], reason: str | None = None, **changes: object
) -> Verdict:
    plain = Verdict(sequence.key, 1, None, token_ids, (None,) * len(token_ids), finish_reason=reason)
    return plain._replace(**changes)


def names(scheduler: Scheduler) -> list[int]:
    return [key.sequence_id for key in scheduler.running]


@pytest.mark.parametrize("num_slots", [1, 4])
def test_every_slot_can_run_at_once(num_slots: int) -> None:
    """Exactly `num_slots` of more sequences, each new one as soon as a slot is free."""
    pool = make_pool(num_slots)
    scheduler = make_scheduler(pool)
    sequences = [make_sequence(n) for n in range(num_slots + 3)]
    for sequence in sequences:
        scheduler.add(sequence)
    scheduler.admit()
    assert names(scheduler) == list(range(num_slots))
    assert [s.slot for s in sequences[:num_slots]] == list(range(num_slots))
    assert scheduler.num_waiting == 3
    scheduler.admit()
    assert scheduler.num_waiting == 3
    scheduler.finish(sequences[0], "stop")
    scheduler.admit()
    assert (names(scheduler)[-1], sequences[num_slots].slot, scheduler.num_waiting) == (num_slots, 0, 2)


@pytest.mark.parametrize("spare", [-1, 0])
def test_pages_that_are_just_enough_are_enough(spare: int) -> None:
    """Four sequences of two pages each need eight pages: not nine, and seven admit three."""
    pool = make_pool(num_slots=4, num_pages=8 + spare)
    scheduler = make_scheduler(pool)
    for n in range(4):
        scheduler.add(make_sequence(n, prompt_len=PAGE_SIZE, max_tokens=PAGE_SIZE))
    scheduler.admit()
    assert len(scheduler.running) == 4 + spare
    assert pool.pages.num_free == (0 if spare == 0 else 1)


def test_admission_is_first_come_first_served() -> None:
    """A short sequence does not pass a long one that waits for pages, so that the long one's turn comes."""
    pool = make_pool(num_slots=4, num_pages=10)
    scheduler = make_scheduler(pool)
    sequences = [
        make_sequence(0, 1, 5 * PAGE_SIZE),
        make_sequence(1, 1, 7 * PAGE_SIZE),
        make_sequence(2, 1, 1),
    ]
    for sequence in sequences:
        scheduler.add(sequence)
    scheduler.admit()
    assert names(scheduler) == [0]
    assert sequences[1].slot == -1
    scheduler.finish(sequences[0], "stop")
    scheduler.admit()
    assert names(scheduler) == [1, 2]
    assert [s.order for s in sequences] == [0, 1, 2]


def test_a_sequence_that_can_never_fit_waits_and_takes_nothing() -> None:
    pool = make_pool(num_slots=1, num_pages=2)
    scheduler = make_scheduler(pool)
    scheduler.add(make_sequence(0, 1, 2 * PAGE_SIZE))
    scheduler.admit()
    assert scheduler.has_work
    assert (pool.slots.num_free, pool.pages.num_free) == (1, 2)


def test_a_finished_sequence_leaves_slot_pages_and_drafter() -> None:
    pool, drafter = make_pool(), Recorder()
    scheduler = make_scheduler(pool, drafter)
    sequence = make_sequence(3)
    scheduler.add(sequence)
    scheduler.admit()
    assert pool.pages.num_free < 100
    scheduler.finish(sequence, "length", 7)
    assert (sequence.finish_reason, sequence.stop_reason, sequence.slot, sequence.pages) == (
        "length",
        7,
        -1,
        [],
    )
    assert (pool.slots.num_free, pool.pages.num_free) == (4, 100)
    assert drafter.released == [sequence.key]
    assert not scheduler.has_work


@pytest.mark.parametrize("request_id", [10, 11, 12, 99])
def test_abort_ends_every_sample_of_one_request(request_id: int) -> None:
    """Running and waiting ones; the others stay where they are."""
    pool, drafter = make_pool(num_slots=3), Recorder()
    scheduler = make_scheduler(pool, drafter)
    sequences = [make_sequence(n, request_id=10 + n % 3) for n in range(8)]
    for sequence in sequences:
        scheduler.add(sequence)
    scheduler.admit()
    ended = [event.sequence for event in scheduler.abort(request_id)]
    expected = [s for s in sequences if s.request_id == request_id]
    assert sorted(s.key for s in ended) == [s.key for s in expected]
    assert all(s.finish_reason == "abort" for s in expected)
    assert all(s.finish_reason is None for s in sequences if s not in expected)
    assert drafter.released == [s.key for s in expected if s.key.sequence_id < 3]
    assert pool.slots.num_free == len(drafter.released)
    scheduler.admit()
    waiting = [s.key.sequence_id for s in sequences[3:] if s not in expected]
    assert names(scheduler)[-len(drafter.released) or 3 :] == waiting[: len(drafter.released)]
    assert scheduler.abort(request_id) == []


def test_restart_sends_unfinished_prompts_back() -> None:
    pool, drafter = make_pool(), Recorder()
    scheduler = make_scheduler(pool, drafter)
    prompting, generating = make_sequence(0, prompt_len=200), make_sequence(1, prompt_len=5)
    for sequence, num_rows in ((prompting, 128), (generating, 5)):
        scheduler.add(sequence)
        scheduler.admit()
        pool.commit(sequence.slot, num_rows)
        sequence.num_committed = num_rows
        for layer in pool.num_folded:
            layer[sequence.slot] = num_rows
    scheduler.restart_prompts([prompting.key, generating.key])
    assert (prompting.num_committed, generating.num_committed) == (0, 5)
    assert (pool.num_committed[0], pool.num_committed[1]) == (0, 5)
    assert [int(layer[0, 0, 0]) for layer in pool.num_folded] == [0]
    assert [int(layer[1, 0, 0]) for layer in pool.num_folded] == [5]
    assert drafter.restarted == [prompting.key]
    assert [g.start for g in scheduler.plan().prompt] == [0]


def test_apply_appends_counts_and_tells() -> None:
    pool = make_pool()
    scheduler = make_scheduler(pool, Recorder())
    first, second, third = (make_sequence(n) for n in range(3))
    for sequence in (first, second, third):
        scheduler.add(sequence)
    scheduler.admit()
    events = scheduler.apply(
        [
            verdict(first, (8, 9), num_drafts=3, num_accepted=1, num_trimmed=2, new_text="ab", text="state"),
            verdict(second, (4,), "stop", stop_reason=4),
            verdict(third, ()),
        ]
    )
    assert [(e.sequence, e.token_ids, e.new_text, e.finish_reason) for e in events] == [
        (first, (8, 9), "ab", None),
        (second, (4,), "", "stop"),
    ]
    assert (first.token_ids[-2:], first.text, first.shown, first.last_step) == ([8, 9], "state", ["ab"], 1)
    assert third.last_step == 1
    assert (second.finish_reason, second.stop_reason, second.slot) == ("stop", 4, -1)
    assert names(scheduler) == [0, 2]
    assert (first.stats.num_accepted_tokens, first.stats.num_trimmed_tokens) == (1, 2)
    total = SpeculationStats.sum(s.stats for s in (first, second, third))
    assert scheduler.stats == total
    assert scheduler.stats.num_emitted_tokens == 3


def test_an_invalid_token_ends_with_an_error_that_says_so() -> None:
    scheduler = make_scheduler(make_pool())
    sequence = make_sequence(0)
    scheduler.add(sequence)
    scheduler.admit()
    (event,) = scheduler.apply([verdict(sequence, (), "error")])
    assert (event.finish_reason, sequence.error) == ("error", "the model gave no valid token")


def test_fail() -> None:
    scheduler = make_scheduler(make_pool())
    sequence = make_sequence(0)
    scheduler.add(sequence)
    scheduler.admit()
    event = scheduler.fail(sequence.key, "RuntimeError: broken")
    assert (event.sequence, event.token_ids, event.finish_reason) == (sequence, (), "error")
    assert (sequence.error, sequence.finish_reason) == ("RuntimeError: broken", "error")
    assert not scheduler.has_work


@pytest.mark.parametrize(("width", "expected"), [(32, 3), (2, 3), (1, 0), (0, 0)])
def test_plan_heeds_width_drafting_and_choice(width: int, expected: int) -> None:
    scheduler = make_scheduler(make_pool(), Recorder(), width=width)
    sequences = [make_sequence(n, prompt_len=1) for n in range(2)]
    for sequence in sequences:
        scheduler.add(sequence)
        scheduler.admit()
        sequence.num_committed = 1
    assert [g.num_drafts for g in scheduler.plan().generated] == [expected, expected]
    assert [g.num_drafts for g in scheduler.plan(drafting=False).generated] == [0, 0]
    assert [g.key for g in scheduler.plan(only=[sequences[1].key]).generated] == [sequences[1].key]


def test_without_a_drafter_there_are_no_drafts() -> None:
    scheduler = make_scheduler(make_pool(), None)
    sequence = make_sequence(0, prompt_len=1)
    scheduler.add(sequence)
    scheduler.admit()
    sequence.num_committed = 1
    assert [g.num_drafts for g in scheduler.plan().generated] == [0]


def test_ten_thousand_events() -> None:
    """Random admissions, ends and aborts; two live sequences never share a slot or a page, and none is forgotten."""
    rng = random.Random(0)
    pool = make_pool(num_slots=4, num_pages=12)
    scheduler = make_scheduler(pool)
    alive: dict[int, Sequence] = {}
    most_admitted = 0
    for number in range(10_000):
        event = rng.random()
        if event < 0.4:
            alive[number] = make_sequence(number, rng.randint(1, 60), rng.randint(1, 60))
            scheduler.add(alive[number])
        elif event < 0.7 and scheduler.running:
            sequence = rng.choice(list(scheduler.running.values()))
            scheduler.finish(sequence, "stop")
            del alive[sequence.request_id]
        elif event < 0.8 and alive:
            victim = rng.choice(list(alive))
            assert [e.sequence.request_id for e in scheduler.abort(victim)] == [victim]
            del alive[victim]
        scheduler.admit()
        running = list(scheduler.running.values())
        by_arrival = sorted(running, key=lambda s: s.request_id)
        assert by_arrival == sorted(running, key=lambda s: s.order), "admitted out of order"
        most_admitted = max([most_admitted, *(s.order for s in running)])
        pages = [page for s in running for page in s.pages]
        assert len({s.slot for s in running}) == len(running) == 4 - pool.slots.num_free
        assert len(set(pages)) == len(pages) == 12 - pool.pages.num_free
        assert len(running) + scheduler.num_waiting == len(alive)
        for sequence in running:
            assert len(sequence.pages) == pool.num_pages_for(sequence.prompt_len + sequence.max_tokens)
        if len(alive) > 40:
            for victim in list(alive)[20:]:
                scheduler.abort(victim)
                del alive[victim]
    assert most_admitted > 1000


def test_a_released_slot_cannot_be_released_again() -> None:
    pool = make_pool()
    scheduler = make_scheduler(pool)
    sequence = make_sequence(0)
    scheduler.add(sequence)
    scheduler.admit()
    slot, pages = sequence.slot, sequence.pages
    scheduler.finish(sequence, "stop")
    with pytest.raises(CapacityError):
        pool.release(slot, pages)
