"""Clocks: replayed CUDA graphs over rotated inputs on a GPU, plain calls on a CPU; rounds of all runners interleaved."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, Protocol
from unittest.mock import patch

import torch

from bench.kernels.problem import Problem

MAX_COPIES = 128
MIN_RESET_COPIES = 4
GRAPH_US = 1000.0
"""About how long one graph runs: long against the two events around it."""
MAX_LAUNCHES = 256
COPY_BYTES = 1 << 30


class Runner(Protocol):
    """Times one variant of a problem, a round at a time."""

    note: str

    def once(self) -> None:
        """Runs the work and waits for it."""

    def record(self) -> None:
        """One timed round; on a GPU it only enqueues."""

    def microseconds(self) -> list[float]:
        """Time of one launch of the work, for each recorded round. Waits for the device."""


class CallRunner:
    """Calls the operator and reads the host's clock."""

    note = ""

    def __init__(self, problem: Problem, ops: Any, device: torch.device) -> None:
        self._inputs = problem.make(device)
        self._problem, self._ops = problem, ops
        self._us: list[float] = []
        self._run()

    def _run(self) -> None:
        self._problem.run(self._ops, self._inputs)

    def once(self) -> None:
        if self._problem.reset is not None:
            self._problem.reset(self._inputs)
        self._run()

    def record(self) -> None:
        if self._problem.reset is not None:
            self._problem.reset(self._inputs)
        start = time.perf_counter()
        self._run()
        self._us.append((time.perf_counter() - start) * 1e6)

    def microseconds(self) -> list[float]:
        return self._us


class FixedTables:
    """Keeps every small table that launchers make of host numbers, so that a captured launcher copies nothing."""

    def __init__(self) -> None:
        self._made: dict[Any, Any] = {}

    def _keeping(self, build: Callable[..., Any]) -> Callable[..., Any]:
        def kept(*arguments: Any, **options: Any) -> Any:
            key = (build, _frozen(arguments), tuple(sorted(options.items())))
            if key not in self._made:
                self._made[key] = build(*arguments, **options)
            return self._made[key]

        return kept

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Within, every launcher that is loaded gets its tables here."""
        with ExitStack() as stack:
            for name, module in list(sys.modules.items()):
                if name.startswith("metrale.kernels.") and hasattr(module, "index_tensors"):
                    kept = self._keeping(module.index_tensors)
                    stack.enter_context(patch.object(module, "index_tensors", kept))
            stack.enter_context(patch.object(torch, "tensor", self._keeping(torch.tensor)))
            yield


def _frozen(value: Any) -> Any:
    """Nested lists as tuples, fit for a key."""
    return tuple(_frozen(v) for v in value) if isinstance(value, (list, tuple)) else value


class GraphRunner:
    """Replays one CUDA graph of many launches over several copies of the inputs, so that every launch meets a cold L2.

    Inputs are made and kernels compiled before the capture, which holds device work on fixed buffers alone. Where the work
    cannot be captured it is launched one by one, and the note says so. Inputs that cannot fill the L2 cache are measured
    warm, and the note says that.
    """

    def __init__(self, problem: Problem, ops: Any, device: torch.device) -> None:
        copies, is_cold = num_copies(problem, torch.cuda.get_device_properties(device).L2_cache_size)
        self._inputs = [problem.make(device) for _ in range(copies)]
        self._reset = problem.reset
        self.num_launches = copies if self._reset else num_launches(problem.num_bytes, copies)
        self.note = "" if is_cold else "warm L2"
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

        def work(num: int) -> None:
            for i in range(num):
                problem.run(ops, self._inputs[i % copies])

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        self._tables = FixedTables()  # a graph reads them: they live as long
        with self._tables.installed(), torch.cuda.stream(side):
            work(copies)
            self._put_back()
            torch.cuda.synchronize()
            self._replay = self._capture(lambda: work(self.num_launches), side)

    def _capture(self, work: Callable[[], None], side: torch.cuda.Stream) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=side):
                work()
        except RuntimeError as error:
            self.note = f"not captured ({str(error).splitlines()[0][:60]})"
            torch.cuda.synchronize()
            return work
        return graph.replay

    def _put_back(self) -> None:
        if self._reset is not None:
            for inputs in self._inputs:
                self._reset(inputs)

    def once(self) -> None:
        self._put_back()
        self._replay()
        torch.cuda.synchronize()

    def record(self) -> None:
        self._put_back()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self._replay()
        end.record()
        self._events.append((start, end))

    def microseconds(self) -> list[float]:
        torch.cuda.synchronize()
        return [start.elapsed_time(end) * 1e3 / self.num_launches for start, end in self._events]


def num_copies(problem: Problem, l2_bytes: int) -> tuple[int, bool]:
    """How many copies of the inputs to rotate, and whether that many flush the L2 cache between two uses of one."""
    least = MIN_RESET_COPIES if problem.reset is not None else 1
    if problem.num_bytes > 8 * l2_bytes:
        return least, True
    wanted = 1 + -(-2 * l2_bytes // max(problem.num_bytes, 1))
    return max(least, min(wanted, MAX_COPIES)), wanted <= MAX_COPIES


def num_launches(num_bytes: int, copies: int) -> int:
    """Launches of one graph, a multiple of the copies: about GRAPH_US by a guess of 3 us and 2 TB/s a launch."""
    guess = 3.0 + num_bytes / 2e6
    wanted = round(GRAPH_US / (guess * copies))
    return copies * max(1, min(wanted, MAX_LAUNCHES // copies))


def runner_of(problem: Problem, ops: Any, device: torch.device) -> Runner:
    return (GraphRunner if device.type == "cuda" else CallRunner)(problem, ops, device)


def interleave(runners: Sequence[Runner], rounds: int) -> None:
    """`rounds` rounds of all runners, every second one backwards, so that a machine that slows down meets all alike."""
    for i in range(rounds):
        for runner in runners if i % 2 == 0 else reversed(runners):
            runner.record()


def median_and_spread(us: Sequence[float]) -> tuple[float, float]:
    median = statistics.median(us)
    return median, (max(us) - min(us)) / median


@cache
def copy_bandwidth(num_bytes: int = COPY_BYTES, rounds: int = 20) -> float:
    """Bytes a second, read plus written, of a large copy on the GPU: the roofline that figures stand against."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device="cuda").fill_(1)
    goal = torch.empty_like(source)
    events = []
    for _ in range(rounds + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        goal.copy_(source)
        end.record()
        events.append((start, end))
    torch.cuda.synchronize()
    ms: float = statistics.median(start.elapsed_time(end) for start, end in events[3:])
    return 2 * num_bytes / (ms * 1e-3)
