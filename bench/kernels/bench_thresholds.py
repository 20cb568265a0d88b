"""`thresholds`: where top-k, top-p and min-p cut a row's distribution."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.kernels.common import main, run_benchmark
from bench.kernels.inputs import Random
from bench.kernels.problem import Outputs, Problem
from metrale.kernels.picks import Truncation


class Inputs(NamedTuple):
    logits: Tensor
    temperatures: Tensor


def num_bytes(rows: int, vocab: int) -> int:
    """Logits and temperature in, threshold out."""
    return rows * (4 * vocab + 8)


def problem(rows: int, vocab: int, truncation: Truncation) -> Problem:
    def make(device: torch.device) -> Inputs:
        random = Random(device, torch.float32)
        return Inputs(4 * random.normal(rows, vocab), torch.ones(rows, device=device))

    def run(ops: Any, i: Inputs) -> Outputs:
        return (ops.thresholds(i.logits, vocab, i.temperatures, [truncation] * rows),)

    words = ", ".join(f"{name} {value}" for name, value in truncation._asdict().items())
    size = num_bytes(rows, vocab)
    return Problem("thresholds", f"[{rows}, {vocab}], {words}", torch.float32, size, make, run)


def problems(is_small: bool) -> list[Problem]:
    rows, vocab = (3, 5000) if is_small else (8, 248320)
    cuts = (Truncation(20, 1.0, 0.0), Truncation(0, 0.95, 0.0), Truncation(20, 0.95, 0.0))
    return [problem(rows, vocab, cut) for cut in cuts]


def test_thresholds(benchmark: Any, problem: Problem) -> None:
    run_benchmark(benchmark, problem)


if __name__ == "__main__":
    main(problems)
