"""`masked_argmax` and `gumbel` as C kernels."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from metrale.kernels.picks import WORD, Picks, check_picks
from metrale.native.build import Kernel
from metrale.native.checks import describe, new_rows, refuse
from metrale.reference.pick import pick_logprobs, processed

SEED_WORD = 0xFFFFFFFFFFFFFFFF

_masked_argmax = Kernel("masked_argmax", "qqqqq")
_gumbel = Kernel("gumbel", "qqqq")


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
    | logits | [M, V] | float32 | in | the row stride may exceed V |
    | num_valid | int | | in | ids at and past it do not exist (padded columns) |
    | bitmask | [M, V / 32] | int32 | in | bit i of word w allows id 32 w + i |
    | held_ids | [M, h] | int32 | in | ids that may not be picked (EOS before min_tokens); -1: none |
    | temperatures | [M] | float32 | in | 0: the row is greedy, and neither threshold nor noise touches it |
    | thresholds | [M] | float32 | in | from `thresholds`: logits / temperature below it are dropped |
    | noise | M triples | | in | (seed, sample, position) that name a row's Gumbel noise; needs temperatures |
    | result token_ids | [M] | int64 | out | in [0, num_valid), or -1 where a valid id is NaN or none is left |
    | result logprobs | [M] | float32 | out | with `with_logprobs`: log-softmax of the raw logits at the pick, else None |

    Score of an id: logits / temperature + noise. +inf counts as certain; ids that have it share all of the probability.
    All but the argmax itself and the noise is torch's.

    Requires: 1 <= num_valid <= V. Source: the Gumbel-max trick (Gumbel 1954).
    """
    check_picks("masked_argmax", logits, num_valid, bitmask, held_ids, temperatures, thresholds, noise)
    scores = logits
    if bitmask is not None or held_ids is not None or temperatures is not None:
        scores = processed(
            logits, num_valid, bitmask, held_ids, temperatures, thresholds, noise, gumbel
        ).contiguous()
    token_ids = _argmax(scores, num_valid)
    return Picks(token_ids, pick_logprobs(logits[:, :num_valid], token_ids) if with_logprobs else None)


def _argmax(scores: Tensor, num_valid: int) -> Tensor:
    num_rows, width = scores.shape
    row_stride, step = scores.stride()
    if scores.dtype is not torch.float32 or (step != 1 and width != 1):
        raise refuse("masked_argmax", "logits", "float32 with contiguous rows", describe(scores))
    out = torch.empty(num_rows, dtype=torch.int64, device="cpu")
    arguments = _masked_argmax.pack(scores.data_ptr(), num_rows, row_stride, num_valid, out.data_ptr())
    if status := _masked_argmax.run(arguments):
        raise _masked_argmax.fail(status)
    return out


def gumbel(seeds: Sequence[tuple[int, int, int]], num_ids: int, device: torch.device | None = None) -> Tensor:
    """Standard Gumbel noise, float32 [M, num_ids], for M rows named by (seed, sample, position).

    Philox4x32-10 with key = the seed's low and high 32 bits and counter = (id // 4, position, sample, 0); id takes
    word id % 4. A word x gives u = (x + 1/2) 2^-32, at most 1 - 2^-24, and noise = -log(-log1p(-u)): u is finest near
    0, which is the Gumbel tail that decides a pick. The words are exact; the noise is within a few ulp of the
    reference's, whose logarithms are others.

    Requires: num_ids >= 0; `device` is a CPU.
    Source: Salmon et al. 2011, Parallel random numbers: as easy as 1, 2, 3.
    """
    if num_ids < 0:
        raise refuse("gumbel", "num_ids", "at least 0", num_ids)
    if device is not None and device.type != "cpu":
        raise refuse("gumbel", "device", "a CPU", device)
    streams = array("Q")
    for seed, sample, position in seeds:
        streams.extend((seed & SEED_WORD, sample & WORD, position & WORD))
    out = new_rows(len(seeds), num_ids)
    if status := _gumbel.run(_gumbel.pack(streams.buffer_info()[0], len(seeds), num_ids, out.data_ptr())):
        raise _gumbel.fail(status)
    return out
