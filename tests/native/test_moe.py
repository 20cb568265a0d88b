"""`moe` against the reference, and that a row does not see the rows that share its experts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from metrale import reference
from metrale.native.moe import moe
from tests.native.cases import randn


def weights_of(experts: int, dim: int, inner: int, shared: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    shapes = [
        (experts, dim),
        (experts, 2 * inner, dim),
        (experts, dim, inner),
        (2 * shared, dim),
        (dim, shared),
        (1, dim),
    ]
    return tuple((randn(*s, seed=n) / s[-1] ** 0.5).to(dtype) for n, s in enumerate(shapes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm_topk", [True, False])
@pytest.mark.parametrize(
    ("experts", "top_k", "dim", "inner", "shared"),
    [(4, 2, 16, 24, 8), (9, 3, 20, 17, 33), (1, 1, 48, 5, 16), (16, 16, 33, 8, 1)],
)
@pytest.mark.parametrize("num_rows", [0, 1, 17, 70])
def test_parity_and_row_independence(
    experts: int,
    top_k: int,
    dim: int,
    inner: int,
    shared: int,
    num_rows: int,
    norm_topk: bool,
    dtype: torch.dtype,
) -> None:
    weights = weights_of(experts, dim, inner, shared, dtype)
    x, residual = randn(num_rows, dim) * 2, randn(num_rows, dim, seed=9)
    found = moe(x, *weights, top_k, norm_topk, num_rows, residual)
    expected = reference.ops().moe(x, *(w.float() for w in weights), top_k, norm_topk, num_rows, residual)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    without = moe(x, *weights, top_k, norm_topk, 0)
    order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(1))
    assert torch.equal(moe(x[order], *weights, top_k, norm_topk, num_rows), without[order])
    for i in range(min(num_rows, 20)):
        assert torch.equal(moe(x[i : i + 1], *weights, top_k, norm_topk, 1), without[i : i + 1])


def test_the_lowest_expert_wins_a_tie() -> None:
    _, gate_up, down, *shared = weights_of(6, 16, 8, 8, torch.float32)
    router = torch.zeros(6, 16)
    x = randn(2, 16)
    first = moe(
        x, router[:2].contiguous(), gate_up[:2].contiguous(), down[:2].contiguous(), *shared, 2, True, 2
    )
    assert torch.equal(moe(x, router, gate_up, down, *shared, 2, True, 2), first)


def test_a_nan_stays_in_its_row() -> None:
    weights = weights_of(4, 16, 8, 8, torch.bfloat16)
    x = randn(5, 16)
    clean = moe(x, *weights, 2, True, 5)
    x[2, 3] = torch.nan
    poisoned = moe(x, *weights, 2, True, 5)
    assert poisoned[2].isnan().all()
    others = torch.arange(5) != 2
    assert torch.equal(poisoned[others], clean[others])


def test_refusals_name_operator_and_argument() -> None:
    weights = weights_of(4, 16, 8, 8, torch.float32)
    x = randn(2, 16)
    with pytest.raises(ValueError, match="moe: top_k: expected 1 to 4, got 5"):
        moe(x, *weights, 5, True, 2)
    with pytest.raises(ValueError, match="moe: down"):
        moe(x, *weights[:2], weights[2].bfloat16(), *weights[3:], 2, True, 2)
    with pytest.raises(ValueError, match="moe: residual"):
        moe(x, *weights, 2, True, 2, x[:1])
