"""References of `masked_argmax` and `gumbel`: the pick of a row and its counter-based noise."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

WORD = 0xFFFFFFFF
PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
PHILOX_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
PHILOX_ROUNDS = 10


def masked_argmax(logits: Tensor, num_valid: int) -> Tensor:
    """The highest-scoring id of each row, the lowest id on a tie.

    | tensor | shape | dtype | dir | meaning |
    | --- | --- | --- | --- | --- |
    | logits | [M, V] | float32 | in | |
    | num_valid | int | | in | ids at and past it do not exist (padded columns) |
    | result | [M] | int64 | out | in [0, num_valid), or -1 where a valid id is NaN or all are -inf |

    Requires: 1 <= num_valid <= V.
    """
    if not 1 <= num_valid <= logits.shape[1]:
        raise ValueError(f"masked_argmax: num_valid {num_valid}, expected 1 to {logits.shape[1]}")
    if not logits.shape[0]:
        return torch.empty(0, dtype=torch.int64, device=logits.device)
    highest, index = logits[:, :num_valid].max(dim=-1)
    return index.masked_fill(highest.isnan() | (highest == -torch.inf), -1)


def gumbel(seeds: Sequence[tuple[int, int, int]], num_ids: int, device: torch.device | None = None) -> Tensor:
    """Standard Gumbel noise, float32 [M, num_ids], for M rows named by (seed, sample, position).

    Philox4x32-10 with key = the seed's low and high 32 bits and counter = (id // 4, position, sample, 0); id takes
    word id % 4. A word x gives u = (x + 1/2) 2^-32, at most 1 - 2^-24, and noise = -log(-log1p(-u)): u is finest near
    0, which is the Gumbel tail that decides a pick.

    Source: Salmon et al. 2011, Parallel random numbers: as easy as 1, 2, 3.
    """
    blocks = torch.arange(-(-num_ids // 4), dtype=torch.int64, device=device)
    rows = []
    for seed, sample, position in seeds:
        words = _philox(blocks, position & WORD, sample & WORD, seed & WORD, (seed >> 32) & WORD)
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
