"""From logits to tokens: the one documented order of stages, for the target's picks and for a drafter's.

Stages of a row: vocabulary bound, temperature, top-k, top-p, min-p, Gumbel noise, argmax with the lowest id
on a tie. Each is skipped where it is neutral. Every id equal to a threshold is kept. Reductions run over one
row alone, so that a row's bits never depend on the rows beside it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from metrale.kernels.ops import Ops
from metrale.sampling.logprobs import Logprob, token_logprobs
from metrale.sampling.params import SamplingParams

NUCLEUS_WIDTH = 256
"""Top-p orders this many of the highest ids first, and 16 times more while their mass falls short."""
SUM_BLOCK = 4096


class PickRow(NamedTuple):
    """Who picks. (seed, sample, position) name the row's noise; `position` is where the token will stand."""

    params: SamplingParams
    seed: int
    sample: int
    position: int


class Pick(NamedTuple):
    """`token_id` is -1 where a row offers no valid pick; `logprobs` is None there, and where nobody asked for them."""

    token_id: int
    logprobs: dict[int, Logprob] | None


def pick(logits: Tensor, rows: Sequence[PickRow], ops: Ops, num_valid: int) -> list[Pick]:
    """The target's token of each row: argmax(processed logits / T + Gumbel(seed, sample, position, id)).

    | tensor | shape | dtype | dir | meaning |
    | --- | --- | --- | --- | --- |
    | logits | [M, V] | float32 | in | raw logits, one row a member of `rows` |

    Ids at and past `num_valid` do not exist. A row that holds NaN or only -inf among the valid ids gives -1
    and no logprobs. +inf counts as certain: greedy or not, the lowest id that has it is picked.

    Requires: as many rows as `rows` has; ValueError otherwise. Source: the Gumbel-max trick (Gumbel 1954);
    top-p: Holtzman et al. 2020, The curious case of neural text degeneration.
    """
    token_ids = choose(logits, rows, ops, num_valid)
    picks = []
    for index, (token_id, row) in enumerate(zip(token_ids, rows, strict=True)):
        num_top = row.params.logprobs
        if num_top is None or token_id < 0:
            picks.append(Pick(token_id, None))
        else:
            picks.append(Pick(token_id, token_logprobs(logits[index, :num_valid], token_id, num_top)))
    return picks


def choose(logits: Tensor, rows: Sequence[PickRow], ops: Ops, num_valid: int) -> list[int]:
    """The token alone of each row, -1 where there is none. Arguments and arithmetic of `pick`.

    A drafter chooses with the target's noise at the same positions, so as to agree with it often.
    """
    if logits.shape[0] != len(rows):
        raise ValueError(f"choose: logits have {logits.shape[0]} rows, expected {len(rows)}")
    sampled = [index for index, row in enumerate(rows) if row.params.temperature > 0.0]
    if not sampled:
        return _argmax(logits, ops, num_valid)
    if len(sampled) == len(rows):
        return _argmax(_noisy_scores(logits, rows, ops, num_valid), ops, num_valid)
    token_ids = _argmax(logits, ops, num_valid)
    scores = _noisy_scores(logits[sampled], [rows[index] for index in sampled], ops, num_valid)
    for index, token_id in zip(sampled, _argmax(scores, ops, num_valid), strict=True):
        token_ids[index] = token_id
    return token_ids


def _argmax(scores: Tensor, ops: Ops, num_valid: int) -> list[int]:
    token_ids: list[int] = ops.masked_argmax(scores, num_valid).tolist()
    return token_ids


def _noisy_scores(logits: Tensor, rows: Sequence[PickRow], ops: Ops, num_valid: int) -> Tensor:
    """Processed logits plus noise, [M, num_valid] float32, of rows that all sample."""
    # a tensor, since division by a Python number may become a product with the reciprocal
    temperatures = torch.tensor(
        [[row.params.temperature] for row in rows], dtype=torch.float32, device=logits.device
    )  # [M, 1]
    scaled = logits[:, :num_valid] / temperatures
    for index, (params, *_) in enumerate(rows):
        if params.top_k or params.top_p < 1.0 or params.min_p:
            _truncate_(scaled[index], params)
    noise = ops.gumbel(
        [(seed, sample, position) for _, seed, sample, position in rows], num_valid, logits.device
    )
    return scaled.add_(noise)


def _truncate_(row: Tensor, params: SamplingParams) -> None:
    """Set the scaled logits [V] of one row to -inf, in place, at every id that top-k, top-p or min-p drops.

    NaN compares false with everything: a row that holds it loses no NaN, and is found invalid by the argmax.
    """
    if 0 < params.top_k < row.shape[0]:
        _drop_below_(row, row.topk(params.top_k).values[-1])
    if params.top_p < 1.0:
        _drop_below_(row, _nucleus_threshold(row, params.top_p))
    if params.min_p:
        _drop_below_(row, row.amax() + math.log(params.min_p))


def _drop_below_(row: Tensor, threshold: Tensor) -> None:
    row.masked_fill_(row < threshold, -torch.inf)


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
