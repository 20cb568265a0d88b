"""Faults: whatever raises inside a step, once or always, costs time and at most the request that causes it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from metrale import reference
from metrale.config import EngineConfig, SpeculativeConfig
from metrale.core import Draft, Sequence, SequenceKey
from metrale.drafters.base import Ask, Committed
from metrale.engine import engine as engine_module
from metrale.engine.engine import Engine
from metrale.kernels.ops import Ops
from metrale.sampling.params import SamplingParams
from metrale.scheduler.scheduler import Event
from tests.engine.schedules import committed_state, poison
from tests.engine.scripted import (
    PROMPTS,
    Target,
    cycle,
    drafting,
    emitted,
    greedy,
    make_engine,
    plain,
    requests_of,
    run,
    scripted,
)

OPERATORS = tuple(field.name for field in fields(Ops) if "Callable" in str(field.type))
WRITERS = ("conv_verify", "conv_prefill", "gdn_verify", "gdn_chunk", "rotary_store")


class Switch:
    """Counts operator calls, and raises at call `at` of the operators named: before its work or after it."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.at = -1
        self.is_after = False

    def arm(self, at: int = -1, is_after: bool = False) -> None:
        self.log, self.at, self.is_after = [], at, is_after

    def ops(self) -> Ops:
        sound = reference.ops()
        return replace(sound, **{name: self._wrap(name, getattr(sound, name)) for name in OPERATORS})

    def _wrap(self, name: str, operator: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            number = len(self.log)
            self.log.append(name)
            if number == self.at and not self.is_after:
                raise RuntimeError("injected fault")
            result = operator(*args, **kwargs)
            if number == self.at:
                raise RuntimeError("injected fault")
            return result

        return counted


@contextmanager
def operators(ops: Ops) -> Iterator[None]:
    with mock.patch.object(engine_module, "backend_ops", return_value=ops):
        yield


def hybrid(model: Path, switch: Switch, method: str | None, depth: int = 2) -> Engine:
    spec = (
        None
        if method is None
        else SpeculativeConfig(method, num_speculative_tokens=depth, prompt_lookup_min=1)
    )
    config = EngineConfig(
        str(model),
        spec,
        backend="torch",
        max_model_len=160,
        max_num_seqs=4,
        max_num_batched_tokens=75,
        skip_tokenizer_init=True,
        fold_threshold=4,
    )
    with operators(switch.ops()):
        engine = Engine(config)
    poison(engine, random.Random(0))
    return engine


REQUESTS: list[tuple[list[int], SamplingParams]] = [
    ([3, 1, 4], greedy(max_tokens=6, ignore_eos=True)),
    ([7], SamplingParams(temperature=1.0, seed=5, max_tokens=6, ignore_eos=True)),
    ([1 + i % 90 for i in range(130)], greedy(max_tokens=2, ignore_eos=True)),
]
FAULTY_STEP = 2  # the first request generates and drafts, the long prompt is at its second chunk


class Ended:
    """Outputs and committed states of a run, by the order of the requests."""

    def __init__(self, sequences: Seq[Sequence], states: Mapping[SequenceKey, Mapping[str, Tensor]]) -> None:
        self.tokens = [emitted(s) for s in sequences]
        self.reasons = [(s.finish_reason, s.error) for s in sequences]
        self.states = [states[s.key] for s in sequences]

    def assert_equal(self, other: Ended) -> None:
        assert self.tokens == other.tokens
        assert self.reasons == other.reasons
        for mine, theirs in zip(self.states, other.states, strict=True):
            for name in ("ssm", "conv", "keys", "values"):
                assert torch.equal(mine[name], theirs[name]), name
                assert not mine[name].isnan().any()


@contextmanager
def kept_states(engine: Engine) -> Iterator[dict[SequenceKey, Mapping[str, Tensor]]]:
    """Committed state of each sequence at its end."""
    states: dict[SequenceKey, Mapping[str, Tensor]] = {}
    original = engine.scheduler.finish

    def keep(sequence: Sequence, reason: str, stop_reason: int | str | None = None) -> None:
        states[sequence.key] = committed_state(engine, sequence)
        original(sequence, reason, stop_reason)

    with mock.patch.object(engine.scheduler, "finish", keep):
        yield states


def run_with_fault(
    engine: Engine, switch: Switch, at: int = -1, is_after: bool = False
) -> tuple[Ended, list[str]]:
    """The requests, the last one arriving late, with a fault at one call of one step; what that step's calls were."""
    log: list[str] = []
    with kept_states(engine) as states:
        ids = [engine.add_request(*request) for request in REQUESTS[:2]]
        ended: dict[int, Sequence] = {}
        number = 0
        while engine.has_work:
            if number == 1:
                ids.append(engine.add_request(*REQUESTS[2]))
            switch.arm(*((at, is_after) if number == FAULTY_STEP else ()))
            for event in engine.step():
                if event.finish_reason:
                    ended[event.sequence.request_id] = event.sequence
            if number == FAULTY_STEP:
                log = switch.log
            switch.arm()
            number += 1
    assert engine.pool.slots.num_free == engine.pool.num_slots
    return Ended([ended[i] for i in ids], states), log


@pytest.mark.parametrize("method", ["mtp", None])
def test_a_fault_at_each_operator_call_of_a_step(random_model: Path, method: str | None) -> None:
    """Before the call and, where the operator writes state, after it too: outputs and committed state stay the same."""
    switch = Switch()
    expected, _ = run_with_fault(hybrid(random_model, switch, None), switch)
    engine = hybrid(random_model, switch, method)
    sound, log = run_with_fault(engine, switch)
    sound.assert_equal(expected)
    assert {
        "conv_verify",
        "gdn_verify",
        "conv_prefill",
        "gdn_chunk",
        "attention_verify",
        "attention_prefill",
    } <= set(log)
    assert {"masked_argmax", "linear"} <= set(log), "pick and logits are part of the step"
    for at, name in enumerate(log):
        if method is None and name not in WRITERS:
            continue
        got, seen = run_with_fault(engine, switch, at, is_after=method is None)
        assert len(seen) > at + 1, "the step was not run again"
        got.assert_equal(expected)


def test_no_fault_is_left_unseen(random_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    switch = Switch()
    engine = hybrid(random_model, switch, None)
    with caplog.at_level("WARNING"):
        run_with_fault(engine, switch, at=3)
    assert ["injected fault" in record.getMessage() for record in caplog.records] == [True]


# On the scripted target: faults by request and in the drafter


class Broken(Target):
    """Raises whenever a forward holds rows of the sequence whose prompt starts with `victim`."""

    def __init__(self, victim: int, from_position: int = 0) -> None:
        super().__init__()
        self.victim, self.from_position = victim, from_position

    def forward(self, batch: Any, pool: Any) -> Tensor:
        hidden = super().forward(batch, pool)
        for groups in (batch.generated, batch.prompt):
            for n, group in enumerate(groups.host):
                first_page = int(groups.page_table[n][0])
                is_victim = int(pool.k_cache[0][first_page, 0, 0, 0]) == self.victim
                if is_victim and group.start + group.num_rows > self.from_position:
                    raise RuntimeError("a request that cannot be served")
        return hidden


@pytest.mark.parametrize("from_position", [0, 1, 5, 70])
@pytest.mark.parametrize("victim", range(5))
def test_a_request_that_always_fails_ends_alone(victim: int, from_position: int) -> None:
    expected = plain()
    target = Broken(PROMPTS[victim][0], from_position)
    assert len({prompt[0] for prompt in PROMPTS}) == len(PROMPTS)
    drafter = drafting(target, cycle((3, 1), (3, 3), (0, 0)))
    engine = make_engine(target, depth=3, drafter=drafter, max_num_seqs=3, max_num_batched_tokens=70)
    got = run(engine, requests_of(), may_fail=True)
    last = len(PROMPTS[victim]) + 14 - 1  # rows that it feeds in all
    for number, sequence in enumerate(got):
        if number != victim or last <= from_position:
            assert (emitted(sequence), sequence.finish_reason, sequence.error) == (
                expected[number],
                "length",
                None,
            )
    if last > from_position:
        broken = got[victim]
        assert broken.finish_reason == "error"
        assert broken.error == "RuntimeError: a request that cannot be served"
        assert emitted(broken) == expected[victim][: max(0, from_position + 1 - len(PROMPTS[victim]))]


@pytest.mark.parametrize("num_before", [0, 1, 4])
def test_a_nan_row_ends_its_own_request(num_before: int) -> None:
    """At the prompt's last row, at a generated row, under drafts; at once, and the neighbours are not touched."""
    expected = plain()
    said = [*expected[1][:num_before], None]
    for depth in (None, 1, 3, 8):
        target = Target(scripted({PROMPTS[1]: said}))
        script = cycle((8, 8), (3, 1))
        drafter = drafting(target, script, lambda sequence: [10] * 20 if sequence.prompt_len == 3 else [])
        engine = make_engine(target, depth=depth, drafter=depth and drafter)
        got = run(engine, requests_of())
        assert (got[1].finish_reason, got[1].error) == ("error", "the model gave no valid token")
        assert emitted(got[1]) == expected[1][:num_before]
        for number in (0, 2, 3, 4):
            assert emitted(got[number]) == expected[number]


def test_a_nan_row_behind_drafts_that_are_right() -> None:
    """The accepted drafts before it are emitted, as plain decode emits them."""
    said = [10, 11, 12, None]
    target = Target(scripted({(6, 7): said}))
    engine = make_engine(
        target, depth=8, drafter=drafting(target, lambda s, limit: (5, 5), lambda s: [10, 11, 12, 13, 14, 15])
    )
    (got,) = run(engine, [((6, 7), greedy(max_tokens=20))])
    assert (emitted(got), got.finish_reason) == ([10, 11, 12], "error")


class Stumbling(Target):
    """Every fifth forward raises once its rows are written, so that prompts start over."""

    def forward(self, batch: Any, pool: Any) -> Tensor:
        hidden = super().forward(batch, pool)
        if len(self.batches) % 5 == 2:
            raise RuntimeError("a fault that passes")
        return hidden


class Faulty:
    """A scripted drafter that raises at call `at` of one of its methods, once or from then on."""

    def __init__(self, inner: Any, method: str, at: int, is_lasting: bool) -> None:
        self.inner, self.method, self.at, self.is_lasting = inner, method, at, is_lasting
        self.needs_hidden = inner.needs_hidden
        self.count = 0
        self.released_at: list[int] = []

    def _maybe_raise(self, method: str) -> None:
        if method == self.method:
            self.count += 1
            if self.count == self.at or (self.is_lasting and self.count > self.at):
                raise RuntimeError("the drafter broke")

    def propose(self, asks: Seq[Ask]) -> list[Draft]:
        self._maybe_raise("propose")
        return self.inner.propose(asks)

    def commit(self, committed: Seq[Committed], hidden: Tensor | None) -> None:
        self._maybe_raise("commit")
        self.inner.commit(committed, hidden)

    def restart(self, key: SequenceKey) -> None:
        self._maybe_raise("restart")
        self.inner.restart(key)

    def release(self, key: SequenceKey) -> None:
        self._maybe_raise("release")
        self.released_at.append(self.count)
        self.inner.release(key)


def test_a_drafter_that_cannot_follow_forgets_the_sequences() -> None:
    """What it knew of them has a gap from here on."""
    target = Target()
    inner = drafting(target, cycle((3, 1)))
    made: list[Faulty] = []

    def make(*args: Any) -> Faulty:
        made.append(Faulty(inner(*args), "commit", 3, is_lasting=False))
        return made[0]

    run(make_engine(target, depth=3, drafter=make, max_num_seqs=3), requests_of(), may_fail=True)
    (faulty,) = made
    assert faulty.released_at[0] == 3
    assert faulty.count > 3


@pytest.mark.parametrize("is_lasting", [False, True])
@pytest.mark.parametrize("at", [1, 2, 3, 5])
@pytest.mark.parametrize("method", ["propose", "commit", "restart", "release"])
def test_a_drafter_that_raises_changes_no_output(method: str, at: int, is_lasting: bool) -> None:
    """Whatever it fails to do: no request ends early, no token is lost or told twice."""
    expected = plain()
    target = Stumbling()
    script = cycle((3, 1), (3, 3), (0, 0))
    inner = drafting(target, script)
    engine = make_engine(
        target,
        depth=3,
        drafter=lambda *args: Faulty(inner(*args), method, at, is_lasting),
        max_num_seqs=3,
        max_num_batched_tokens=70,
    )
    told: list[Event] = []
    got = run(engine, requests_of(), each_step=told.extend, may_fail=True)
    assert [emitted(s) for s in got] == expected
    assert [s.finish_reason for s in got] == ["length"] * len(got)
    for sequence in got:
        mine = [token for event in told if event.sequence is sequence for token in event.token_ids]
        assert mine == emitted(sequence)
