"""`masked_argmax`, `thresholds` and `gumbel`: ranges, ties, masks, rows without a pick, and the reference's words."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from metrale import reference
from metrale.kernels.gumbel import gumbel
from metrale.kernels.masked_argmax import BLOCK_IDS, masked_argmax
from metrale.kernels.picks import Truncation
from metrale.kernels.thresholds import thresholds
from tests.kernels.suite.cases import randn

VOCAB = 2 * BLOCK_IDS + 37
NUM_ROWS = 7


def assert_same(found: Any, expected: Any) -> None:
    assert torch.equal(found.token_ids, expected.token_ids)
    torch.testing.assert_close(found.logprobs, expected.logprobs, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_greedy_parity() -> None:
    logits = randn(9, VOCAB)
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
    for num_valid in (VOCAB, VOCAB - 2, BLOCK_IDS, 1):
        found = masked_argmax(logits, num_valid)
        assert found.logprobs is None
        assert torch.equal(found.token_ids, reference.masked_argmax(logits, num_valid).token_ids)
    assert masked_argmax(logits[:0], 5).token_ids.shape == (0,)


class Row:
    """Random rows with everything that a pick can have."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.logits = randn(NUM_ROWS, VOCAB, seed=seed) * 3
        self.logits[5, 77] = torch.nan
        words = -(-VOCAB // 32)
        generator = torch.Generator().manual_seed(seed)
        self.bitmask = torch.randint(
            -(2**31), 2**31, (NUM_ROWS, words), generator=generator, device="cpu"
        ).to(torch.get_default_device(), torch.int32)
        self.bitmask[6] = 0
        self.held_ids = self.logits.topk(3).indices.to(torch.int32)
        self.held_ids[0] = -1
        self.temperatures = torch.tensor([0.0, 0.7, 1.3, 0.4, 1.0, 1.0, 1.0])
        self.truncations = [
            Truncation(5, 0.9, 0.1),
            Truncation(0, 1.0, 0.0),
            Truncation(40, 1.0, 0.0),
            Truncation(0, 0.8, 0.0),
            Truncation(100, 0.5, 0.01),
            Truncation(3, 0.5, 0.1),
            Truncation(0, 0.9, 0.3),
        ]
        self.noise = [
            (rng.randrange(1 << 64), rng.randrange(4), rng.randrange(1 << 20)) for _ in range(NUM_ROWS)
        ]


@pytest.mark.parametrize("num_valid", [VOCAB, BLOCK_IDS + 1])
@pytest.mark.parametrize("has_masks", [False, True])
def test_sampled_parity(has_masks: bool, num_valid: int) -> None:
    """Picks, log-probabilities and thresholds of mixed rows; a row alone has the bits of a row among others."""
    row = Row(num_valid)
    masks = {"bitmask": row.bitmask, "held_ids": row.held_ids} if has_masks else {}
    cut = thresholds(row.logits, num_valid, row.temperatures, row.truncations, **masks)
    expected = reference.thresholds(row.logits, num_valid, row.temperatures, row.truncations, **masks)
    is_number = ~row.logits[:, :num_valid].isnan().any(-1)
    torch.testing.assert_close(cut[is_number], expected[is_number], rtol=0, atol=0)
    options = {"temperatures": row.temperatures, "thresholds": cut, "noise": row.noise, "with_logprobs": True}
    found = masked_argmax(row.logits, num_valid, **masks, **options)
    assert_same(found, reference.masked_argmax(row.logits, num_valid, **masks, **options))
    assert found.token_ids[5] == -1
    for i in range(NUM_ROWS):
        at = slice(i, i + 1)
        alone = masked_argmax(
            row.logits[at].clone(),
            num_valid,
            **{name: mask[at].clone() for name, mask in masks.items()},
            temperatures=row.temperatures[at],
            thresholds=cut[at],
            noise=row.noise[at],
            with_logprobs=True,
        )
        assert torch.equal(alone.token_ids, found.token_ids[at])
        assert torch.equal(alone.logprobs.nan_to_num(9.0), found.logprobs[at].nan_to_num(9.0))
        one = thresholds(
            row.logits[at].clone(),
            num_valid,
            row.temperatures[at],
            row.truncations[at],
            **{name: mask[at].clone() for name, mask in masks.items()},
        )
        assert torch.equal(one.nan_to_num(), cut[at].nan_to_num())


def test_truncation_keeps_ties() -> None:
    """Every id equal to the last that is kept, on both sides of zero and at its two signs."""
    logits = torch.full((4, 50), -9.0)
    logits[0, [3, 7, 30]] = 2.0
    logits[1, [3, 7]] = torch.tensor([0.0, -0.0])
    logits[2] = 1.0
    logits[3, 4] = torch.inf
    ones = torch.ones(4)
    for truncation in (Truncation(1, 1.0, 0.0), Truncation(2, 0.5, 0.0), Truncation(0, 0.3, 0.0)):
        found = thresholds(logits, 50, ones, [truncation] * 4)
        assert torch.equal(found[:3], reference.thresholds(logits, 50, ones, [truncation] * 4)[:3])
        assert (logits[:3] >= found[:3, None]).sum(-1).tolist() == [3, 2, 50]
        assert logits[3, 4] >= found[3]
    assert thresholds(logits, 50, torch.zeros(4), [Truncation(1, 0.5, 0.1)] * 4).tolist() == [-torch.inf] * 4


def test_the_smallest_top_p_keeps_the_highest_alone() -> None:
    """Also where it is 0 in float32; min-p still cuts."""
    logits, ones = randn(3, 50), torch.ones(3)
    for truncation in (Truncation(0, 1e-300, 0.0), Truncation(0, 5e-324, 0.5), Truncation(9, 1e-45, 0.0)):
        found = thresholds(logits, 50, ones, [truncation] * 3)
        assert torch.equal(found, reference.thresholds(logits, 50, ones, [truncation] * 3))
        assert torch.equal(found, logits.amax(-1))


def test_infinite_logits() -> None:
    """+inf is certain: nothing need be cut beside it, and who has it shares the probability; masked, it is no pick."""
    logits = randn(4, 70)
    logits[0, 7] = logits[1, 3] = logits[1, 60] = logits[2, 5] = torch.inf
    logits[3] = -torch.inf
    held = torch.tensor([[-1], [3], [5], [-1]], dtype=torch.int32)
    ones = torch.ones(4)
    for truncation in (Truncation(1, 1.0, 0.0), Truncation(0, 0.5, 0.0), Truncation(0, 1.0, 0.5)):
        found = thresholds(logits, 70, ones, [truncation] * 4, held_ids=held)
        expected = reference.thresholds(logits, 70, ones, [truncation] * 4, held_ids=held)
        assert torch.equal(found[:3], expected[:3])
        assert found[:2].tolist() == [-torch.inf] * 2
    for held_ids in (None, held):
        for options in ({}, {"temperatures": ones, "noise": [(1, 0, i) for i in range(4)]}):
            found = masked_argmax(logits, 70, held_ids=held_ids, with_logprobs=True, **options)
            expected = reference.masked_argmax(logits, 70, held_ids=held_ids, with_logprobs=True, **options)
            assert_same(found, expected)
    assert found.logprobs[2] == -torch.inf
    assert abs(float(found.logprobs[1]) + math.log(2.0)) < 1e-6


def test_refusals() -> None:
    logits = randn(2, 70)
    words = torch.zeros(2, 3, dtype=torch.int32)
    for operator in (masked_argmax, reference.masked_argmax):
        for options, sentence in (
            ({"num_valid": 0}, "num_valid: expected 1 to 70, got 0"),
            ({"bitmask": words[:, :2]}, r"bitmask: expected int32 \[2, 3 or more\], got int32 \[2, 2\]"),
            ({"bitmask": words[0]}, r"bitmask: expected int32 \[2, 3 or more\], got int32 \[3\]"),
            ({"held_ids": words[:1]}, "held_ids: expected int32"),
            ({"temperatures": torch.ones(3)}, r"temperatures: expected float32 \[2\], got float32 \[3\]"),
            ({"temperatures": torch.tensor(1.0)}, r"temperatures: expected float32 \[2\], got float32 \[\]"),
            ({"thresholds": torch.ones(2)}, "temperatures: expected as thresholds or noise were given"),
            ({"noise": [(0, 0, 0)] * 2}, "temperatures: expected as thresholds or noise were given"),
            ({"temperatures": torch.ones(2), "noise": [(0, 0, 0)]}, "noise: expected 2 triples, got 1"),
        ):
            with pytest.raises(ValueError, match=f"^masked_argmax: {sentence}"):
                operator(logits, **({"num_valid": 70} | options))
        with pytest.raises(ValueError, match=r"^masked_argmax: logits: expected"):
            operator(logits[0], 70)
    with pytest.raises(ValueError, match="masked_argmax: bitmask: expected contiguous rows"):
        masked_argmax(logits, 70, bitmask=torch.zeros(2, 6, dtype=torch.int32)[:, ::2])
    for operator in (thresholds, reference.thresholds):
        for truncations in (
            [Truncation(0, 0.0, 0.0)] * 2,
            [Truncation(0, 1.0, -1.0)] * 2,
            [Truncation(-1, 1.0, 0.0)] * 2,
            [Truncation(0, math.nan, 0.0)] * 2,
            [Truncation(0, 1.0, 0.0)],
        ):
            with pytest.raises(ValueError, match=r"^thresholds: truncations: expected"):
                operator(logits, 70, torch.ones(2), truncations)
        with pytest.raises(ValueError, match=r"^thresholds: temperatures: expected float32"):
            operator(logits, 70, torch.ones(2, 1), [Truncation(0, 1.0, 0.0)] * 2)


def test_gumbel_is_the_reference_s() -> None:
    seeds = [(7, 0, 3), (2**63 + 5, 1, 9), (0, 0, 2**31 - 1)]
    found, expected = gumbel(seeds, 1301), reference.gumbel(seeds, 1301)
    assert float((found - expected).abs().max()) < 5e-6
    assert torch.equal(gumbel(seeds[1:2], 1301), found[1:2])
    assert torch.equal(gumbel(seeds, 40), found[:, :40])
    assert gumbel([], 5).shape == (0, 5)
