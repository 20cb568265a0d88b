"""`masked_argmax` in Triton: the pick of a row in one read of its logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from metrale.kernels.gumbel import noise_of
from metrale.kernels.launch import ceil_div, check, describe, kernel, launch, next_power_of_2
from metrale.kernels.picks import Picks, check_picks, noise_words

BLOCK_IDS = 4096
NUM_WARPS = 8
NO_ID = tl.constexpr(2**31 - 1)
WORD_BITS = tl.constexpr(32)


@triton.jit
def allowed_logits(
    rows, first, VOCAB: tl.constexpr, HAS_BITMASK: tl.constexpr, NUM_HELD: tl.constexpr, BLOCK: tl.constexpr
):
    """(ids, logits, logits with -inf where an id is masked, held or none) of a block; a NaN is never hidden.

    `rows` is (logits, bitmask, held ids, the row, ids that exist, words of a mask).
    """
    logits_ptr, bitmask_ptr, held_ids_ptr, row, num_valid, num_words = rows
    ids = first + tl.arange(0, BLOCK)
    p_logits = logits_ptr + row * VOCAB + ids
    if first + BLOCK <= num_valid:  # no mask, and so 16 bytes a lane: num_valid is a multiple of nothing
        raw = tl.load(p_logits)
    else:
        raw = tl.load(p_logits, mask=ids < num_valid, other=float("-inf"))
    is_out = ids < 0
    if HAS_BITMASK:
        at = first // WORD_BITS + tl.arange(0, BLOCK // WORD_BITS)
        words = tl.load(bitmask_ptr + row * num_words + at, mask=at < num_words, other=0)
        bits = (words[:, None] >> tl.arange(0, WORD_BITS)[None, :]) & 1
        is_out = is_out | (tl.reshape(bits, (BLOCK,)) == 0)
    for i in tl.static_range(NUM_HELD):
        is_out = is_out | (ids == tl.load(held_ids_ptr + row * NUM_HELD + i))
    return ids, raw, tl.where(is_out & (raw == raw), float("-inf"), raw)


@triton.jit
def _highest(values, ids):
    """The highest value and, of its ids, the lowest."""
    value = tl.max(values, axis=0)
    return value, tl.min(tl.where(values == value, ids, NO_ID), axis=0)


@triton.jit
def _above(x, base):
    """x - base, 0 where they are one infinity."""
    return tl.where(x == base, 0.0, x - base)


@kernel(
    sizes=["num_valid", "num_words", "num_blocks"],
    indices=["bitmask_ptr", "held_ids_ptr", "temperatures_ptr", "thresholds_ptr", "words_ptr"],
)
def _block_argmax_kernel(
    logits_ptr,
    bitmask_ptr,
    held_ids_ptr,
    temperatures_ptr,
    thresholds_ptr,
    words_ptr,
    value_ptr,
    id_ptr,
    stats_ptr,  # [M, blocks, 2]: highest raw logit, sum of exponentials
    num_valid,
    num_words,
    num_blocks,
    VOCAB: tl.constexpr,
    HAS_BITMASK: tl.constexpr,
    NUM_HELD: tl.constexpr,
    HAS_TEMPERATURES: tl.constexpr,
    HAS_THRESHOLDS: tl.constexpr,
    HAS_NOISE: tl.constexpr,
    HAS_LOGPROBS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    i_block = tl.program_id(1)
    first = i_block * BLOCK
    rows = (logits_ptr, bitmask_ptr, held_ids_ptr, row, num_valid, num_words)
    ids, raw, x = allowed_logits(rows, first, VOCAB, HAS_BITMASK, NUM_HELD, BLOCK)
    if HAS_TEMPERATURES:
        temperature = tl.load(temperatures_ptr + row)
        if temperature > 0.0:
            x = tl.div_rn(x, tl.zeros((BLOCK,), dtype=tl.float32) + temperature)
            if HAS_THRESHOLDS:
                x = tl.where(x < tl.load(thresholds_ptr + row), float("-inf"), x)
            if HAS_NOISE:
                x += noise_of(words_ptr + 4 * row, first, BLOCK)
    is_nan = tl.max((x != x).to(tl.int32), axis=0)
    value, token = _highest(tl.where(x != x, float("-inf"), x), ids)
    at = row * num_blocks + i_block
    # a NaN makes the whole row invalid: no number is above +inf, so an impossible id tells it
    tl.store(value_ptr + at, value)
    tl.store(id_ptr + at, tl.where(is_nan > 0, -1, token))
    if HAS_LOGPROBS:
        highest = tl.max(tl.where(raw != raw, float("-inf"), raw), axis=0)
        tl.store(stats_ptr + 2 * at, highest)
        tl.store(stats_ptr + 2 * at + 1, tl.sum(tl.exp(_above(raw, highest)), axis=0))


@kernel(sizes=["num_blocks"], indices=["value_ptr", "id_ptr"])
def _row_argmax_kernel(
    value_ptr,
    id_ptr,
    stats_ptr,
    logits_ptr,
    out_ptr,
    logprob_ptr,
    num_blocks,
    VOCAB: tl.constexpr,
    HAS_LOGPROBS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    mask = offs < num_blocks
    value = tl.load(value_ptr + row * num_blocks + offs, mask=mask, other=float("-inf"))
    token = tl.load(id_ptr + row * num_blocks + offs, mask=mask, other=NO_ID)
    is_invalid = tl.min(token, axis=0) < 0
    value, token = _highest(value, token)
    is_invalid |= value == float("-inf")
    tl.store(out_ptr + row, tl.where(is_invalid, -1, token).to(tl.int64))
    if HAS_LOGPROBS:
        at = 2 * (row * num_blocks + offs)
        highest = tl.load(stats_ptr + at, mask=mask, other=float("-inf"))
        total = tl.load(stats_ptr + at + 1, mask=mask, other=0.0)
        base = tl.max(highest, axis=0)
        total = tl.sum(total * tl.exp(_above(highest, base)), axis=0)
        picked = tl.load(logits_ptr + row * VOCAB + tl.where(is_invalid, 0, token))
        logprob = _above(picked, base) - tl.log(total)
        tl.store(logprob_ptr + row, tl.where(is_invalid, float("nan"), logprob))


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
    """The highest-scoring id of each row, the lowest id on a tie: two launches.

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

    Masked, held and dropped ids are read all the same; ids at and past num_valid are not.

    Requires: contiguous 16-byte aligned logits; contiguous masks and held ids; 1 <= num_valid <= V. Source: the Gumbel-max trick (Gumbel 1954).
    """
    check("masked_argmax", "logits", logits, (None, None), torch.float32)
    check_picks("masked_argmax", logits, num_valid, bitmask, held_ids, temperatures, thresholds, noise)
    check_contiguous(
        "masked_argmax",
        bitmask=bitmask,
        held_ids=held_ids,
        temperatures=temperatures,
        thresholds=thresholds,
    )
    num_rows, vocab = logits.shape
    words = None if noise is None else noise_words(noise, logits.device)
    num_blocks = ceil_div(num_valid, BLOCK_IDS)
    values = logits.new_empty(num_rows * num_blocks)
    block_ids = logits.new_empty(num_rows * num_blocks, dtype=torch.int32)
    stats = logits.new_empty(2 * num_rows * num_blocks if with_logprobs else 0)
    token_ids = logits.new_empty(num_rows, dtype=torch.int64)
    logprobs = logits.new_empty(num_rows) if with_logprobs else None
    launch(
        _block_argmax_kernel,
        (num_rows, num_blocks),
        logits,
        *(logits if t is None else t for t in (bitmask, held_ids, temperatures, thresholds, words)),
        values,
        block_ids,
        stats,
        num_valid,
        0 if bitmask is None else bitmask.shape[1],
        num_blocks,
        VOCAB=vocab,
        HAS_BITMASK=bitmask is not None,
        NUM_HELD=0 if held_ids is None else held_ids.shape[1],
        HAS_TEMPERATURES=temperatures is not None,
        HAS_THRESHOLDS=thresholds is not None,
        HAS_NOISE=noise is not None,
        HAS_LOGPROBS=with_logprobs,
        BLOCK=BLOCK_IDS,
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,
    )
    launch(
        _row_argmax_kernel,
        (num_rows,),
        values,
        block_ids,
        stats,
        logits,
        token_ids,
        logits if logprobs is None else logprobs,
        num_blocks,
        VOCAB=vocab,
        HAS_LOGPROBS=with_logprobs,
        BLOCK=next_power_of_2(ceil_div(vocab, BLOCK_IDS)),
        num_warps=1,
        enable_fp_fusion=False,
    )
    return Picks(token_ids, logprobs)


def check_contiguous(operator: str, **tensors: Tensor | None) -> None:
    """Raise ValueError where a tensor that goes with the rows does not lie as the kernels read it."""
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(f"{operator}: {name}: expected contiguous rows, got {describe(tensor)}")
