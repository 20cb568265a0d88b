"""`linear` and the norms: parity at odd sizes, and rows that do not see one another."""

from __future__ import annotations

import pytest
import torch

from metrale import reference
from metrale.kernels.gated_rms_norm import gated_rms_norm
from metrale.kernels.linear import linear
from metrale.kernels.rms_norm import rms_norm
from tests.kernels.suite.cases import DTYPES, assert_near, permutation, randn

ORACLE = reference.ops()
EPS = 1e-6


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_rows", "inner", "num_outputs"), [(1, 40, 24), (19, 72, 80), (70, 96, 34), (0, 8, 8)]
)
def test_linear_parity(num_rows: int, inner: int, num_outputs: int, dtype: torch.dtype) -> None:
    x, weight = randn(num_rows, inner, dtype=dtype), randn(num_outputs, inner, seed=1, dtype=dtype)
    scale, residual = randn(inner).abs() + 0.5, randn(num_rows, num_outputs, seed=2, dtype=dtype)
    generated = num_rows // 3
    for options in (
        {},
        {"residual": residual},
        {"silu_mul": True},
        {"norm": scale, "eps": EPS},
        {"norm": scale.view(2, -1), "eps": EPS, "silu_mul": True},
    ):
        assert_near(
            linear(x, weight, generated, **options), ORACLE.linear(x, weight, generated, **options), dtype
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_prompt", [False, True])
def test_linear_rows_do_not_see_one_another(is_prompt: bool, dtype: torch.dtype) -> None:
    x, weight, scale = randn(40, 72, dtype=dtype), randn(48, 72, seed=1, dtype=dtype), randn(72).abs()
    order = permutation(40)

    def rows(x: torch.Tensor) -> torch.Tensor:
        return linear(x, weight, 0 if is_prompt else len(x), silu_mul=True, norm=scale, eps=EPS)

    whole = rows(x)
    assert torch.equal(rows(x[order]), whole[order])
    for first, last in ((0, 1), (7, 9), (3, 36), (39, 40)):
        assert torch.equal(rows(x[first:last].clone()), whole[first:last])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 20, 72, 256])
def test_norm_parity(size: int, dtype: torch.dtype) -> None:
    x, scale = randn(5, size, dtype=dtype), randn(size)
    assert_near(rms_norm(x, scale, EPS), ORACLE.rms_norm(x, scale, EPS), dtype)
    heads, gate = randn(3, 6, size, dtype=dtype), randn(3, 6, size, seed=1, dtype=dtype)
    found = gated_rms_norm(heads, gate, scale, EPS)
    assert_near(found, ORACLE.gated_rms_norm(heads, gate, scale, EPS), dtype)
    assert torch.equal(gated_rms_norm(heads[1:2].clone(), gate[1:2].clone(), scale, EPS), found[1:2])


def test_refusals() -> None:
    x = randn(3, 16)
    with pytest.raises(ValueError, match=r"linear: weight: expected aligned contiguous float32 \[\*, 16\]"):
        linear(x, randn(4, 17), 3)
    with pytest.raises(ValueError, match="linear: silu_mul: expected an even number of outputs"):
        linear(x, randn(5, 16), 3, silu_mul=True)
    with pytest.raises(ValueError, match="rms_norm: scale"):
        rms_norm(x, randn(15), EPS)
    with pytest.raises(
        ValueError, match=r"^rms_norm: x: expected aligned contiguous .* \[\*, \*\], got float32 \[16\]"
    ):
        rms_norm(x[0], randn(16), EPS)
    with pytest.raises(ValueError, match=r"^gated_rms_norm: x: expected 3 dimensions"):
        gated_rms_norm(x, x, randn(16), EPS)
    with pytest.raises(
        ValueError, match=r"^linear: x: expected aligned contiguous .* \[\*, \*\], got float32 \[16\]"
    ):
        linear(x[0], randn(4, 16), 1)
    for norm in (randn(2, 2, 4), randn(3, 5), randn(15)):
        with pytest.raises(ValueError, match=r"^linear: norm: expected"):
            linear(x, randn(4, 16), 3, norm=norm, eps=EPS)


@pytest.mark.parametrize("num_generated", [-1, 4])
@pytest.mark.parametrize("operator", [linear, ORACLE.linear])
def test_more_generated_rows_than_rows_are_refused(operator: object, num_generated: int) -> None:
    assert callable(operator)
    with pytest.raises(ValueError, match=f"^linear: num_generated: expected 0 to 3, got {num_generated}$"):
        operator(randn(3, 16), randn(4, 16), num_generated)
