"""`conv_verify`: everything of a GDN layer between its projection and its recurrence, in one pass."""

from __future__ import annotations

from typing import Any

import torch

from bench.kernels.common import main, run_benchmark
from bench.kernels.inputs import SMALL_GDN, GdnDims, GdnInputs, Random
from bench.kernels.problem import Outputs, Problem


def num_bytes(dims: GdnDims, num_sequences: int, new: int, element_size: int) -> int:
    """Rows without their z, W - 1 old inputs and the weights in; the rings' new rows, q, v and beta out."""
    d = dims
    rows = num_sequences * new
    keys, values = d.key_heads * d.key_dim, d.value_heads * d.value_dim
    read = rows * (d.num_channels + 2 * d.value_heads) + num_sequences * (d.conv_width - 1) * d.num_channels
    written = rows * (d.num_channels + 2 * keys + values)
    weights = 4 * (d.num_channels * d.conv_width + 2 * d.value_heads)
    gates = rows * 2 * 4 * d.value_heads  # log decay and beta
    return (read + written) * element_size + weights + gates


def problem(dims: GdnDims, num_sequences: int, new: int, dtype: torch.dtype) -> Problem:
    def make(device: torch.device) -> GdnInputs:
        return GdnInputs(dims, num_sequences, 4, new, Random(device, dtype))

    def run(ops: Any, i: GdnInputs) -> Outputs:
        made = ops.conv_verify(i.projected, *i.conv, i.ring_x, i.ring_k, i.ring_g, i.groups)
        return (*made, i.ring_x, i.ring_k, i.ring_g)

    return Problem(
        operator="conv_verify",
        shape=f"{num_sequences} x {new} rows, {dims.num_channels} channels",
        dtype=dtype,
        num_bytes=num_bytes(dims, num_sequences, new, dtype.itemsize),
        make=make,
        run=run,
    )


def problems(is_small: bool) -> list[Problem]:
    if is_small:
        return [problem(SMALL_GDN, n, 5, torch.float32) for n in (1, 4)]
    return [problem(GdnDims(), n, 5, torch.bfloat16) for n in (1, 64, 256)]


def test_conv_verify(benchmark: Any, problem: Problem) -> None:
    run_benchmark(benchmark, problem)


if __name__ == "__main__":
    main(problems)
