"""A drafter's faults stay its own: for the sequences that it was called for, until their prompt starts over."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any, cast

import pytest

from metrale.core import Draft, Sequence, SequenceKey
from metrale.drafters.base import Ask, Committed
from metrale.drafters.guard import GuardedDrafter
from metrale.sampling.params import SamplingParams
from metrale.telemetry.statistics import SpeculationStats


class Recorder:
    """Drafts one token, the sequence's own number, unless it is to raise."""

    needs_hidden = False

    def __init__(self) -> None:
        self.broken: set[str] = set()
        self.calls: list[tuple[str, list[int]]] = []

    def _called(self, name: str, keys: Seq[SequenceKey]) -> None:
        self.calls.append((name, [key.sequence_id for key in keys]))
        if name in self.broken:
            raise RuntimeError(f"{name} broke")

    def propose(self, asks: Seq[Ask]) -> list[Draft]:
        self._called("propose", [ask.sequence.key for ask in asks])
        return [Draft((ask.sequence.key.sequence_id,)) for ask in asks]

    def commit(self, committed: Seq[Committed], hidden: Any) -> None:
        self._called("commit", [rows.sequence.key for rows in committed])

    def restart(self, key: SequenceKey) -> None:
        self._called("restart", [key])

    def release(self, key: SequenceKey) -> None:
        self._called("release", [key])


def sequence(number: int) -> Sequence:
    return Sequence(SequenceKey(number, 0), number, 0, 1, [1], SamplingParams(), 0, 8, SpeculationStats())


ONE, TWO = sequence(1), sequence(2)


def asks(*sequences: Sequence) -> list[Ask]:
    return [Ask(s, 3) for s in sequences]


def rows(*sequences: Sequence) -> list[Committed]:
    return [Committed(s, 0, 0, 1, is_prompt=False) for s in sequences]


def drafts(guard: GuardedDrafter, *sequences: Sequence) -> list[tuple[int, ...]]:
    return [draft.token_ids for draft in guard.propose(asks(*sequences))]


@pytest.mark.parametrize("hook", ["propose", "commit"])
def test_a_fault_loses_the_sequences_it_was_called_for(hook: str, caplog: pytest.LogCaptureFixture) -> None:
    inner = Recorder()
    guard = GuardedDrafter(inner)
    assert drafts(guard, ONE, TWO) == [(1,), (2,)]
    inner.broken = {hook}
    if hook == "propose":
        assert drafts(guard, ONE) == [()]
    else:
        guard.commit(rows(ONE), None)
    assert inner.calls[-1] == ("release", [1]), "it forgets what may have a gap"
    inner.broken = set()
    assert drafts(guard, ONE, TWO) == [(), (2,)]
    guard.commit(rows(ONE, TWO), None)
    assert inner.calls[-1] == ("commit", [2])
    guard.restart(ONE.key)
    assert drafts(guard, TWO, ONE) == [(2,), (1,)]
    assert len(caplog.records) == 1


def test_a_lasting_fault_is_told_once_and_costs_no_more(caplog: pytest.LogCaptureFixture) -> None:
    inner = Recorder()
    inner.broken = {"propose", "commit", "restart", "release"}
    guard = GuardedDrafter(inner)
    for _ in range(4):
        assert drafts(guard, ONE, TWO) == [(), ()]
        guard.commit(rows(ONE, TWO), None)
    guard.restart(ONE.key)
    guard.release(ONE.key)
    guard.release(TWO.key)
    assert len(caplog.records) == 1
    assert sum(name == "propose" and bool(keys) for name, keys in inner.calls) == 1


def test_the_next_owner_of_a_key_starts_afresh() -> None:
    inner = Recorder()
    guard = GuardedDrafter(inner)
    inner.broken = {"propose"}
    drafts(guard, ONE)
    inner.broken = set()
    guard.release(ONE.key)
    assert drafts(guard, ONE) == [(1,)]


class Liar(int):
    """Equal to every other number."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = int.__hash__


def test_tokens_are_plain_integers() -> None:
    inner = Recorder()
    inner.propose = lambda asks: [Draft((Liar(7),))]  # type: ignore[method-assign]
    ((token,),) = drafts(GuardedDrafter(inner), ONE)
    assert (type(token), token) == (int, 7)
    inner.propose = lambda asks: [Draft(("7",))]  # type: ignore[method-assign, arg-type]
    assert drafts(GuardedDrafter(inner), ONE) == [()]


@pytest.mark.parametrize("given", [[], [Draft((7,)), Draft((8,))], None])
def test_a_wrong_number_of_drafts_is_a_fault(given: list[Draft] | None) -> None:
    inner = Recorder()
    inner.propose = lambda asks: cast("list[Draft]", given)  # type: ignore[method-assign]
    assert drafts(GuardedDrafter(inner), ONE) == [()]
