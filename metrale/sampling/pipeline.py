"""From logits to tokens: the one documented order of stages, for the target's picks and for a drafter's.

Stages of a row: vocabulary bound, temperature, top-k, top-p, min-p, Gumbel noise, argmax with the lowest id
on a tie. Each is skipped where it is neutral. Every id equal to a threshold is kept. Reductions run over one
row alone, so that a row's bits never depend on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from metrale.kernels.ops import Ops
from metrale.kernels.picks import Truncation
from metrale.sampling.logprobs import Logprob, token_logprobs
from metrale.sampling.params import SamplingParams

NOTHING_CUT = Truncation(top_k=0, top_p=1.0, min_p=0.0)


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
    if all(row.params.temperature == 0.0 for row in rows):
        picks = ops.masked_argmax(logits, num_valid)
        return [int(token_id) for token_id in picks.token_ids.tolist()]
    # a tensor, since division by a Python number may become a product with the reciprocal
    temperatures = torch.tensor(
        [row.params.temperature for row in rows], dtype=torch.float32, device=logits.device
    )
    truncations = [Truncation(row.params.top_k, row.params.top_p, row.params.min_p) for row in rows]
    thresholds = None
    if any(truncation != NOTHING_CUT for truncation in truncations):
        thresholds = ops.thresholds(logits, num_valid, temperatures, truncations)
    noise = [(seed, sample, position) for _, seed, sample, position in rows]
    picks = ops.masked_argmax(
        logits, num_valid, temperatures=temperatures, thresholds=thresholds, noise=noise
    )
    return [int(token_id) for token_id in picks.token_ids.tolist()]
