"""`linear`: one read of the weight for generated rows, matrix-unit rate for prompt rows; beside torch's own product."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from bench.kernels.common import main, run_benchmark
from bench.kernels.inputs import Random
from bench.kernels.problem import Outputs, Problem, Target

EPS = 1e-6


class Inputs(NamedTuple):
    x: Tensor
    weight: Tensor
    norm: Tensor | None


def num_bytes(rows: int, inner: int, weight_rows: int, outputs: int, element_size: int, norm: bool) -> int:
    """Rows, weight and result once, in activation elements; a norm's scales in float32."""
    elements = rows * inner + weight_rows * inner + rows * outputs
    return elements * element_size + (4 * inner if norm else 0)


def problem(
    rows: int,
    inner: int,
    outputs: int,
    dtype: torch.dtype,
    is_prompt: bool = False,
    silu_mul: bool = False,
    norm: bool = False,
    targets: tuple[Target, ...] = (),
) -> Problem:
    weight_rows = 2 * outputs if silu_mul else outputs
    words = [f"{'prompt ' if is_prompt else ''}[{rows}, {inner}] x [{inner}, {weight_rows}]"]
    words += ["norm"] * norm + ["silu_mul"] * silu_mul

    def make(device: torch.device) -> Inputs:
        random = Random(device, dtype)
        scale = random.uniform(inner) + 0.5 if norm else None
        return Inputs(random.normal(rows, inner), random.normal(weight_rows, inner) * inner**-0.5, scale)

    def run(ops: Any, inputs: Inputs) -> Outputs:
        options: dict[str, Any] = {"silu_mul": silu_mul}
        if norm:
            options |= {"norm": inputs.norm, "eps": EPS}
        return (ops.linear(inputs.x, inputs.weight, 0 if is_prompt else rows, **options),)

    def run_torch(ops: Any, inputs: Inputs) -> Outputs:
        return (functional.linear(inputs.x, inputs.weight),)

    made = Problem(
        operator="linear",
        shape=", ".join(words),
        dtype=dtype,
        num_bytes=num_bytes(rows, inner, weight_rows, outputs, dtype.itemsize, norm),
        num_flops=2 * rows * inner * weight_rows if is_prompt else 0,
        make=make,
        run=run,
        targets=targets,
    )
    return made if norm or silu_mul else made.with_baselines(made.baseline("torch", run_torch))


def problems(is_small: bool) -> list[Problem]:
    if is_small:
        dtype = torch.float32
        return [
            problem(4, 256, 512, dtype),
            problem(4, 256, 512, dtype, silu_mul=True, norm=True),
            problem(128, 256, 512, dtype, is_prompt=True),
        ]
    bf16 = torch.bfloat16
    return [
        problem(4, 4096, 12288, bf16, targets=(Target(min_percent=80.0),)),
        problem(1, 4096, 12288, bf16),
        problem(16, 4096, 12288, bf16),
        problem(64, 4096, 12288, bf16),
        problem(4, 4096, 2048, bf16),
        problem(4, 12288, 4096, bf16),
        problem(4, 4096, 12288, bf16, silu_mul=True, norm=True),
        problem(4, 4096, 248320, bf16),
        problem(2048, 4096, 12288, bf16, is_prompt=True),
        problem(2048, 4096, 12288, bf16, is_prompt=True, silu_mul=True, norm=True),
    ]


def test_linear(benchmark: Any, problem: Problem) -> None:
    run_benchmark(benchmark, problem)


if __name__ == "__main__":
    main(problems)
