"""`masked_argmax` and `gumbel`: ranges, ties, rows without a pick, and the reference's words."""

from __future__ import annotations

import pytest
import torch

from metrale import reference
from metrale.kernels.masked_argmax import BLOCK_IDS, gumbel, masked_argmax
from tests.kernels.interpreted.cases import randn

ORACLE = reference.ops()


def test_masked_argmax_parity() -> None:
    vocab = 2 * BLOCK_IDS + 37
    logits = randn(9, vocab)
    logits[1, 5] = logits[1, BLOCK_IDS + 5] = 9.0
    logits[2, BLOCK_IDS + 1] = torch.nan
    logits[3] = -torch.inf
    logits[4] = -5.0
    logits[4, -2:] = 50.0
    logits[5] = 0.0
    logits[5, 7] = -0.0
    logits[6, 3] = logits[6, 9] = torch.inf
    logits[7] = torch.nan
    logits[8, -1] = torch.nan
    for num_valid in (vocab, vocab - 2, BLOCK_IDS, 1):
        assert torch.equal(masked_argmax(logits, num_valid), ORACLE.masked_argmax(logits, num_valid))
    assert masked_argmax(logits[:0], 5).shape == (0,)
    with pytest.raises(ValueError, match="num_valid"):
        masked_argmax(logits, 0)


def test_gumbel_is_the_reference_s() -> None:
    seeds = [(7, 0, 3), (2**63 + 5, 1, 9), (0, 0, 2**31 - 1)]
    found, expected = gumbel(seeds, 1301), ORACLE.gumbel(seeds, 1301)
    assert float((found - expected).abs().max()) < 5e-6
    assert torch.equal(gumbel(seeds[1:2], 1301), found[1:2])
    assert torch.equal(gumbel(seeds, 40), found[:, :40])
    assert gumbel([], 5).shape == (0, 5)
