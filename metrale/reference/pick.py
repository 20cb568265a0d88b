"""References of `masked_argmax`, `thresholds` and `gumbel`: the pick of a row, its truncation and its noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from metrale.kernels.picks import (
    WORD,
    WORD_BITS,
    Picks,
    Truncation,
    check_picks,
    check_truncations,
    noise_words,
)

PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
PHILOX_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
PHILOX_ROUNDS = 10
NUCLEUS_WIDTH = 256
"""Top-p orders this many of the highest ids first, and 16 times more while their mass falls short."""
SUM_BLOCK = 4096


def masked_argmax(
    logits: Tensor,
    num_valid: int,
    bitmask: Tensor | None = None,
    held_ids: Tensor | None = None,
    temperatures: Tensor | None = None,
    thresholds: Tensor | None = None,
    noise: Sequence[tuple[int, int, int]] | None = None,
    with_logprobs: bool = False,
) -> Picks:
    """The highest-scoring id of each row, the lowest id on a tie.

    | tensor | shape | dtype | dir | meaning |
    | --- | --- | --- | --- | --- |
    | logits | [M, V] | float32 | in | |
    | num_valid | int | | in | ids at and past it do not exist (padded columns) |
    | bitmask | [M, V / 32] | int32 | in | bit i of word w allows id 32 w + i |
    | held_ids | [M, h] | int32 | in | ids that may not be picked (EOS before min_tokens); -1: none |
    | temperatures | [M] | float32 | in | 0: the row is greedy, and neither threshold nor noise touches it |
    | thresholds | [M] | float32 | in | from `thresholds`: logits / temperature below it are dropped |
    | noise | M triples | | in | (seed, sample, position) that name a row's Gumbel noise; needs temperatures |
    | result token_ids | [M] | int64 | out | in [0, num_valid), or -1 where a valid id is NaN or none is left |
    | result logprobs | [M] | float32 | out | with `with_logprobs`: log-softmax of the raw logits at the pick, else None |

    Score of an id: logits / temperature + noise. +inf counts as certain; ids that have it share all of the probability.

    Requires: 1 <= num_valid <= V. Source: the Gumbel-max trick (Gumbel 1954).
    """
    check_picks("masked_argmax", logits, num_valid, bitmask, held_ids, temperatures, thresholds, noise)
    if not logits.shape[0]:
        empty = torch.empty(0, dtype=torch.int64, device=logits.device)
        return Picks(empty, empty.float() if with_logprobs else None)
    scores = processed(logits, num_valid, bitmask, held_ids, temperatures, thresholds, noise, gumbel)
    highest, index = scores.max(dim=-1)
    token_ids = index.masked_fill(highest.isnan() | (highest == -torch.inf), -1)
    return Picks(token_ids, pick_logprobs(logits[:, :num_valid], token_ids) if with_logprobs else None)


def pick_logprobs(logits: Tensor, token_ids: Tensor) -> Tensor:
    """Log-softmax of logits [M, V] at the picks [M], NaN where there is none."""
    at = token_ids.clamp(min=0)[:, None]
    is_certain = logits == torch.inf
    if is_certain.any():
        certain = torch.where(is_certain, 0.0, -torch.inf)
        logits = torch.where(is_certain.any(-1, keepdim=True), certain, logits)
    logprobs = logits.gather(1, at) - logits.logsumexp(-1, keepdim=True)
    return logprobs[:, 0].masked_fill(token_ids < 0, torch.nan)


def processed(
    logits: Tensor,
    num_valid: int,
    bitmask: Tensor | None,
    held_ids: Tensor | None,
    temperatures: Tensor | None,
    thresholds: Tensor | None,
    noise: Sequence[tuple[int, int, int]] | None,
    gumbel: Callable[..., Tensor],
) -> Tensor:
    """The scores [M, num_valid] that `masked_argmax` compares, with noise from `gumbel`; NaN stays NaN."""
    scores = allowed(logits, num_valid, bitmask, held_ids)
    if temperatures is None:
        return scores
    sampled = (temperatures > 0.0).nonzero()[:, 0]
    rows = scores[sampled] / temperatures[sampled, None]
    if thresholds is not None:
        rows.masked_fill_(rows < thresholds[sampled, None], -torch.inf)
    if noise is not None:
        rows.add_(gumbel([noise[i] for i in sampled.tolist()], num_valid, logits.device))
    return rows if len(sampled) == len(scores) else scores.index_copy(0, sampled, rows)


def allowed(logits: Tensor, num_valid: int, bitmask: Tensor | None, held_ids: Tensor | None) -> Tensor:
    """Logits [M, num_valid], -inf where an id is masked or held; a NaN is never hidden."""
    scores = logits[:, :num_valid]
    if bitmask is not None:
        bits = torch.arange(WORD_BITS, dtype=torch.int32, device=logits.device)
        is_allowed = ((bitmask[:, :, None] >> bits) & 1).flatten(1)[:, :num_valid] > 0
        scores = scores.masked_fill(~is_allowed & ~scores.isnan(), -torch.inf)
    if held_ids is not None:
        ids = torch.arange(num_valid, dtype=torch.int32, device=logits.device)
        is_held = (held_ids[:, :, None] == ids).any(1)
        scores = scores.masked_fill(is_held & ~scores.isnan(), -torch.inf)
    return scores


def thresholds(
    logits: Tensor,
    num_valid: int,
    temperatures: Tensor,
    truncations: Sequence[Truncation],
    bitmask: Tensor | None = None,
    held_ids: Tensor | None = None,
) -> Tensor:
    """The lowest logits / temperature that top-k, then top-p, then min-p keep, one a row.

    | tensor | shape | dtype | dir | meaning |
    | --- | --- | --- | --- | --- |
    | logits, num_valid, bitmask, held_ids, temperatures | | | in | as in `masked_argmax` |
    | truncations | M | | in | top_k, top_p, min_p of each row |
    | result | [M] | float32 | out | -inf where nothing is cut, the row is greedy or an id has +inf |

    Top-k keeps every id equal to the k-th highest. Top-p keeps the smallest falling prefix of what top-k left whose softmax
    mass is `top_p` or more, and every id equal to its last; min-p what has at least `min_p` of the highest probability.

    Requires: as many truncations as rows. Source: Holtzman et al. 2020, The curious case of neural text degeneration
    (arXiv:1904.09751); Nguyen et al. 2024, min-p (arXiv:2407.01082).
    """
    check_picks("thresholds", logits, num_valid, bitmask, held_ids, temperatures)
    check_truncations("thresholds", truncations, logits.shape[0])
    result = torch.full((len(truncations),), -torch.inf, dtype=torch.float32, device=logits.device)
    for i, truncation in enumerate(truncations):
        if float(temperatures[i]) > 0.0 and truncation != Truncation(0, 1.0, 0.0):
            rows = [None if t is None else t[i : i + 1] for t in (bitmask, held_ids)]
            scores = allowed(logits[i : i + 1], num_valid, *rows)[0] / temperatures[i]
            result[i] = _threshold(scores, truncation)
    return result


def _threshold(scores: Tensor, truncation: Truncation) -> Tensor:
    """NaN compares false with everything: a row that holds it is found invalid by the argmax."""
    threshold = scores.new_full((), -torch.inf)
    if scores.amax() == torch.inf:
        return threshold
    if 0 < truncation.top_k < scores.shape[0]:
        threshold = scores.topk(truncation.top_k).values[-1]
        scores = scores.masked_fill(scores < threshold, -torch.inf)
    if truncation.top_p < 1.0:
        threshold = torch.fmax(threshold, _nucleus_threshold(scores, truncation.top_p))
    if truncation.min_p:
        threshold = torch.fmax(threshold, scores.amax() + math.log(truncation.min_p))
    return threshold


def _sum(values: Tensor) -> Tensor:
    """Sum of a vector, block by block, since torch would cut a long one into as many parts as it has threads."""
    tail = -values.shape[0] % SUM_BLOCK
    return torch.nn.functional.pad(values, (0, tail)).view(-1, SUM_BLOCK).sum(-1).sum()


def _nucleus_threshold(row: Tensor, top_p: float) -> Tensor:
    """Lowest logit of the smallest falling prefix whose softmax mass is `top_p` or more, summed in float64."""
    highest = row.amax()
    mass = top_p * _sum((row.double() - highest).exp())
    width = min(NUCLEUS_WIDTH, row.shape[0])
    while True:
        leading = row.topk(width).values  # falling
        num_reaching = int(((leading.double() - highest).exp().cumsum(dim=0) >= mass).sum())
        if num_reaching or width == row.shape[0]:
            return leading[width - max(num_reaching, 1)]
        width = min(16 * width, row.shape[0])


def gumbel(seeds: Sequence[tuple[int, int, int]], num_ids: int, device: torch.device | None = None) -> Tensor:
    """Standard Gumbel noise, float32 [M, num_ids], for M rows named by (seed, sample, position).

    Philox4x32-10 with key = the seed's low and high 32 bits and counter = (id // 4, position, sample, 0); id takes
    word id % 4. A word x gives u = (x + 1/2) 2^-32, at most 1 - 2^-24, and noise = -log(-log1p(-u)): u is finest near
    0, which is the Gumbel tail that decides a pick.

    Source: Salmon et al. 2011, Parallel random numbers: as easy as 1, 2, 3.
    """
    blocks = torch.arange(-(-num_ids // 4), dtype=torch.int64, device=device)
    rows = []
    for key_low, key_high, sample, position in noise_words(seeds, None).tolist():
        words = _philox(blocks, position, sample, key_low, key_high)
        rows.append(torch.stack(words, dim=-1).reshape(-1)[:num_ids])
    if not rows:
        return torch.empty(0, num_ids, dtype=torch.float32, device=device)
    u = ((torch.stack(rows).to(torch.float64) + 0.5) * 2.0**-32).to(torch.float32).clamp(max=1.0 - 2.0**-24)
    return -torch.log(-torch.log1p(-u))


def _philox(blocks: Tensor, position: int, sample: int, key_low: int, key_high: int) -> list[Tensor]:
    """Four 32-bit words a block, as int64 tensors."""
    c0, c1 = blocks, torch.full_like(blocks, position)
    c2, c3 = torch.full_like(blocks, sample), torch.zeros_like(blocks)
    for _ in range(PHILOX_ROUNDS):
        high0, low0 = _multiply(c0, PHILOX_MULTIPLIERS[0])
        high1, low1 = _multiply(c2, PHILOX_MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ key_low, low1, high0 ^ c3 ^ key_high, low0
        key_low = (key_low + PHILOX_INCREMENTS[0]) & WORD
        key_high = (key_high + PHILOX_INCREMENTS[1]) & WORD
    return [c0, c1, c2, c3]


def _multiply(x: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a 32 x 32 bit product, in halves that stay within 63 bits."""
    low = (x & 0xFFFF) * factor
    high = (x >> 16) * factor + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)
