"""The gate holds back every figure of a wrong output; runs are interleaved and counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from bench.harness import Case, Gate, GateError, Timing, interleave


def recording(name: str, log: list[str]) -> Case:
    return Case(name, lambda: log.append(name), gate="same")


def counting(values: list[int]) -> Callable[[], int]:
    """Gives one value a call."""
    left: Iterator[int] = iter(values)
    return lambda: next(left)


def test_rounds_are_interleaved_and_alternate() -> None:
    log: list[str] = []
    timings = interleave([recording("a", log), recording("b", log)], rounds=3)
    assert log == ["a", "b", "a", "b", "b", "a", "a", "b"]  # the gate, then three rounds
    assert [len(timing.seconds) for timing in timings] == [3, 3]


def test_a_different_output_stops_the_benchmark_before_any_timing() -> None:
    log: list[str] = []
    cases = [
        Case("plain", lambda: (1, 2), gate=0),
        Case("mtp 3", lambda: (1, 3), gate=0),
        recording("late", log),
    ]
    with pytest.raises(GateError, match="mtp 3 gives another output than plain"):
        interleave(cases, rounds=1)
    assert log == []


def test_a_timed_run_passes_the_gate_too() -> None:
    with pytest.raises(GateError):
        interleave([Case("drifts", counting([1, 1, 2]), gate=0)], rounds=2)


def test_gates_are_apart_and_a_baseline_has_none() -> None:
    gate = Gate()
    gate.check(Case("a", lambda: 1, gate="x"), 1)
    gate.check(Case("b", lambda: 2, gate="y"), 2)
    gate.check(Case("baseline", lambda: 3), 3)


def test_median_and_spread() -> None:
    timing = Timing(Case("a", lambda: None), seconds=[1.0, 4.0, 2.0])
    assert timing.median == 2.0
    assert timing.spread == 1.5
