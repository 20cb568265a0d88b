"""Float32 matrices as sums of bf16 ones: how much of an operand the parts hold, and of a product."""

from __future__ import annotations

import pytest
import torch
import triton.language as tl
from torch import Tensor

from metrale.kernels.launch import IS_INTERPRETED, kernel, launch
from metrale.kernels.products import load_parts, product, split, store_parts, transposed
from tests.kernels.suite.cases import randn

ROWS, INNER = 16, 32
LOST = {2: 2.0**-14 if IS_INTERPRETED else 2.0**-16, 3: 0.0}
"""Most of an element that the parts leave out, relative to it: 8 bits a part, which the interpreter cuts and a device rounds."""
ERRORS = {2: 2.0**-15, 3: 2.0**-22}
"""Most of a product that is lost, relative to the sum of its terms' sizes."""


@kernel()
def _store_kernel(x_ptr, parts_ptr, ROWS: tl.constexpr, INNER: tl.constexpr, PARTS: tl.constexpr):
    offs = tl.arange(0, ROWS)[:, None] * INNER + tl.arange(0, INNER)[None, :]
    store_parts(parts_ptr + offs, tl.load(x_ptr + offs), offs >= 0, ROWS * INNER, PARTS)


@kernel()
def _product_kernel(
    a_ptr,
    b_ptr,
    out_ptr,
    ROWS: tl.constexpr,
    INNER: tl.constexpr,
    PARTS: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    """out = a @ b^T, `a` in parts that were stored."""
    offs_r = tl.arange(0, ROWS)
    offs = offs_r[:, None] * INNER + tl.arange(0, INNER)[None, :]
    a = load_parts(a_ptr + offs, offs >= 0, ROWS * INNER, PARTS)
    b = transposed(split(tl.load(b_ptr + offs), PARTS))
    out = product(a, b, PARTS, IS_INTERPRETED)
    tl.store(out_ptr + offs_r[:, None] * ROWS + offs_r[None, :], out)


def parts_of(x: Tensor, parts: int) -> Tensor:
    """[parts, ROWS, INNER] bf16."""
    out = x.new_empty(parts, *x.shape, dtype=torch.bfloat16)
    launch(_store_kernel, (1,), x, out, ROWS=ROWS, INNER=INNER, PARTS=parts, num_warps=4)
    return out


@pytest.mark.parametrize("parts", LOST)
def test_parts_hold_an_operand(parts: int) -> None:
    x = randn(ROWS, INNER, seed=1) * torch.logspace(-6, 6, INNER)
    stored = parts_of(x, parts).double()
    assert bool(((stored[0] - x.double()).abs() <= 2.0**-7 * x.double().abs()).all())  # the largest first
    lost = (stored.sum(0) - x.double()).abs()
    assert bool((lost <= LOST[parts] * x.double().abs()).all())
    assert parts == 3 or bool(lost.any())


@pytest.mark.parametrize("parts", ERRORS)
def test_products_lose_as_little_as_the_parts(parts: int) -> None:
    a, b = randn(ROWS, INNER, seed=2), randn(ROWS, INNER, seed=3)
    out = a.new_empty(ROWS, ROWS)
    sizes = {"ROWS": ROWS, "INNER": INNER, "PARTS": parts, "IS_INTERPRETED": IS_INTERPRETED}
    launch(_product_kernel, (1,), parts_of(a, parts), b, out, **sizes, num_warps=4)
    terms = a.double().abs() @ b.double().abs().T
    error = ((out.double() - a.double() @ b.double().T).abs() / terms).max()
    assert float(error) <= ERRORS[parts]
    plain = (
        (a.bfloat16().double() @ b.bfloat16().double().T - a.double() @ b.double().T).abs() / terms
    ).max()
    assert float(error) * 16 < float(plain)  # what one part would lose
