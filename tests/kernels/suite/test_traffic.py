"""The meter itself, and that it is held to every operator."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from metrale.kernels.launch import IS_INTERPRETED
from metrale.kernels.table import ops
from tests.kernels.meter import metered
from tests.kernels.suite.cases import randn
from tests.kernels.traffic import CASES

pytestmark = pytest.mark.skipif(not IS_INTERPRETED, reason="counts what the interpreter does")


@triton.jit
def _copy_kernel(size_ptr, x_ptr, out_ptr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < tl.load(size_ptr)
    tl.store(out_ptr + offs, tl.load(x_ptr + offs, mask=mask, other=0.0), mask=mask)


def test_the_meter_counts_active_lanes() -> None:
    size, x = torch.tensor([40], dtype=torch.int32), randn(40, dtype=torch.bfloat16)
    out = torch.empty_like(x)
    with metered() as meter:
        _copy_kernel[(2,)](size, x, out, BLOCK=32)
    found = [(t.name, t.loaded, t.stored, t.times_read) for t in meter.tensors.values()]
    assert found == [("size", 8, 0, 2), ("x", 80, 0, 1), ("out", 0, 80, 0)]
    assert torch.equal(out, x)


@pytest.mark.parametrize("short", ["x", "out"])
def test_a_lane_outside_a_tensor_is_refused(short: str) -> None:
    size = torch.tensor([40], dtype=torch.int32)
    tensors = {name: torch.zeros(39 if name == short else 40) for name in ("x", "out")}
    with metered(), pytest.raises(InterpreterError, match="_copy_kernel: 1 active lanes outside"):
        _copy_kernel[(2,)](size, *tensors.values(), BLOCK=32)


def test_every_operator_has_a_case() -> None:
    table = ops("interpret")
    operators = {f.name for f in fields(table) if callable(getattr(table, f.name))} - {"num_tiles"}
    assert operators <= {case.operator for case in CASES}
