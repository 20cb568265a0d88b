"""`masked_argmax` and `gumbel`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from metrale import reference
from metrale.native.pick import gumbel, masked_argmax
from tests.native.cases import randn

INF = torch.inf


def argmax(logits: Tensor, num_valid: int) -> Tensor:
    return masked_argmax(logits, num_valid).token_ids


@pytest.mark.parametrize("num_valid", [1, 5, 8, 31, 32, 33, 64, 100, 1000, 2048])
@pytest.mark.parametrize("num_rows", [0, 1, 17])
def test_argmax_equals_the_reference(num_valid: int, num_rows: int) -> None:
    logits = (randn(num_rows, num_valid + 3) * 4).round()  # many ties
    logits[:, num_valid:] = 50.0
    assert torch.equal(argmax(logits, num_valid), reference.masked_argmax(logits, num_valid).token_ids)
    assert torch.equal(argmax(logits[:, : num_valid + 1], num_valid), argmax(logits, num_valid))


@pytest.mark.parametrize("at", [0, 3, 40, 63, 64, 99])
def test_one_nan_marks_its_row_alone(at: int) -> None:
    logits = randn(3, 100)
    logits[1, at] = torch.nan
    expected = logits.argmax(-1)
    expected[1] = -1
    assert torch.equal(argmax(logits, 100), expected)


def test_argmax_edges() -> None:
    rows = torch.full((6, 70), -5.0)
    rows[0] = -INF
    rows[1, [5, 69]] = 1.0
    rows[2, 17] = INF
    rows[2, 40] = INF
    rows[3] = 0.0
    rows[3, 0] = -0.0
    rows[4] = torch.nan
    rows[5, 69] = torch.nan
    assert argmax(rows, 69).tolist() == [-1, 5, 17, 0, -1, 0]
    with pytest.raises(ValueError, match="masked_argmax: num_valid: expected 1 to 70, got 71"):
        argmax(rows, 71)


SEEDS = [
    (0, 0, 0),
    (1, 2, 3),
    (2**64 - 1, 2**32 - 1, 2**32 - 1),
    (-5, 0, 77),
    (0x1234567890ABCDEF, 9, 100_000),
]


@pytest.mark.parametrize("num_ids", [0, 1, 3, 4, 31, 32, 33, 100, 2048])
def test_gumbel_against_the_reference(num_ids: int) -> None:
    noise = gumbel(SEEDS, num_ids)
    torch.testing.assert_close(noise, reference.gumbel(SEEDS, num_ids), rtol=1e-6, atol=2e-6)
    for row, seed in zip(noise, SEEDS, strict=True):
        assert torch.equal(gumbel([seed], num_ids)[0], row)
    assert torch.equal(gumbel(SEEDS, num_ids + 5)[:, :num_ids], noise)


def test_gumbel_words_are_exact() -> None:
    """A uniform is recovered from its noise far better than neighbours of 2^-32 in the tail differ."""
    noise = gumbel([(7, 0, 1)], 100_000).double()
    expected = reference.gumbel([(7, 0, 1)], 100_000).double()
    tail = expected > 8.0
    assert tail.sum() > 20
    torch.testing.assert_close(torch.exp(-noise[tail]), torch.exp(-expected[tail]), rtol=2e-6, atol=0.0)


def test_gumbel_moments() -> None:
    noise = gumbel([(i, 0, 0) for i in range(8)], 20_000).double()
    assert abs(float(noise.mean()) - 0.5772) < 0.02
    assert abs(float(noise.var()) - 1.6449) < 0.05


def test_gumbel_of_no_rows() -> None:
    assert gumbel([], 10).shape == (0, 10)
