"""Problem and Row: what a microbenchmark times, and what it reports of it. Knows no device and no clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metrale import reference

OURS = "metrale"
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Most difference of a result, relative to its largest element, by activation dtype: those of the kernel tests."""

Outputs = tuple[Tensor, ...]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Oracle:
    """The definitions of the operators, those too that no backend's table holds."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        found: Any = getattr(reference, name, None)
        if not callable(found):
            found = getattr(import_module(f"metrale.reference.{name}"), name)
        definition: Callable[..., Any] = found
        return definition


class Target(NamedTuple):
    """What a figure must reach; `max_times` is of the time that the variant `beside` takes in the same rounds."""

    max_us: float | None = None
    min_percent: float | None = None
    max_times: float | None = None
    beside: str = ""


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
    | needs_triton | a baseline that is a Triton kernel |
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
    needs_triton: bool = False
    targets: tuple[Target, ...] = ()
    beside: tuple[Problem, ...] = ()

    def __str__(self) -> str:
        return f"{self.shape}, {dtype_name(self.dtype)}"

    def baseline(self, variant: str, run: Callable[[Any, Any], Outputs], **changes: Any) -> Problem:
        """The same problem solved by `variant`, which owes the same outputs."""
        expected = self.expect or self.by_reference
        return replace(
            self, variant=variant, run=run, targets=(), beside=(), **{"expect": expected, **changes}
        )

    def by_reference(self, inputs: Any) -> Outputs:
        return self.run(Oracle(), inputs)

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
        return Row(
            problem.operator,
            problem.shape,
            dtype_name(problem.dtype),
            problem.variant,
            problem.num_bytes,
            **figures,
        )


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


def checks(problem: Problem, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Each of the problem's targets against its rows: what, figure, limit, met (None: no figure to judge by)."""
    key = (problem.operator, problem.shape, dtype_name(problem.dtype))
    by_variant = {row.variant: row for row in rows if (row.operator, row.shape, row.dtype) == key}
    return [
        {"operator": problem.operator, "shape": problem.shape, **_check(target, problem.variant, by_variant)}
        for target in problem.targets
    ]


def _check(target: Target, variant: str, by_variant: Mapping[str, Row]) -> dict[str, Any]:
    ours = by_variant.get(variant)
    us, percent = (ours.us, ours.percent) if ours else (None, None)
    if target.min_percent is not None:
        unit, figure, limit = "% of copy bandwidth, at least", percent, target.min_percent
        is_met = None if figure is None else figure >= limit
        return {"unit": unit, "figure": figure, "limit": limit, "is_met": is_met}
    most = target.max_us
    unit = "us, at most"
    if target.max_times is not None:
        other = by_variant.get(target.beside)
        most = other.us * target.max_times if other and other.us else None
        unit = f"us, at most {target.max_times} x {target.beside}'s"
    is_met = None if us is None or most is None else us <= most
    return {"unit": unit, "figure": us, "limit": most, "is_met": is_met}
