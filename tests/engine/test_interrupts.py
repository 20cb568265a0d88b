"""Interrupts and aborts at any point of a step, on a scripted target: nobody waits for ever, and the others go on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
from torch import Tensor

from metrale.core import Sequence
from tests.engine.scripted import (
    Target,
    cycle,
    drafting,
    emitted,
    finish,
    make_engine,
    plain,
    requests_of,
    run,
)


class Interrupted(Target):
    """A user's interrupt in the middle of forward number `at`."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at

    def forward(self, batch: Any, pool: Any) -> Tensor:
        hidden = super().forward(batch, pool)
        if len(self.batches) == self.at:
            raise KeyboardInterrupt
        return hidden


# Interrupts between the host's own statements


@contextmanager
def interrupted(owner: Any, name: str, at: int, *, is_after: bool) -> Iterator[None]:
    """A user's interrupt before or after the work of call `at` of a method."""
    sound, calls = getattr(owner, name), 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at and not is_after:
            raise KeyboardInterrupt
        result = sound(*args, **kwargs)
        if calls == at:
            raise KeyboardInterrupt
        return result

    with mock.patch.object(owner, name, call):
        yield


@pytest.mark.parametrize("is_after", [False, True])
@pytest.mark.parametrize("at", [1, 2, 5])
@pytest.mark.parametrize(
    "place",
    ["stats.record", "pool.acquire", "pool.release", "slots.release", "pages.release", "scheduler.finish"],
)
def test_an_interrupt_of_the_bookkeeping_ends_only_what_it_met(place: str, at: int, is_after: bool) -> None:
    """Nothing waits for ever, no slot or page is lost, and whoever goes on says what he would have said."""
    expected = plain()
    target = Target()
    engine = make_engine(target, depth=3, drafter=drafting(target, cycle((3, 1), (3, 3))), max_num_seqs=3)
    owner, name = {
        "stats.record": (engine.scheduler.stats, "record"),
        "pool.acquire": (engine.pool, "acquire"),
        "pool.release": (engine.pool, "release"),
        "slots.release": (engine.pool.slots, "release"),
        "pages.release": (engine.pool.pages, "release"),
        "scheduler.finish": (engine.scheduler, "finish"),
    }[place]
    num_pages = engine.pool.pages.num_free
    ids = [engine.add_request(*request) for request in requests_of()]

    def go_on() -> None:
        while engine.has_work:
            engine.advance()

    with interrupted(owner, name, at, is_after=is_after), pytest.raises(KeyboardInterrupt):
        go_on()
    go_on()
    told = [e for e in engine.outbox if e.finish_reason]
    assert sorted(e.sequence.request_id for e in told) == ids, "one end each"
    by_id = {e.sequence.request_id: e.sequence for e in told}
    broken = [s for s in by_id.values() if s.finish_reason == "error"]
    assert len(broken) <= 3
    assert {s.error for s in broken} <= {"an interrupt stopped this request in mid-step"}
    for number, i in enumerate(ids):
        if by_id[i].finish_reason != "error":
            assert emitted(by_id[i]) == expected[number]
            mine = [t for e in engine.outbox if e.sequence is by_id[i] for t in e.token_ids]
            assert mine == expected[number]
    assert engine.pool.slots.num_free == engine.pool.num_slots
    assert engine.pool.pages.num_free == num_pages
    assert not engine.scheduler.live
    assert [emitted(s) for s in run(engine, requests_of())] == expected


@pytest.mark.parametrize("victim", range(5))
@pytest.mark.parametrize("name", ["propose", "commit"])
def test_an_abort_in_the_middle_of_a_step_waits_for_its_end(name: str, victim: int) -> None:
    """A collected iterator or a signal handler may ask for it anywhere."""
    expected = plain()
    target = Target()
    inner = drafting(target, cycle((3, 1), (3, 3)))
    engine = make_engine(target, depth=3, drafter=inner, max_num_seqs=3)
    ids = [engine.add_request(*request) for request in requests_of()]
    assert engine.drafter is not None
    sound, calls = getattr(engine.drafter.inner, name), 0

    def abort_and_go_on(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            engine.abort(ids[victim])
        return sound(*args)

    with mock.patch.object(engine.drafter.inner, name, abort_and_go_on):
        while engine.has_work:
            engine.advance()
    ended = {e.sequence.request_id: e.sequence for e in engine.outbox if e.finish_reason}
    assert [ended[i].finish_reason for i in ids] == [
        "abort" if n == victim else "length" for n in range(len(ids))
    ]
    for number, i in enumerate(ids):
        if number != victim:
            assert emitted(ended[i]) == expected[number]
    assert engine.drafter._lost == set()


@pytest.mark.parametrize("at", range(1, 8))
def test_an_interrupt_passes_and_the_engine_goes_on(at: int) -> None:
    expected = plain()
    target = Interrupted(at)
    engine = make_engine(
        target,
        depth=3,
        drafter=drafting(target, cycle((3, 1), (3, 3))),
        max_num_seqs=3,
        max_num_batched_tokens=70,
    )
    ids = [engine.add_request(*request) for request in requests_of()]
    ended: dict[int, Sequence] = {}

    def go_on() -> None:
        while engine.has_work:
            ended.update({e.sequence.request_id: e.sequence for e in engine.step() if e.finish_reason})

    with pytest.raises(KeyboardInterrupt):
        go_on()
    rest = finish(engine, [i for i in ids if i not in ended])
    got = {**ended, **{s.request_id: s for s in rest}}
    assert [emitted(got[i]) for i in ids] == expected
