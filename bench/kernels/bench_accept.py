"""`accept`: the verdict on every row group, one launch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.kernels.common import main, run_benchmark
from bench.kernels.inputs import Random, groups_without_pages
from bench.kernels.problem import Outputs, Problem
from metrale.kernels.groups import Groups


class Inputs(NamedTuple):
    token_ids: Tensor
    picks: Tensor
    groups: Groups


def num_bytes(num_sequences: int, new: int) -> int:
    """Token ids and picks in, row offsets in, (accepted, next) out."""
    return 16 * num_sequences * new + 4 * (num_sequences + 1) + 16 * num_sequences


def problem(num_sequences: int, new: int) -> Problem:
    def make(device: torch.device) -> Inputs:
        random = Random(device, torch.float32)
        token_ids = (1000 * random.uniform(num_sequences * new)).long()
        is_kept = random.uniform(num_sequences * new) < 0.7
        picks = torch.where(is_kept, token_ids.roll(-1), token_ids.roll(-1) + 1)
        groups = groups_without_pages([(i, 64, new) for i in range(num_sequences)], device)
        return Inputs(token_ids, picks, groups)

    def run(ops: Any, i: Inputs) -> Outputs:
        return (ops.accept(i.token_ids, i.picks, i.groups),)

    shape = f"{num_sequences} x {new} rows"
    return Problem("accept", shape, torch.int64, num_bytes(num_sequences, new), make, run)


def problems(is_small: bool) -> list[Problem]:
    return [problem(n, 5) for n in ((1, 4) if is_small else (1, 64, 256))]


def test_accept(benchmark: Any, problem: Problem) -> None:
    run_benchmark(benchmark, problem)


if __name__ == "__main__":
    main(problems)
