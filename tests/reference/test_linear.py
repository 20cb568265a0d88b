"""`linear`: the product, its epilogues, and rows whose bits are their own."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from metrale.reference.linear import GENERATED_TILE, PROMPT_TILE, linear
from tests.reference.oracles import randn, relative_error

NUM_ROWS = 40
SIZES = [(37, 53), (64, 16), (200, 101), (3, 1)]  # inner, outer
DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 8e-3}


def rows_alone(x: Tensor, weight: Tensor, is_generated: bool, **epilogue: Tensor | bool) -> Tensor:
    """Each row in a call of its own."""
    parts = []
    for i in range(x.shape[0]):
        own = {k: v[i : i + 1] if isinstance(v, Tensor) else v for k, v in epilogue.items()}
        parts.append(linear(x[i : i + 1], weight, int(is_generated), **own))
    return torch.cat(parts)


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.mark.parametrize("is_generated", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_a_row_does_not_see_the_row_count(
    size: tuple[int, int], is_generated: bool, dtype: torch.dtype
) -> None:
    inner, outer = size
    x, weight = randn(NUM_ROWS, inner).to(dtype), randn(outer, inner, seed=1).to(dtype)
    alone = rows_alone(x, weight, is_generated)
    for num_rows in range(1, NUM_ROWS + 1):
        got = linear(x[:num_rows], weight, num_rows if is_generated else 0)
        assert torch.equal(got, alone[:num_rows]), num_rows
        got = linear(x[NUM_ROWS - num_rows :], weight, num_rows if is_generated else 0)
        assert torch.equal(got, alone[NUM_ROWS - num_rows :]), f"the last {num_rows}"


def test_classes_side_by_side(dtype: torch.dtype) -> None:
    """Generated rows first, any number of them, then prompt rows, past the height of a prompt tile too."""
    x, weight = randn(150, 37).to(dtype), randn(53, 37, seed=1).to(dtype)
    generated, prompt = rows_alone(x, weight, is_generated=True), rows_alone(x, weight, is_generated=False)
    for num_generated in (0, 1, GENERATED_TILE - 1, GENERATED_TILE, 17, 150 - PROMPT_TILE, 149, 150):
        got = linear(x, weight, num_generated)
        assert torch.equal(got, torch.cat([generated[:num_generated], prompt[num_generated:]])), num_generated


def test_a_row_does_not_see_its_place(dtype: torch.dtype) -> None:
    x, weight = randn(NUM_ROWS, 37).to(dtype), randn(53, 37, seed=1).to(dtype)
    expected = rows_alone(x, weight, is_generated=True)
    order = random.Random(0).sample(range(NUM_ROWS), NUM_ROWS)
    assert torch.equal(linear(x[order], weight, NUM_ROWS), expected[order])


@pytest.mark.parametrize("offset", [1, 2, 3, 7])
@pytest.mark.parametrize("is_generated", [True, False])
def test_views_anywhere_in_memory(offset: int, is_generated: bool, dtype: torch.dtype) -> None:
    """Off any alignment, and with a row stride above the width: a slice of a wider projection."""
    inner, num_rows = 37, 9
    x, weight = randn(num_rows, inner).to(dtype), randn(53, inner, seed=1).to(dtype)
    expected = rows_alone(x, weight, is_generated)
    memory = torch.full((num_rows * inner + 64,), torch.nan, dtype=dtype)
    shifted = memory[offset : offset + num_rows * inner].view(num_rows, inner)
    wide = torch.full((num_rows, inner + 2 * offset), torch.nan, dtype=dtype)
    for view in (shifted, wide[:, offset : offset + inner]):
        view.copy_(x)
        assert torch.equal(linear(view, weight, num_rows if is_generated else 0), expected)


def test_a_nan_row_stays_alone(dtype: torch.dtype) -> None:
    x, weight = randn(10, 37).to(dtype), randn(53, 37, seed=1).to(dtype)
    expected = linear(x, weight, 5)
    x[[2, 7]] = torch.nan
    got = linear(x, weight, 5)
    good = [0, 1, 3, 4, 5, 6, 8, 9]
    assert torch.equal(got[good], expected[good])
    assert bool(got[[2, 7]].isnan().all())


@pytest.mark.parametrize("num_generated", [0, 3, 7])
def test_epilogues(num_generated: int, dtype: torch.dtype) -> None:
    inner, outer, num_rows = 37, 22, 7
    x, weight = randn(num_rows, inner).to(dtype), randn(outer, inner, seed=1).to(dtype)
    residual = randn(num_rows, outer, seed=2).to(dtype)
    plain = linear(x, weight, num_generated)
    product = x.double() @ weight.double().T
    assert plain.dtype is dtype
    assert relative_error(plain, product) < TOLERANCE[dtype]
    assert torch.equal(linear(x, weight, num_generated, residual), residual + plain)
    gate, up = product.chunk(2, dim=-1)
    expected = gate / (1 + torch.exp(-gate)) * up
    got = linear(x, weight, num_generated, silu_mul=True)
    assert got.shape == (num_rows, outer // 2)
    assert relative_error(got, expected) < 4 * TOLERANCE[dtype]


@pytest.mark.parametrize("is_generated", [True, False])
def test_epilogues_do_not_see_the_row_count(is_generated: bool, dtype: torch.dtype) -> None:
    """An odd width, so that a vector body and a scalar tail would round differently."""
    x, weight = randn(NUM_ROWS, 37).to(dtype), randn(22, 37, seed=1).to(dtype)
    residual = randn(NUM_ROWS, 22, seed=2).to(dtype)
    for epilogue in ({"silu_mul": True}, {"residual": residual}):
        alone = rows_alone(x, weight, is_generated, **epilogue)
        for num_rows in (1, 2, 3, 5, 8, 31, NUM_ROWS):
            own = {k: v[:num_rows] if isinstance(v, Tensor) else v for k, v in epilogue.items()}
            got = linear(x[:num_rows], weight, num_rows if is_generated else 0, **own)
            assert torch.equal(got, alone[:num_rows])


def test_no_rows(dtype: torch.dtype) -> None:
    got = linear(torch.empty(0, 37, dtype=dtype), randn(53, 37).to(dtype), 0)
    assert got.shape == (0, 53)
    assert got.dtype is dtype


def test_inputs_are_not_changed(dtype: torch.dtype) -> None:
    tensors = [randn(9, 37).to(dtype), randn(53, 37, seed=1).to(dtype), randn(9, 53, seed=2).to(dtype)]
    before = [t.clone() for t in tensors]
    linear(*tensors[:2], 4, tensors[2])
    assert all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))


def test_widths_must_agree() -> None:
    with pytest.raises(ValueError, match="linear: x has 36 columns, weight expects 37"):
        linear(randn(2, 36), randn(5, 37), 2)
