"""`rms_norm` and `gated_rms_norm`."""

from __future__ import annotations

import pytest
import torch

from metrale import reference
from metrale.native.norms import gated_rms_norm, rms_norm
from tests.native.cases import randn

DIMS = [1, 7, 16, 20, 24, 33, 48, 64, 96, 128, 250]


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("num_rows", [0, 1, 17])
def test_rms_norm(dim: int, num_rows: int) -> None:
    x, scale = randn(num_rows, dim) * 3, randn(dim, seed=1)
    out = rms_norm(x, scale, 1e-6)
    torch.testing.assert_close(out, reference.ops().rms_norm(x, scale, 1e-6), rtol=1e-5, atol=1e-6)
    for i in range(num_rows):
        assert torch.equal(rms_norm(x[i : i + 1], scale, 1e-6), out[i : i + 1])


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("num_rows", [0, 1, 17])
def test_gated_rms_norm(dim: int, num_rows: int) -> None:
    num_heads = 3
    x, weight, wide = (
        randn(num_rows, num_heads, dim),
        randn(dim, seed=1),
        randn(num_rows, num_heads * dim + 11) * 9,
    )
    gate = wide[:, 5 : 5 + num_heads * dim].view(num_rows, num_heads, dim)
    out = gated_rms_norm(x, gate, weight, 1e-6)
    expected = reference.ops().gated_rms_norm(x, gate, weight, 1e-6)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(gated_rms_norm(x, gate.contiguous(), weight, 1e-6), out)
    for i in range(num_rows):
        assert torch.equal(gated_rms_norm(x[i : i + 1], gate[i : i + 1], weight, 1e-6), out[i : i + 1])


def test_extreme_gates_stay_finite() -> None:
    gate = torch.tensor([-1e30, -200.0, -90.0, 0.0, 90.0, 200.0, 1e30, -0.0]).view(1, 1, 8)
    out = gated_rms_norm(torch.ones(1, 1, 8), gate, torch.ones(8), 1e-6)
    torch.testing.assert_close(out, torch.nn.functional.silu(gate))


def test_refusals_name_operator_and_argument() -> None:
    with pytest.raises(ValueError, match="rms_norm: x"):
        rms_norm(randn(2, 8).bfloat16(), randn(8), 1e-6)
    with pytest.raises(ValueError, match="rms_norm: x, scale"):
        rms_norm(randn(2, 8), randn(7), 1e-6)
    with pytest.raises(ValueError, match="gated_rms_norm: gate"):
        gated_rms_norm(randn(2, 3, 8), randn(2, 8, 3).transpose(1, 2), randn(8), 1e-6)
