"""What a pick is made of besides logits: its result, the names of its noise, its truncation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

WORD = 0xFFFFFFFF
WORD_BITS = 32


class Picks(NamedTuple):
    """`token_ids` [M] int64, -1 where a row has no valid pick; `logprobs` [M] float32 where they were asked for."""

    token_ids: Tensor
    logprobs: Tensor | None


class Truncation(NamedTuple):
    """How a row's distribution is cut: `top_k` 0, `top_p` 1 and `min_p` 0 cut nothing."""

    top_k: int
    top_p: float
    min_p: float


def noise_words(seeds: Sequence[tuple[int, int, int]], device: torch.device | None) -> Tensor:
    """(seed, sample, position) triples as 32-bit words (key low, key high, sample, position), int64 [M, 4]."""
    words = [
        (seed & WORD, (seed >> WORD_BITS) & WORD, sample & WORD, position & WORD)
        for seed, sample, position in seeds
    ]
    return torch.tensor(words, dtype=torch.int64, device=device).view(-1, 4)


def check_picks(
    operator: str, logits: Tensor, num_valid: int, bitmask: Tensor | None, held_ids: Tensor | None
) -> None:
    """Raise ValueError for bounds, masks and held ids that do not fit the logits [M, V]."""
    num_rows, vocab = logits.shape
    if not 1 <= num_valid <= vocab:
        raise ValueError(f"{operator}: num_valid: expected 1 to {vocab}, got {num_valid}")
    num_words = -(-num_valid // WORD_BITS)
    if bitmask is not None and (
        bitmask.dtype is not torch.int32 or bitmask.shape[0] != num_rows or bitmask.shape[1] < num_words
    ):
        raise ValueError(
            f"{operator}: bitmask: expected int32 [{num_rows}, {num_words} or more], "
            f"got {bitmask.dtype} {list(bitmask.shape)}"
        )
    if held_ids is not None and (held_ids.dtype is not torch.int32 or held_ids.shape[0] != num_rows):
        raise ValueError(
            f"{operator}: held_ids: expected int32 [{num_rows}, *], got {held_ids.dtype} {list(held_ids.shape)}"
        )
