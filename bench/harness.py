"""The harness of every benchmark: the gate first, then interleaved runs and their medians.

Knows nothing of what it times. A case whose output differs from its reference stops the benchmark: no figure
is reported on a red gate.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


class GateError(Exception):
    """A case's output is not what its reference gives."""


@dataclass(frozen=True)
class Case:
    """One thing to time.

    `run` does the work once and returns its output. Cases of equal `gate` must return equal outputs; None: a
    baseline that owes nobody its bits.
    """

    name: str
    run: Callable[[], Any]
    gate: Hashable | None = None


@dataclass
class Timing:
    """Seconds per run of one case, and the output of its last run."""

    case: Case
    seconds: list[float] = field(default_factory=list)
    output: Any = None

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """(slowest - fastest) / median: how far to trust the median."""
        return (max(self.seconds) - min(self.seconds)) / self.median


class Gate:
    """Remembers the first output of each gate and holds every later one to it."""

    def __init__(self) -> None:
        self._references: dict[Hashable, tuple[str, Any]] = {}

    def check(self, case: Case, output: Any) -> None:
        """Raises GateError if a case of the same gate gave another output before."""
        if case.gate is None:
            return
        name, reference = self._references.setdefault(case.gate, (case.name, output))
        if output != reference:
            raise GateError(f"{case.name} gives another output than {name}: no figure is reported")


def interleave(cases: Sequence[Case], rounds: int, console: Console | None = None) -> list[Timing]:
    """Warms every case up through the gate, then times `rounds` rounds of all cases.

    Rounds alternate in direction, so that a machine that slows down meets every case alike. Timed runs pass the
    gate too. Raises GateError.
    """
    gate = Gate()
    timings = [Timing(case) for case in cases]
    with _progress(len(cases) * (rounds + 1), console) as advance:
        for timing in timings:
            advance(f"gate: {timing.case.name}")
            gate.check(timing.case, timing.case.run())
        for i in range(rounds):
            for timing in timings if i % 2 == 0 else reversed(timings):
                advance(f"round {i + 1}: {timing.case.name}")
                start = time.perf_counter()
                timing.output = timing.case.run()
                timing.seconds.append(time.perf_counter() - start)
                gate.check(timing.case, timing.output)
    return timings


@contextmanager
def _progress(total: int, console: Console | None) -> Iterator[Callable[[str], None]]:
    """A bar where the console is a terminal. Yields what moves it on, a call with the next run's name."""
    if console is None or not console.is_terminal:
        yield lambda name: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description:<40}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=total, completed=-1)
        yield lambda name: bar.update(task, description=name, advance=1)


def machine() -> dict[str, Any]:
    """What a figure depends on besides the code: processor, cores, versions."""
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in ("metrale", "torch", "triton", "transformers")},
    }


def processor() -> str:
    """The CPU's name as the system gives it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def write_json(path: Path, report: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
