"""Log-probabilities of a row: what the model itself thought, before any processing of the logits."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Logprob(NamedTuple):
    """`rank` is 1 + the number of ids with a strictly greater logit: tied ids share it. Natural log."""

    logprob: float
    rank: int


def token_logprobs(row: Tensor, token_id: int, num_top: int) -> dict[int, Logprob]:
    """Log-softmax of one row at the emitted token and at the `num_top` highest ids.

    | tensor | shape | dtype | dir | meaning |
    | --- | --- | --- | --- | --- |
    | row | [V] | float32 | in | raw logits over the valid ids alone |

    `token_id` (0 to V - 1) comes first in the result, then the top ids by falling logit, the lower id first
    on a tie; an emitted token among them is not repeated. More than V top ids give V. The row is reduced
    alone, so that its bits do not depend on other rows. Where ids have +inf they share all of the probability.
    """
    certain = row == torch.inf
    scores = torch.where(certain, 0.0, -torch.inf) if certain.any() else row
    scores = scores.log_softmax(dim=-1)
    rank = 1 + int((row > row[token_id]).sum())
    entries = {token_id: Logprob(float(scores[token_id]), rank)}
    num_top = min(num_top, row.shape[0])
    if not num_top:
        return entries
    # topk leaves the order of ties open, so that it only finds the lowest value of interest
    threshold = row.topk(num_top).values[-1]
    candidates = (row >= threshold).nonzero().flatten()  # ascending ids
    values = row[candidates]
    order = values.argsort(descending=True, stable=True)[:num_top]
    ids = candidates[order]
    rank, previous = 1, None
    for place, (top_id, value, logprob) in enumerate(
        zip(ids.tolist(), values[order].tolist(), scores[ids].tolist(), strict=True), start=1
    ):
        rank = rank if value == previous else place
        previous = value
        entries.setdefault(top_id, Logprob(logprob, rank))
    return entries
