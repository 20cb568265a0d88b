"""`gumbel`: one write of the noise; its arithmetic, ten rounds of Philox and three logarithms, weighs as much."""

from __future__ import annotations

from typing import Any

import torch

from bench.kernels.common import main, run_benchmark
from bench.kernels.problem import Outputs, Problem


def num_bytes(rows: int, num_ids: int) -> int:
    """The words that name a row in, float32 noise out."""
    return rows * (32 + 4 * num_ids)


def problem(rows: int, num_ids: int) -> Problem:
    seeds = [(2**40 + 17, 0, row) for row in range(rows)]

    def make(device: torch.device) -> torch.device:
        return device

    def run(ops: Any, device: torch.device) -> Outputs:
        return (ops.gumbel(seeds, num_ids, device),)

    return Problem("gumbel", f"[{rows}, {num_ids}]", torch.float32, num_bytes(rows, num_ids), make, run)


def problems(is_small: bool) -> list[Problem]:
    return [problem(3, 5000)] if is_small else [problem(8, 248320), problem(64, 248320)]


def test_gumbel(benchmark: Any, problem: Problem) -> None:
    run_benchmark(benchmark, problem)


if __name__ == "__main__":
    main(problems)
