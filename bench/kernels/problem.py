"""Problem and Row: what a microbenchmark times, and what it reports of it. Knows no device and no clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metrale import reference

OURS = "metrale"
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Most difference of a result, relative to its largest element, by activation dtype: those of the kernel tests."""

Outputs = tuple[Tensor, ...]


class Target(NamedTuple):
    """What a figure must reach. `no_slower_than` names a variant that is timed beside it."""

    max_us: float | None = None
    min_percent: float | None = None
    no_slower_than: str | None = None


@dataclass(frozen=True)
class Problem:
    """One operator at one shape.

    | field | meaning |
    | --- | --- |
    | num_bytes | least traffic by the operator's contract: inputs read once, outputs written once |
    | num_flops | multiplications and additions of its matrix products, 0: not worth a column |
    | make | fresh inputs on a device, equal at every call |
    | run | does the work with a table of operators; returns what it wrote, as views |
    | expect | what the oracle writes for fresh inputs; None: `run` with the oracle's own table |
    | reset | puts back what a run advanced, so that the next one does the same work; never timed |
    | needs_gpu | a baseline that has no form for a CPU |
    | beside | baselines, timed in the same rounds |
    """

    operator: str
    shape: str
    dtype: torch.dtype
    num_bytes: int
    make: Callable[[torch.device], Any]
    run: Callable[[Any, Any], Outputs]
    expect: Callable[[Any], Outputs] | None = None
    reset: Callable[[Any], None] | None = None
    num_flops: int = 0
    variant: str = OURS
    needs_gpu: bool = False
    targets: tuple[Target, ...] = ()
    beside: tuple[Problem, ...] = ()

    def __str__(self) -> str:
        return f"{self.shape}, {str(self.dtype).removeprefix('torch.')}"

    def baseline(self, variant: str, run: Callable[[Any, Any], Outputs], **changes: Any) -> Problem:
        """The same problem solved by `variant`, which owes the same outputs."""
        expected = self.expect or self.by_reference
        return replace(
            self, variant=variant, run=run, targets=(), beside=(), **{"expect": expected, **changes}
        )

    def by_reference(self, inputs: Any) -> Outputs:
        return self.run(reference.ops(), inputs)

    def with_baselines(self, *baselines: Problem) -> Problem:
        return replace(self, beside=self.beside + baselines)


@dataclass(frozen=True)
class Row:
    """The figures of one variant of one problem; `us` is None where `note` says why there is none."""

    operator: str
    shape: str
    dtype: str
    variant: str
    num_bytes: int
    us: float | None = None
    spread: float | None = None  # (slowest - fastest) / median
    percent: float | None = None  # of the measured copy bandwidth
    tflops: float | None = None
    note: str = ""

    @staticmethod
    def of(problem: Problem, **figures: Any) -> Row:
        dtype = str(problem.dtype).removeprefix("torch.")
        return Row(problem.operator, problem.shape, dtype, problem.variant, problem.num_bytes, **figures)


def difference(got: Tensor, want: Tensor, dtype: torch.dtype) -> str | None:
    """How `got` differs from `want` by more than the dtype allows; None: it does not. Integers are exact."""
    if (got.shape, got.dtype) != (want.shape, want.dtype):
        return f"{got.dtype} {list(got.shape)} instead of {want.dtype} {list(want.shape)}"
    if not got.is_floating_point():
        return None if torch.equal(got, want) else "other integers"
    if not torch.equal(got.isnan(), want.isnan()):
        return "NaN at other places"
    if not got.numel():
        return None
    a, b = got.float().nan_to_num(), want.float().nan_to_num()
    error, largest = float((a - b).abs().max()), max(float(b.abs().max()), 1e-9)
    if error <= TOLERANCES[dtype] * largest:
        return None
    return f"an error of {error:.2e} against a largest element of {largest:.2e}"


def is_same(problem: Problem, row: Row) -> bool:
    """Whether `row` reports a variant of `problem`."""
    return (row.operator, row.shape, row.dtype) == (
        problem.operator,
        problem.shape,
        str(problem.dtype).removeprefix("torch."),
    )


def checks(problem: Problem, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Each of the problem's targets against its rows: what, figure, limit, met (None: no figure to judge by)."""
    times = {row.variant: row for row in rows if is_same(problem, row)}
    ours = times.get(problem.variant)
    found = []
    for target in problem.targets:
        if target.max_us is not None:
            unit, figure, limit = "us, at most", ours and ours.us, target.max_us
            is_met = None if figure is None else figure <= limit
        elif target.min_percent is not None:
            unit, figure, limit = "% of copy bandwidth, at least", ours and ours.percent, target.min_percent
            is_met = None if figure is None else figure >= limit
        else:
            other = times.get(target.no_slower_than or "")
            unit, figure = f"us, at most {target.no_slower_than}'s", ours and ours.us
            limit = other.us if other else None
            is_met = None if figure is None or limit is None else figure <= limit
        found.append(
            {
                "operator": problem.operator,
                "shape": problem.shape,
                "unit": unit,
                "figure": figure,
                "limit": limit,
                "is_met": is_met,
            }
        )
    return found
