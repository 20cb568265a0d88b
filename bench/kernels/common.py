"""What every microbenchmark shares: the choice of backend, the gate, the measurement, the table, the command line."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from bench.harness import GateError, processor
from bench.kernels.problem import OURS, Oracle, Problem, Row, difference
from bench.kernels.timing import copy_bandwidth, interleave, median_and_spread, runner_of

HOMES = {"attention_prefill": "attention_verify"}
"""Modules of the operators that do not stand in one of their own name."""
KERNELS = ("triton", "interpret")
ROUNDS = {"cpu": 5, "cuda": 25}


class TritonOperators:
    """The kernels by name, each imported when it is asked for, so that one that is broken takes no other down."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        module = import_module(f"metrale.kernels.{HOMES.get(name, name)}")
        found: Callable[..., Any] = getattr(module, name)
        return found


def default_backend() -> str:
    return "triton" if torch.cuda.is_available() else "torch"


def operators(backend: str) -> Any:
    """The table of operators of `triton`, `interpret` (the kernels under Triton's interpreter), `torch` or `cpu`."""
    if backend in KERNELS:
        return TritonOperators()
    if backend == "torch":
        return Oracle()
    from metrale.engine.backends import backend_ops

    return backend_ops(backend)


def one_thread_on_a_cpu(backend: str) -> None:
    """The sizes that a CPU gets are too small to share out."""
    if backend != "triton":
        torch.set_num_threads(1)


def device_of(backend: str) -> torch.device:
    return torch.device("cuda" if backend == "triton" else "cpu")


def gate(problem: Problem, ops: Any, device: torch.device) -> None:
    """Raises GateError unless the work gives what the oracle gives, within the kernel tests' tolerances."""
    found = problem.run(ops, problem.make(device))
    expected = (problem.expect or problem.by_reference)(problem.make(device))
    if len(found) != len(expected):
        raise GateError(f"{problem.operator}: {len(found)} outputs instead of {len(expected)}")
    for i, (got, want) in enumerate(zip(found, expected, strict=True)):
        fault = difference(got, want, problem.dtype)
        if fault is not None:
            raise GateError(
                f"{problem.operator} ({problem.variant}, {problem}): output {i}: {fault}: no figure is reported"
            )


def measure(problem: Problem, backend: str, rounds: int | None = None) -> list[Row]:
    """Gates, then times the problem and its baselines in interleaved rounds. GateError: our own output is wrong.

    A baseline that is wrong or does not run gets a note instead of a figure, and holds nobody up.
    """
    ops, device = operators(backend), device_of(backend)
    rows: dict[str, Row] = {}
    runners = {}
    for each in (problem, *problem.beside):
        if each.needs_triton and backend not in KERNELS:
            continue
        try:
            gate(each, ops, device)
            runners[each.variant] = runner_of(each, ops, device)
        except Exception as error:
            if each is problem or is_device_lost():
                raise
            rows[each.variant] = Row.of(each, note=one_line(error))
    interleave(list(runners.values()), rounds or ROUNDS[device.type])
    for each in (problem, *problem.beside):
        if each.variant in runners:
            runner = runners[each.variant]
            us, spread = median_and_spread(runner.microseconds())
            percent = None
            if device.type == "cuda":
                percent = 100 * each.num_bytes / (us * 1e-6) / copy_bandwidth()
            tflops = each.num_flops / us * 1e-6 if each.num_flops else None
            rows[each.variant] = Row.of(
                each, us=us, spread=spread, percent=percent, tflops=tflops, note=runner.note
            )
    return [rows[each.variant] for each in (problem, *problem.beside) if each.variant in rows]


def is_device_lost() -> bool:
    """Whether the GPU's context is broken, and every later figure with it."""
    if not torch.cuda.is_available():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def one_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:160]}" if text else type(error).__name__


def measure_all(
    problems: Sequence[Problem], backend: str, rounds: int | None = None
) -> Iterator[tuple[Problem, list[Row]]]:
    """`measure` problem by problem. A problem that does not fit the device's memory gives a row with a note."""
    for problem in problems:
        try:
            yield problem, measure(problem, backend, rounds)
        except torch.OutOfMemoryError as error:
            yield problem, [Row.of(problem, note=one_line(error))]
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def run_benchmark(benchmark: Any, problem: Problem) -> None:
    """A pytest-benchmark test of one problem: the gate, then the runner's rounds. On a GPU a round is a whole graph."""
    backend = default_backend()
    ops, device = operators(backend), device_of(backend)
    gate(problem, ops, device)
    runner = runner_of(problem, ops, device)
    benchmark.extra_info.update(
        backend=backend,
        num_bytes=problem.num_bytes,
        launches=getattr(runner, "num_launches", 1),
        note=runner.note,
    )
    benchmark.pedantic(runner.once, rounds=ROUNDS[device.type], warmup_rounds=1)


def title(backend: str) -> str:
    """What the figures of a backend are, in one line."""
    if backend == "triton":
        bandwidth = copy_bandwidth() * 1e-12
        return f"Triton kernels on {torch.cuda.get_device_name()}: copy bandwidth {bandwidth:.2f} TB/s, cold L2, graph replay"
    what = f"the {backend} backend's operators"
    if backend == "interpret":
        return f"{what}: gated, but an interpreter's times say nothing"
    return f"{what} on a CPU, not the Triton kernels: {processor()}, {torch.get_num_threads()} threads"


def table(rows: Sequence[Row], heading: str) -> str:
    """Plain text, a line a row; a baseline's line says how much longer it takes than ours."""
    columns = (
        "operator",
        "shape",
        "dtype",
        "variant",
        "MB",
        "us",
        "x",
        "spread",
        "% copy",
        "TFLOP/s",
        "note",
    )
    lines = [columns]
    ours: dict[tuple[str, str, str], float] = {}
    for row in rows:
        key = (row.operator, row.shape, row.dtype)
        if row.variant == OURS and row.us:
            ours[key] = row.us
        ratio = f"{row.us / ours[key]:.2f}" if row.us and row.variant != OURS and key in ours else ""
        lines.append(
            (
                *(row.operator, row.shape, row.dtype, row.variant),
                f"{row.num_bytes * 1e-6:.3g}",
                _number(row.us, ".2f"),
                ratio,
                _number(row.spread, ".0%"),
                _number(row.percent, ".1f"),
                _number(row.tflops, ".3g"),
                row.note,
            )
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    is_left = (0, 1, 2, 3, len(columns) - 1)
    return "\n".join(
        [heading]
        + [
            "  ".join(
                c.ljust(w) if i in is_left else c.rjust(w)
                for i, (c, w) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        ]
    )


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def main(
    problems: Callable[..., list[Problem]], arguments: Sequence[str] | None = None, prog: str | None = None
) -> None:
    """The command line of one benchmark. Exits 1 on a red gate, with no figure."""
    parser = argparse.ArgumentParser(prog=prog, description=sys.modules[problems.__module__].__doc__)
    add_options(parser)
    options = parser.parse_args(arguments)
    backend = options.backend or default_backend()
    is_small = options.small or backend != "triton"
    one_thread_on_a_cpu(backend)
    try:
        rows = [row for _, some in measure_all(problems(is_small), backend, options.rounds) for row in some]
    except GateError as error:
        sys.exit(f"bench: {error}")
    print(table(rows, title(backend)))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n", encoding="utf-8")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--backend",
        choices=("triton", "torch", "cpu", "interpret"),
        help="default: triton on a GPU, else torch",
    )
    parser.add_argument(
        "--rounds", type=int, help="timed rounds; the median counts (default: 25, 5 on a CPU)"
    )
    parser.add_argument("--small", action="store_true", help="the sizes that a CPU gets")
    parser.add_argument("--json", type=Path, help="where to write the rows")
