"""`gdn_chunk`: prompt rows in chunks of 64, one read and one write of the state."""

from __future__ import annotations

from typing import Any

import torch

from bench.kernels.common import main, run_benchmark
from bench.kernels.inputs import SMALL_GDN, GdnDims, Random, groups_without_pages, num_tiles
from bench.kernels.problem import Outputs, Problem
from metrale.kernels.groups import Groups

CHUNK = 64


class Inputs:
    """Prompt rows of `num_sequences` sequences with everything before them folded."""

    def __init__(self, dims: GdnDims, num_sequences: int, new: int, random: Random) -> None:
        d, r, rows = dims, random, num_sequences * new
        start = 16 * CHUNK
        self.q = (r.units(rows, d.key_heads, d.key_dim) * d.key_dim**-0.5).contiguous()
        self.k = r.units(rows, d.key_heads, d.key_dim)
        self.v = r.normal(rows, d.value_heads, d.value_dim)
        self.g = -0.5 * r.uniform(rows, d.value_heads)
        self.beta = r.uniform(rows, d.value_heads)
        self.ssm = 0.1 * r.normal(num_sequences, d.value_heads, d.value_dim, d.key_dim, dtype=torch.float32)
        self.num_folded = torch.full(
            (num_sequences, d.value_heads, num_tiles(d)), start, dtype=torch.int32, device=r.device
        )
        self.groups: Groups = groups_without_pages([(i, start, new) for i in range(num_sequences)], r.device)
        self._start = start

    def reset(self) -> None:
        """The oracle wants nothing pending; a kernel does not look."""
        self.num_folded.fill_(self._start)


def num_bytes(dims: GdnDims, num_sequences: int, new: int, element_size: int) -> int:
    """q, k, v, g, beta in, outputs out, the state in and out."""
    keys, values = dims.key_heads * dims.key_dim, dims.value_heads * dims.value_dim
    row = (2 * keys + 2 * values) * element_size + 8 * dims.value_heads
    return num_sequences * (new * row + 2 * dims.state_bytes)


def num_flops(dims: GdnDims, num_sequences: int, new: int) -> int:
    """Of the products of a chunk and value head: k k^T, q k^T; k S, q S, k^T u; scores u; and the solve."""
    d = dims
    chunk = 2 * CHUNK * CHUNK * d.key_dim * 2 + 2 * CHUNK * d.key_dim * d.value_dim * 3
    chunk += 2 * CHUNK * CHUNK * d.value_dim + CHUNK * CHUNK * d.value_dim
    return num_sequences * -(-new // CHUNK) * d.value_heads * chunk


def problem(dims: GdnDims, num_sequences: int, new: int, dtype: torch.dtype) -> Problem:
    def make(device: torch.device) -> Inputs:
        return Inputs(dims, num_sequences, new, Random(device, dtype))

    def run(ops: Any, i: Inputs) -> Outputs:
        return ops.gdn_chunk(i.q, i.k, i.v, i.g, i.beta, i.ssm, i.num_folded, i.groups), i.ssm, i.num_folded

    sizes = (dims, num_sequences, new)
    return Problem(
        operator="gdn_chunk",
        shape=f"{num_sequences} x {new} rows, {dims}",
        dtype=dtype,
        num_bytes=num_bytes(*sizes, dtype.itemsize),
        num_flops=num_flops(*sizes),
        make=make,
        run=run,
        reset=Inputs.reset,
    )


def problems(is_small: bool) -> list[Problem]:
    if is_small:
        return [problem(SMALL_GDN, n, 130, torch.float32) for n in (1, 2)]
    return [
        problem(GdnDims(), n, new, torch.bfloat16) for n, new in ((1, 512), (1, 2048), (4, 512), (8, 2048))
    ]


def test_gdn_chunk(benchmark: Any, problem: Problem) -> None:
    run_benchmark(benchmark, problem)


if __name__ == "__main__":
    main(problems)
