"""`moe`: one read of the active experts for generated rows, matrix-unit rate for prompt rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.kernels.common import main, run_benchmark
from bench.kernels.inputs import Random
from bench.kernels.problem import Outputs, Problem


class MoeDims(NamedTuple):
    """A layer's sizes; the defaults are those of a 35 B checkpoint with 3 B active."""

    dim: int = 2048
    experts: int = 256
    top_k: int = 8
    inner: int = 512
    shared_inner: int = 512

    def __str__(self) -> str:
        return f"D {self.dim}, {self.top_k} of {self.experts} experts of {self.inner}"


SMALL_MOE = MoeDims(64, 8, 2, 32, 32)


class Inputs(NamedTuple):
    x: Tensor
    router: Tensor
    gate_up: Tensor
    down: Tensor
    shared_gate_up: Tensor
    shared_down: Tensor
    shared_gate: Tensor


def num_bytes(dims: MoeDims, rows: int, element_size: int) -> int:
    """Rows in and out, the router, the shared expert, and the experts that `rows` rows of even routing are likely to use."""
    d = dims
    active = d.experts * (1 - (1 - d.top_k / d.experts) ** rows)
    weights = round(active * 3 * d.inner * d.dim) + 3 * d.shared_inner * d.dim + d.experts * d.dim + d.dim
    return (weights + 2 * rows * d.dim) * element_size


def num_flops(dims: MoeDims, rows: int) -> int:
    """Of the products of all chosen experts, the shared one and the router."""
    d = dims
    return 2 * rows * d.dim * (3 * d.top_k * d.inner + 3 * d.shared_inner + d.experts + 1)


def problem(dims: MoeDims, rows: int, dtype: torch.dtype, is_prompt: bool = False) -> Problem:
    d = dims

    def make(device: torch.device) -> Inputs:
        r = Random(device, dtype)
        return Inputs(
            r.normal(rows, d.dim),
            # logits without a sum: no rounding may choose other experts than the oracle's
            2.0 * torch.eye(d.experts, d.dim, dtype=dtype, device=device),
            r.normal(d.experts, 2 * d.inner, d.dim).mul_(d.dim**-0.5),
            r.normal(d.experts, d.dim, d.inner).mul_(d.inner**-0.5),
            r.normal(2 * d.shared_inner, d.dim) * d.dim**-0.5,
            r.normal(d.dim, d.shared_inner) * d.shared_inner**-0.5,
            r.normal(1, d.dim) * d.dim**-0.5,
        )

    def run(ops: Any, inputs: Inputs) -> Outputs:
        return (ops.moe(*inputs, d.top_k, True, 0 if is_prompt else rows),)

    return Problem(
        operator="moe",
        shape=f"{rows} {'prompt ' if is_prompt else ''}rows, {dims}",
        dtype=dtype,
        num_bytes=num_bytes(dims, rows, dtype.itemsize),
        num_flops=num_flops(dims, rows) if is_prompt else 0,
        make=make,
        run=run,
    )


def problems(is_small: bool) -> list[Problem]:
    if is_small:
        return [problem(SMALL_MOE, 5, torch.float32), problem(SMALL_MOE, 70, torch.float32, is_prompt=True)]
    dims, bf16 = MoeDims(), torch.bfloat16
    return [*(problem(dims, rows, bf16) for rows in (1, 5, 64)), problem(dims, 2048, bf16, is_prompt=True)]


def test_moe(benchmark: Any, problem: Problem) -> None:
    run_benchmark(benchmark, problem)


if __name__ == "__main__":
    main(problems)
