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
    operator: str,
    logits: Tensor,
    num_valid: int,
    bitmask: Tensor | None,
    held_ids: Tensor | None,
    temperatures: Tensor | None,
    thresholds: Tensor | None = None,
    noise: Sequence[tuple[int, int, int]] | None = None,
) -> None:
    """Raise ValueError for bounds, and for what goes with the rows of logits [M, V] and does not fit them."""
    if logits.ndim != 2:
        raise ValueError(f"{operator}: logits: expected [M, V], got {list(logits.shape)}")
    num_rows, vocab = logits.shape
    if not 1 <= num_valid <= vocab:
        raise ValueError(f"{operator}: num_valid: expected 1 to {vocab}, got {num_valid}")
    num_words = -(-num_valid // WORD_BITS)
    for name, tensor, dtype, least in (
        ("bitmask", bitmask, torch.int32, (num_rows, num_words)),
        ("held_ids", held_ids, torch.int32, (num_rows, 0)),
        ("temperatures", temperatures, torch.float32, (num_rows,)),
        ("thresholds", thresholds, torch.float32, (num_rows,)),
    ):
        if tensor is None:
            continue
        is_fit = tensor.ndim == len(least) and tensor.shape[0] == num_rows and tensor.shape[-1] >= least[-1]
        if not is_fit or tensor.dtype is not dtype:
            sizes = ", ".join(map(str, least)) + (" or more" if len(least) > 1 else "")
            kind, found = (str(d).removeprefix("torch.") for d in (dtype, tensor.dtype))
            raise ValueError(
                f"{operator}: {name}: expected {kind} [{sizes}], got {found} {list(tensor.shape)}"
            )
    if temperatures is None and (thresholds is not None or noise is not None):
        raise ValueError(f"{operator}: temperatures: expected as thresholds or noise were given, got None")
    if noise is not None and len(noise) != num_rows:
        raise ValueError(f"{operator}: noise: expected {num_rows} triples, got {len(noise)}")


def check_truncations(operator: str, truncations: Sequence[Truncation], num_rows: int) -> None:
    """Raise ValueError unless every row has its truncation, and every number of it is in range."""
    if len(truncations) != num_rows:
        raise ValueError(f"{operator}: truncations: expected {num_rows}, got {len(truncations)}")
    for top_k, top_p, min_p in truncations:
        if not (top_k >= 0 and 0.0 < top_p <= 1.0 and 0.0 <= min_p <= 1.0):
            raise ValueError(
                f"{operator}: truncations: expected top_k from 0, top_p in (0, 1] and min_p in [0, 1], "
                f"got {top_k}, {top_p}, {min_p}"
            )
