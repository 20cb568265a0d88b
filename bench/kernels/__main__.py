"""All microbenchmarks, or those named: `python -m bench.kernels gdn_verify linear`.

With `--lines FILE` every row is appended to the file as it is measured, so that whoever watches keeps what was done.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

from bench.kernels.common import (
    add_options,
    default_backend,
    is_device_lost,
    measure,
    one_line,
    one_thread_on_a_cpu,
    table,
    title,
)
from bench.kernels.problem import Problem, Row, checks

NAMES = (
    "gdn_verify",
    "masked_argmax",
    "linear",
    "attention",
    "gdn_chunk",
    "conv_verify",
    "rotary_store",
    "rms_norm",
    "gated_rms_norm",
    "moe",
    "accept",
    "state_copy",
    "thresholds",
    "gumbel",
)
"""Those that have a target come first: time may run out."""
LOST_DEVICE = 3
"""Exit status where the device's context was lost: a fresh process may go on with the other operators."""


def problems_of(name: str, is_small: bool) -> list[Problem]:
    problems: list[Problem] = import_module(f"bench.kernels.bench_{name}").problems(is_small)
    return problems


class Report:
    """What was measured so far; every entry goes to the file of lines, if there is one, at once."""

    def __init__(self, path: Path | None) -> None:
        self.rows: list[Row] = []
        self.faults: list[str] = []
        self._path = path

    def add(self, kind: str, entry: Any) -> None:
        if self._path:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({kind: entry}) + "\n")

    def add_rows(self, problem: Problem, rows: Sequence[Row]) -> None:
        self.rows += rows
        for row in rows:
            self.add("row", asdict(row))
        for check in checks(problem, rows):
            self.add("check", check)

    def add_fault(self, problem: Problem | None, name: str, error: Exception) -> None:
        self.faults.append(f"{name}: {one_line(error)}")
        self.add("fault", self.faults[-1])
        if problem is not None:
            self.add_rows(problem, [Row.of(problem, note=one_line(error))])


def run(names: Sequence[str], backend: str, is_small: bool, rounds: int | None, report: Report) -> None:
    """Measures operator by operator. Nothing that fails holds up the rest, but for a lost device: SystemExit."""
    for name in names:
        try:
            problems = problems_of(name, is_small)
        except Exception as error:
            report.add_fault(None, name, error)
            problems = []
        for problem in problems:
            try:
                report.add_rows(problem, measure(problem, backend, rounds))
            except Exception as error:
                report.add_fault(problem, name, error)
                if is_device_lost():
                    report.add("done", name)
                    sys.exit(LOST_DEVICE)
            _release(backend)
        report.add("done", name)


def _release(backend: str) -> None:
    if backend == "triton":
        import torch

        torch.cuda.empty_cache()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.kernels", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="OPERATOR", help=f"default: {' '.join(NAMES)}")
    parser.add_argument(
        "--lines", type=Path, help="append rows, checks and faults here, one JSON object a line"
    )
    add_options(parser)
    options = parser.parse_args(arguments)
    unknown = set(options.names) - set(NAMES)
    if unknown:
        parser.error(f"unknown operator {', '.join(sorted(unknown))}")
    backend = options.backend or default_backend()
    one_thread_on_a_cpu(backend)
    report = Report(options.lines)
    names = options.names or NAMES
    run(names, backend, options.small or backend != "triton", options.rounds, report)
    print(table(report.rows, title(backend)))
    if options.json:
        options.json.write_text(
            json.dumps([asdict(row) for row in report.rows], indent=2) + "\n", encoding="utf-8"
        )
    if report.faults:
        sys.exit("\n".join(report.faults))


if __name__ == "__main__":
    main()
