"""`state_copy`: slots of a state tensor to other slots, twice the bytes; beside torch's indexed copy."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.kernels.common import main, run_benchmark
from bench.kernels.inputs import SMALL_GDN, GdnDims, Random
from bench.kernels.problem import Outputs, Problem


class Inputs(NamedTuple):
    source: Tensor
    destination: Tensor
    from_slots: Tensor
    to_slots: Tensor


def num_bytes(dims: GdnDims, layers: int, slots: int) -> int:
    """Every copied state in and out."""
    return 2 * layers * slots * dims.state_bytes


def problem(dims: GdnDims, layers: int, num_slots: int, stride: int) -> Problem:
    """`num_slots` of twice as many slots, `stride` apart: 1 is one strided copy."""
    from_slots = [stride * i for i in range(num_slots)]
    to_slots = list(range(num_slots))

    def make(device: torch.device) -> Inputs:
        random = Random(device, torch.float32)
        shape = (dims.value_heads, dims.value_dim, dims.key_dim)
        source = random.normal(layers, stride * num_slots, *shape)
        return Inputs(
            source,
            torch.zeros(layers, num_slots, *shape, device=device),
            *(torch.tensor(slots, device=device) for slots in (from_slots, to_slots)),
        )

    def run(ops: Any, i: Inputs) -> Outputs:
        ops.state_copy(i.source, i.destination, from_slots, to_slots)
        return (i.destination,)

    def run_torch(ops: Any, i: Inputs) -> Outputs:
        i.destination.index_copy_(1, i.to_slots, i.source[:, i.from_slots])
        return (i.destination,)

    made = Problem(
        operator="state_copy",
        shape=f"{layers} layers x {num_slots} slots, {stride} apart, {dims}",
        dtype=torch.float32,
        num_bytes=num_bytes(dims, layers, num_slots),
        make=make,
        run=run,
    )
    return made.with_baselines(made.baseline("torch", run_torch))


def problems(is_small: bool) -> list[Problem]:
    if is_small:
        return [problem(SMALL_GDN, 2, 2, stride) for stride in (1, 2)]
    return [problem(GdnDims(), 36, n, stride) for n, stride in ((1, 1), (8, 1), (8, 2))]


def test_state_copy(benchmark: Any, problem: Problem) -> None:
    run_benchmark(benchmark, problem)


if __name__ == "__main__":
    main(problems)
