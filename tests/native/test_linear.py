"""`linear`: parity, and that a row's bits are its own."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from metrale import reference
from metrale.native.linear import linear
from metrale.native.norms import rms_norm
from tests.native.cases import randn

SHAPES = [
    (1, 1),
    (5, 3),
    (16, 8),
    (17, 9),
    (20, 24),
    (31, 50),
    (48, 7),
    (64, 96),
    (128, 33),
    (250, 100),
    (1000, 11),
]
DTYPES = [torch.float32, torch.bfloat16]


def weight_of(num_outputs: int, inner: int, dtype: torch.dtype) -> Tensor:
    return (randn(num_outputs, inner, seed=5) / inner**0.5).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inner", "num_outputs"), SHAPES)
@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 7, 17, 64, 130])
def test_parity(inner: int, num_outputs: int, num_rows: int, dtype: torch.dtype) -> None:
    x, weight, residual = (
        randn(num_rows, inner),
        weight_of(num_outputs, inner, dtype),
        randn(num_rows, num_outputs),
    )
    expected = x.double() @ weight.double().T
    torch.testing.assert_close(linear(x, weight, num_rows).double(), expected, rtol=1e-5, atol=1e-5)
    with_residual = linear(x, weight, 0, residual)
    torch.testing.assert_close(with_residual.double(), expected + residual, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inner", "half"), [(16, 8), (20, 5), (64, 48), (250, 33)])
@pytest.mark.parametrize("num_rows", [0, 1, 5, 17, 100])
def test_silu_mul_against_the_reference(inner: int, half: int, num_rows: int, dtype: torch.dtype) -> None:
    x, weight = randn(num_rows, inner) * 3, weight_of(2 * half, inner, dtype)
    expected = reference.ops().linear(x, weight.float(), num_rows, silu_mul=True)
    torch.testing.assert_close(linear(x, weight, num_rows, silu_mul=True), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"silu_mul": True}])
@pytest.mark.parametrize(("inner", "num_outputs"), [(64, 48), (53, 26), (1040, 18)])
def test_a_row_has_the_same_bits_anywhere(
    inner: int, num_outputs: int, dtype: torch.dtype, options: dict[str, bool]
) -> None:
    x, weight = randn(130, inner), weight_of(num_outputs, inner, dtype)
    alone = torch.cat([linear(x[i : i + 1], weight, 1, **options) for i in range(130)])
    order = torch.randperm(130, generator=torch.Generator().manual_seed(1))
    for num_rows in [*range(1, 34), 64, 65, 130]:
        rows = order[:num_rows]
        assert torch.equal(linear(x[rows], weight, num_rows // 2, **options), alone[rows]), num_rows


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_nan_stays_in_its_row(dtype: torch.dtype) -> None:
    x, weight = randn(9, 40), weight_of(12, 40, dtype)
    clean = linear(x, weight, 9)
    x[4] = torch.nan
    poisoned = linear(x, weight, 9)
    assert poisoned[4].isnan().all()
    others = torch.arange(9) != 4
    assert torch.equal(poisoned[others], clean[others])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_may_stand_apart(dtype: torch.dtype) -> None:
    wide, weight = randn(6, 90), weight_of(10, 40, dtype)
    view = wide[:, 7:47]
    assert torch.equal(linear(view, weight, 6), linear(view.contiguous(), weight, 6))


def test_inputs_stay_as_they_were() -> None:
    x, weight, residual = randn(5, 33), weight_of(7, 33, torch.bfloat16), randn(5, 7)
    before = [t.clone() for t in (x, weight, residual)]
    linear(x, weight, 5, residual)
    assert all(torch.equal(a, b) for a, b in zip(before, (x, weight, residual), strict=True))


def test_refusals_name_operator_and_argument() -> None:
    x, weight = randn(2, 8), randn(4, 8)
    with pytest.raises(ValueError, match="linear: x: expected 8 columns as the weight has, got 7"):
        linear(x[:, :7], weight, 2)
    with pytest.raises(ValueError, match="linear: x"):
        linear(x.bfloat16(), weight, 2)
    with pytest.raises(ValueError, match="linear: weight"):
        linear(x, weight.half(), 2)
    with pytest.raises(ValueError, match="linear: weight"):
        linear(x, randn(8, 4).T, 2)
    with pytest.raises(ValueError, match="linear: residual"):
        linear(x, weight, 2, randn(2, 3))
    with pytest.raises(ValueError, match="linear: silu_mul"):
        linear(x, weight[:3], 2, silu_mul=True)


THREAD_SHAPES = [(256, 1032), (1000, 130), (64, 4096)]
"""Each costs enough for several threads, and none divides evenly among them."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inner", "num_outputs"), THREAD_SHAPES)
def test_threads_change_no_bit(inner: int, num_outputs: int, dtype: torch.dtype) -> None:
    x, weight = randn(33, inner), weight_of(num_outputs, inner, dtype)
    norm, residual = randn(inner, seed=3) + 1, randn(33, num_outputs, seed=4)
    torch.set_num_threads(1)
    plain = linear(x, weight, 33, residual, norm=norm, eps=1e-6)
    both = linear(x, weight, 33, silu_mul=True)
    for num_threads in (2, 3, 7):
        torch.set_num_threads(num_threads)
        for num_rows in (1, 2, 4, 17, 33):
            rows = slice(0, num_rows)
            got = linear(x[rows], weight, num_rows, residual[rows], norm=norm, eps=1e-6)
            assert torch.equal(got, plain[rows])
            assert torch.equal(linear(x[rows], weight, num_rows, silu_mul=True), both[rows])


def test_callers_at_once_get_their_own_results() -> None:
    """The workers serve one call at a time; the others run by themselves."""
    torch.set_num_threads(2)
    xs = [randn(4, 256, seed=seed) for seed in range(4)]
    weight = weight_of(1032, 256, torch.bfloat16)
    expected = [linear(x, weight, 4) for x in xs]

    def repeat(index: int) -> bool:
        return all(torch.equal(linear(xs[index], weight, 4), expected[index]) for _ in range(200))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(repeat, range(4)))


def _sum_in_child(x: Tensor, weight: Tensor, queue: Any) -> None:
    queue.put(linear(x, weight, 4).sum().item())


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_starts_its_own_workers() -> None:
    torch.set_num_threads(2)
    x, weight = randn(4, 256), weight_of(1032, 256, torch.bfloat16)
    expected = linear(x, weight, 4).sum().item()
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_sum_in_child, args=(x, weight, queue))
    child.start()
    assert queue.get(timeout=60) == expected
    child.join(60)
    assert child.exitcode == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("num_rows", [0, 1, 5, 100])
def test_norm_equals_the_operator_before(num_rows: int, groups: int, dtype: torch.dtype) -> None:
    x, weight = randn(num_rows, 2 * 53) * 3, weight_of(48, 2 * 53, dtype)
    scale = randn(groups, 2 * 53 // groups, seed=3) + 1
    parts = x.chunk(groups, dim=1)
    normed = torch.cat([rms_norm(part.contiguous(), scale[i], 1e-6) for i, part in enumerate(parts)], dim=1)
    given = scale[0] if groups == 1 else scale
    for options in ({}, {"silu_mul": True}):
        got = linear(x, weight, num_rows, norm=given, eps=1e-6, **options)
        assert torch.equal(got, linear(normed, weight, num_rows, **options))
        expected = reference.ops().linear(x, weight.float(), num_rows, norm=given, eps=1e-6, **options)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_refuses_a_norm_of_another_width() -> None:
    with pytest.raises(ValueError, match="linear: norm: expected contiguous float32, 40 scales"):
        linear(randn(2, 40), weight_of(8, 40, torch.float32), 2, norm=randn(39), eps=1e-6)


def test_threads_treat_denormals_as_the_caller_does() -> None:
    """The mode is a thread's own, and workers were started before it changed."""
    x, weight = torch.full((4, 256), 1e-20), torch.full((4096, 256), 1e-20)
    torch.set_num_threads(2)
    for _ in range(20):
        linear(x, weight, 4)
    kept = linear(x, weight, 4)
    assert torch.set_flush_denormal(True)
    try:
        torch.set_num_threads(1)
        expected = linear(x, weight, 4)
        torch.set_num_threads(2)
        assert all(torch.equal(linear(x, weight, 4), expected) for _ in range(100))
    finally:
        torch.set_flush_denormal(False)
    assert kept.min() > 0.0
    assert torch.equal(linear(x, weight, 4), kept)
