"""`moe`: parity, and rows that do not see the rows that share their experts."""

from __future__ import annotations

import pytest
import torch

from metrale import reference
from metrale.kernels.moe import moe
from tests.kernels.suite.cases import DTYPES, assert_near, permutation, randn

ORACLE = reference.ops()
SHAPES = [(5, 2, 16, 24, 8), (9, 3, 20, 17, 33), (1, 1, 24, 5, 16), (4, 4, 33, 8, 1)]


def weights_of(
    experts: int, dim: int, inner: int, shared: int, dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    shapes = [
        (experts, dim),
        (experts, 2 * inner, dim),
        (experts, dim, inner),
        (2 * shared, dim),
        (dim, shared),
        (1, dim),
    ]
    return tuple((randn(*s, seed=n) / s[-1] ** 0.5).to(dtype) for n, s in enumerate(shapes))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_parity(shape: tuple[int, int, int, int, int], dtype: torch.dtype) -> None:
    experts, top_k, *sizes = shape
    weights = weights_of(experts, *sizes, dtype)
    for num_rows, generated in ((0, 0), (1, 1), (20, 17)):
        x, residual = (
            randn(num_rows, sizes[0], dtype=dtype) * 2,
            randn(num_rows, sizes[0], seed=9, dtype=dtype),
        )
        for norm_topk, extra in ((True, residual), (False, None)):
            found = moe(x, *weights, top_k, norm_topk, generated, extra)
            assert_near(found, ORACLE.moe(x, *weights, top_k, norm_topk, generated, extra), dtype)


@pytest.mark.parametrize("is_prompt", [False, True])
def test_rows_do_not_see_one_another(is_prompt: bool) -> None:
    """All rows to few experts, alone, permuted, and beside a row of NaN."""
    weights = weights_of(3, 16, 12, 8, torch.bfloat16)
    x = randn(21, 16, dtype=torch.bfloat16) * 2

    def rows(x: torch.Tensor) -> torch.Tensor:
        return moe(x, *weights, 2, True, 0 if is_prompt else len(x))

    whole = rows(x)
    order = permutation(21)
    assert torch.equal(rows(x[order]), whole[order])
    for i in (0, 7, 20):
        assert torch.equal(rows(x[i : i + 1].clone()), whole[i : i + 1])
    x[3, 2] = torch.nan
    broken = rows(x)
    others = torch.arange(21) != 3
    assert broken[3].isnan().all()
    assert torch.equal(broken[others], whole[others])


def test_the_lowest_expert_wins_a_tie() -> None:
    _, gate_up, down, *shared = weights_of(6, 16, 8, 8, torch.float32)
    router, x = torch.zeros(6, 16), randn(2, 16)
    first = moe(x, router[:2].clone(), gate_up[:2].clone(), down[:2].clone(), *shared, 2, True, 2)
    assert torch.equal(moe(x, router, gate_up, down, *shared, 2, True, 2), first)


def test_refusals() -> None:
    weights, x = weights_of(4, 16, 8, 8, torch.float32), randn(2, 16)
    with pytest.raises(ValueError, match="moe: top_k: expected 1 to 4, got 5"):
        moe(x, *weights, 5, True, 2)
    with pytest.raises(ValueError, match="moe: residual: expected aligned contiguous float32"):
        moe(x, *weights, 2, True, 2, x[:1])
