"""`gated_rms_norm`: recurrence output and gate in, one write."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.kernels.common import main, run_benchmark
from bench.kernels.inputs import SMALL_GDN, GdnDims, Random
from bench.kernels.problem import Outputs, Problem

EPS = 1e-6


class Inputs(NamedTuple):
    x: Tensor
    gate: Tensor
    weight: Tensor


def num_bytes(rows: int, heads: int, dim: int, element_size: int) -> int:
    """Rows and gates in, rows out, the weight in float32."""
    return 3 * rows * heads * dim * element_size + 4 * dim


def problem(rows: int, dims: GdnDims, dtype: torch.dtype) -> Problem:
    heads, dim = dims.value_heads, dims.value_dim

    def make(device: torch.device) -> Inputs:
        random = Random(device, dtype)
        projected = random.normal(rows, dims.columns)
        gate = projected[:, dims.num_channels : dims.num_channels + heads * dim].unflatten(1, (heads, dim))
        return Inputs(random.normal(rows, heads, dim), gate, random.uniform(dim) + 0.5)

    def run(ops: Any, inputs: Inputs) -> Outputs:
        return (ops.gated_rms_norm(inputs.x, inputs.gate, inputs.weight, EPS),)

    size = num_bytes(rows, heads, dim, dtype.itemsize)
    return Problem("gated_rms_norm", f"[{rows}, {heads}, {dim}]", dtype, size, make, run)


def problems(is_small: bool) -> list[Problem]:
    if is_small:
        return [problem(rows, SMALL_GDN, torch.float32) for rows in (5, 64)]
    return [problem(rows, GdnDims(), torch.bfloat16) for rows in (5, 320, 2048)]


def test_gated_rms_norm(benchmark: Any, problem: Problem) -> None:
    run_benchmark(benchmark, problem)


if __name__ == "__main__":
    main(problems)
