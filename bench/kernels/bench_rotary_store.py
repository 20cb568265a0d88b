"""`rotary_store`: query and key norms, rotation and the store into pages, one pass over the projection."""

from __future__ import annotations

from typing import Any

import torch

from bench.kernels.common import main, run_benchmark
from bench.kernels.inputs import PAGE_SIZE, SMALL_ATTENTION, AttentionDims, AttentionInputs, Random
from bench.kernels.problem import Outputs, Problem

EPS = 1e-6


class Inputs(AttentionInputs):
    """A step's rows at the ends of their sequences, with the norms and the rotary table."""

    def __init__(
        self, dims: AttentionDims, num_sequences: int, context: int, new: int, random: Random
    ) -> None:
        super().__init__(dims, num_sequences, context, new, random)
        self.norms = tuple(random.uniform(dims.dim) + 0.5 for _ in range(2))
        angles = 6.28 * random.uniform(context, dims.rotary_dim // 2)
        self.tables = (angles.cos(), angles.sin())
        at = torch.arange(self.start, context, device=random.device)
        self.positions = at.repeat(num_sequences)
        pages = self.page_table[:, at // PAGE_SIZE].long()
        self.kv_index = (pages * PAGE_SIZE + at % PAGE_SIZE).flatten().contiguous()


def num_bytes(dims: AttentionDims, rows: int, element_size: int) -> int:
    """Queries, keys and values in without their gates, the same out; norms, a rotary row and two indices a row."""
    heads = dims.heads + 2 * dims.kv_heads
    tables = rows * dims.rotary_dim * 4
    return 2 * rows * heads * dims.dim * element_size + 2 * dims.dim * 4 + tables + rows * 16


def problem(dims: AttentionDims, num_sequences: int, context: int, new: int, dtype: torch.dtype) -> Problem:
    def make(device: torch.device) -> Inputs:
        return Inputs(dims, num_sequences, context, new, Random(device, dtype))

    def run(ops: Any, i: Inputs) -> Outputs:
        q = ops.rotary_store(
            i.projected, *i.norms, *i.tables, i.positions, i.kv_index, i.k_cache, i.v_cache, EPS
        )
        return q, i.k_cache, i.v_cache

    return Problem(
        operator="rotary_store",
        shape=f"{num_sequences * new} rows, {dims}",
        dtype=dtype,
        num_bytes=num_bytes(dims, num_sequences * new, dtype.itemsize),
        make=make,
        run=run,
    )


def problems(is_small: bool) -> list[Problem]:
    if is_small:
        return [problem(SMALL_ATTENTION, n, 64, 5, torch.float32) for n in (1, 4)]
    return [
        problem(AttentionDims(), n, context, new, torch.bfloat16)
        for n, context, new in ((1, 4096, 5), (64, 4096, 5), (1, 4096, 2048))
    ]


def test_rotary_store(benchmark: Any, problem: Problem) -> None:
    run_benchmark(benchmark, problem)


if __name__ == "__main__":
    main(problems)
