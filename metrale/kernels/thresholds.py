"""`thresholds` in Triton: what top-k, top-p and min-p keep of a row."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from metrale.kernels.launch import check, kernel, launch
from metrale.kernels.masked_argmax import allowed_logits, check_contiguous
from metrale.kernels.picks import Truncation, check_picks, check_truncations

BLOCK_IDS = 2048
NUM_WARPS = 8
LEAST_TOP_P = torch.finfo(torch.float32).tiny
"""What is smaller would be 0 in float32, which every id reaches. The highest id alone has a mass of 1 or more."""


@triton.jit
def _pattern(x):
    """Unsigned integers in the order of the floats: -0.0 just below 0.0."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, ~bits, bits | -0x80000000).to(tl.uint32, bitcast=True)


@triton.jit
def _value(pattern):
    """The float of a pattern."""
    bits = pattern.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits & 0x7FFFFFFF, ~bits).to(tl.float32, bitcast=True)


@triton.jit
def _scaled(
    rows,
    first,
    divisor,
    VOCAB: tl.constexpr,
    HAS_BITMASK: tl.constexpr,
    NUM_HELD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """(which ids count, logits / temperature) of a block."""
    ids, _, x = allowed_logits(rows, first, VOCAB, HAS_BITMASK, NUM_HELD, BLOCK)
    x = tl.div_rn(x, divisor)
    return (ids < rows[4]) & (x == x), x


@triton.jit
def _mass(
    rows,
    divisor,
    threshold,
    top,
    lowest,
    unit,
    IS_COUNT: tl.constexpr,
    VOCAB: tl.constexpr,
    HAS_BITMASK: tl.constexpr,
    NUM_HELD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Mass (ids, with IS_COUNT) of the scores from `threshold` on whose pattern is at least `lowest` + 1, 2 and 3 `unit`."""
    one = tl.zeros((BLOCK,), dtype=tl.float32)
    two = tl.zeros((BLOCK,), dtype=tl.float32)
    three = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, rows[4], BLOCK):
        is_in, x = _scaled(rows, first, divisor, VOCAB, HAS_BITMASK, NUM_HELD, BLOCK)
        weight = tl.where(is_in & (x >= threshold), 1.0 if IS_COUNT else tl.exp(x - top), 0.0)
        pattern = _pattern(x)
        one += tl.where(pattern >= lowest + unit, weight, 0.0)
        two += tl.where(pattern >= lowest + unit + unit, weight, 0.0)
        three += tl.where(pattern >= lowest + unit + unit + unit, weight, 0.0)
    return tl.sum(one, axis=0), tl.sum(two, axis=0), tl.sum(three, axis=0)


@triton.jit
def _reached(
    rows,
    divisor,
    threshold,
    top,
    top_p,
    wanted,
    IS_COUNT: tl.constexpr,
    VOCAB: tl.constexpr,
    HAS_BITMASK: tl.constexpr,
    NUM_HELD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The highest score that `wanted` ids reach or, without IS_COUNT, that `top_p` of the mass from `threshold` on does."""
    found = tl.zeros((1,), dtype=tl.uint32)
    if IS_COUNT == 0:
        whole, _, _ = _mass(
            rows,
            divisor,
            threshold,
            top,
            found,
            found,
            IS_COUNT,
            VOCAB,
            HAS_BITMASK,
            NUM_HELD,
            BLOCK,
        )
        wanted = top_p * whole
    unit = tl.full((1,), 1 << 30, dtype=tl.uint32)
    for _ in range(16):
        one, two, three = _mass(
            rows,
            divisor,
            threshold,
            top,
            found,
            unit,
            IS_COUNT,
            VOCAB,
            HAS_BITMASK,
            NUM_HELD,
            BLOCK,
        )
        steps = (
            (one >= wanted).to(tl.uint32) + (two >= wanted).to(tl.uint32) + (three >= wanted).to(tl.uint32)
        )
        found += unit * steps
        unit = unit >> 2
    return tl.max(_value(found), axis=0)


@kernel(
    sizes=["num_valid", "num_words"],
    indices=["bitmask_ptr", "held_ids_ptr", "temperatures_ptr", "top_k_ptr", "cuts_ptr"],
)
def _thresholds_kernel(
    logits_ptr,
    bitmask_ptr,
    held_ids_ptr,
    temperatures_ptr,
    top_k_ptr,
    cuts_ptr,  # [M, 2]: top_p, log(min_p)
    out_ptr,
    num_valid,
    num_words,
    VOCAB: tl.constexpr,
    HAS_BITMASK: tl.constexpr,
    NUM_HELD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(cuts_ptr + 2 * row)
    min_p = tl.load(cuts_ptr + 2 * row + 1)
    divisor = tl.zeros((BLOCK,), dtype=tl.float32) + tl.where(temperature > 0.0, temperature, 1.0)
    rows = (logits_ptr, bitmask_ptr, held_ids_ptr, row, num_valid, num_words)
    threshold = float("-inf")
    if temperature > 0.0:
        highest = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
        for first in range(0, num_valid, BLOCK):
            is_in, x = _scaled(rows, first, divisor, VOCAB, HAS_BITMASK, NUM_HELD, BLOCK)
            highest = tl.maximum(highest, tl.where(is_in, x, float("-inf")))
        top = tl.max(highest, axis=0)
        if (top > float("-inf")) & (top < float("inf")):
            if (top_k > 0) & (top_k < num_valid):
                wanted = top_k.to(tl.float32)
                threshold = _reached(
                    rows, divisor, threshold, top, top_p, wanted, True, VOCAB, HAS_BITMASK, NUM_HELD, BLOCK
                )
            if top_p < 1.0:
                threshold = _reached(
                    rows, divisor, threshold, top, top_p, 0.0, False, VOCAB, HAS_BITMASK, NUM_HELD, BLOCK
                )
            if min_p > float("-inf"):
                threshold = tl.maximum(threshold, top + min_p)
    tl.store(out_ptr + row, threshold)


def thresholds(
    logits: Tensor,
    num_valid: int,
    temperatures: Tensor,
    truncations: Sequence[Truncation],
    bitmask: Tensor | None = None,
    held_ids: Tensor | None = None,
) -> Tensor:
    """The lowest logits / temperature that top-k, then top-p, then min-p keep, one a row: one launch.

    | tensor | shape | dtype | dir | meaning |
    | --- | --- | --- | --- | --- |
    | logits, num_valid, bitmask, held_ids, temperatures | | | in | as in `masked_argmax` |
    | truncations | M | | in | top_k, top_p, min_p of each row |
    | result | [M] | float32 | out | -inf where nothing is cut, the row is greedy or an id has +inf |

    Top-k keeps every id equal to the k-th highest. Top-p keeps the smallest falling prefix of what top-k left whose softmax
    mass is `top_p` or more, and every id equal to its last; min-p what has at least `min_p` of the highest probability.

    Both thresholds are found bit by bit from the top of the ordered bit pattern of a float, two bits a pass over the row:
    the highest pattern that enough ids (enough mass) reach. Masses are float32 sums of exponentials in a fixed order.

    Requires: contiguous 16-byte aligned logits; contiguous masks and held ids; as many truncations as rows. Source: Holtzman et al. 2020, The curious case of neural text degeneration
    (arXiv:1904.09751); Nguyen et al. 2024, min-p (arXiv:2407.01082).
    """
    check("thresholds", "logits", logits, (None, None), torch.float32)
    check_picks("thresholds", logits, num_valid, bitmask, held_ids, temperatures)
    check_contiguous("thresholds", bitmask=bitmask, held_ids=held_ids, temperatures=temperatures)
    num_rows, vocab = logits.shape
    check_truncations("thresholds", truncations, num_rows)
    top_k = torch.tensor([min(t.top_k, vocab) for t in truncations], dtype=torch.int32, device=logits.device)
    cuts = torch.tensor(
        [(max(t.top_p, LEAST_TOP_P), math.log(t.min_p) if t.min_p else -math.inf) for t in truncations],
        dtype=torch.float32,
        device=logits.device,
    )
    out = logits.new_empty(num_rows)
    launch(
        _thresholds_kernel,
        (num_rows,),
        logits,
        *(logits if t is None else t for t in (bitmask, held_ids)),
        temperatures,
        top_k,
        cuts,
        out,
        num_valid,
        0 if bitmask is None else bitmask.shape[1],
        VOCAB=vocab,
        HAS_BITMASK=bitmask is not None,
        NUM_HELD=0 if held_ids is None else held_ids.shape[1],
        BLOCK=BLOCK_IDS,
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,
    )
    return out
