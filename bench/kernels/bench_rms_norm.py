"""`rms_norm`: one read, one write; beside torch's own."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from bench.kernels.common import main, run_benchmark
from bench.kernels.inputs import Random
from bench.kernels.problem import Outputs, Problem

EPS = 1e-6


class Inputs(NamedTuple):
    x: Tensor
    scale: Tensor


def num_bytes(rows: int, size: int, element_size: int) -> int:
    """Rows in and out, the scale in float32."""
    return 2 * rows * size * element_size + 4 * size


def problem(rows: int, size: int, dtype: torch.dtype) -> Problem:
    def make(device: torch.device) -> Inputs:
        random = Random(device, dtype)
        return Inputs(random.normal(rows, size), random.uniform(size) + 0.5)

    def run(ops: Any, inputs: Inputs) -> Outputs:
        return (ops.rms_norm(inputs.x, inputs.scale, EPS),)

    def run_torch(ops: Any, inputs: Inputs) -> Outputs:
        return (functional.rms_norm(inputs.x, (size,), inputs.scale.to(dtype), EPS),)

    made = Problem("rms_norm", f"[{rows}, {size}]", dtype, num_bytes(rows, size, dtype.itemsize), make, run)
    return made.with_baselines(made.baseline("torch", run_torch))


def problems(is_small: bool) -> list[Problem]:
    if is_small:
        return [problem(5, 256, torch.float32), problem(128, 256, torch.float32)]
    return [problem(rows, 4096, torch.bfloat16) for rows in (5, 320, 2048)]


def test_rms_norm(benchmark: Any, problem: Problem) -> None:
    run_benchmark(benchmark, problem)


if __name__ == "__main__":
    main(problems)
