"""`masked_argmax` and `gumbel` in Triton: the pick of a row, and its counter-based noise."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from metrale.kernels.launch import ceil_div, check, kernel, launch, next_power_of_2

BLOCK_IDS = 4096
ARGMAX_WARPS = 4
NOISE_IDS = 1024
NOISE_WARPS = 4
NO_ID = tl.constexpr(2**31 - 1)
WORD = 0xFFFFFFFF


@triton.jit
def _highest(values, ids):
    """The highest value and, of its ids, the lowest."""
    value = tl.max(values, axis=0)
    return value, tl.min(tl.where(values == value, ids, NO_ID), axis=0)


@kernel(sizes=["num_valid", "num_blocks"])
def _block_argmax_kernel(
    logits_ptr, value_ptr, id_ptr, num_valid, num_blocks, VOCAB: tl.constexpr, BLOCK: tl.constexpr
):
    i_block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    ids = i_block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + row * VOCAB + ids, mask=ids < num_valid, other=float("-inf"))
    is_nan = tl.max((x != x).to(tl.int32), axis=0)
    x = tl.where(x != x, float("-inf"), x)
    value, token = _highest(x, ids)
    # a NaN makes the whole row invalid: no number is above +inf, so an impossible id tells it
    tl.store(value_ptr + row * num_blocks + i_block, value)
    tl.store(id_ptr + row * num_blocks + i_block, tl.where(is_nan > 0, -1, token))


@kernel(sizes=["num_blocks"])
def _row_argmax_kernel(value_ptr, id_ptr, out_ptr, num_blocks, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    mask = offs < num_blocks
    value = tl.load(value_ptr + row * num_blocks + offs, mask=mask, other=float("-inf"))
    token = tl.load(id_ptr + row * num_blocks + offs, mask=mask, other=NO_ID)
    is_invalid = tl.min(token, axis=0) < 0
    value, token = _highest(value, token)
    is_invalid |= value == float("-inf")
    tl.store(out_ptr + row, tl.where(is_invalid, -1, token).to(tl.int64))


def masked_argmax(logits: Tensor, num_valid: int) -> Tensor:
    """The highest-scoring id of each row, the lowest id on a tie: two launches.

    | tensor | shape | dtype | dir | meaning |
    | --- | --- | --- | --- | --- |
    | logits | [M, V] | float32 | in | |
    | num_valid | int | | in | ids at and past it do not exist (padded columns) and are not read |
    | result | [M] | int64 | out | in [0, num_valid), or -1 where a valid id is NaN or all are -inf |

    Requires: a contiguous 16-byte aligned tensor; 1 <= num_valid <= V.
    """
    check("masked_argmax", "logits", logits, (None, None), torch.float32)
    num_rows, vocab = logits.shape
    if not 1 <= num_valid <= vocab:
        raise ValueError(f"masked_argmax: num_valid: expected 1 to {vocab}, got {num_valid}")
    num_blocks = ceil_div(num_valid, BLOCK_IDS)
    values = logits.new_empty(num_rows, num_blocks)
    token_ids = logits.new_empty(num_rows, num_blocks, dtype=torch.int32)
    out = logits.new_empty(num_rows, dtype=torch.int64)
    launch(
        _block_argmax_kernel,
        (num_blocks, num_rows),
        logits,
        values,
        token_ids,
        num_valid,
        num_blocks,
        VOCAB=vocab,
        BLOCK=BLOCK_IDS,
        num_warps=ARGMAX_WARPS,
        enable_fp_fusion=False,
    )
    launch(
        _row_argmax_kernel,
        (num_rows,),
        values,
        token_ids,
        out,
        num_blocks,
        BLOCK=next_power_of_2(ceil_div(vocab, BLOCK_IDS)),
        num_warps=1,
        enable_fp_fusion=False,
    )
    return out


@triton.jit
def _log1p(x):
    # Kahan's: the quotient mends the rounding of 1 + x
    total = 1.0 + x
    is_small = total == 1.0
    return tl.where(is_small, x, tl.log(total) * (x / tl.where(is_small, 1.0, total - 1.0)))


@kernel(sizes=["num_ids"], indices=["keys_ptr"])
def _gumbel_kernel(keys_ptr, out_ptr, num_ids, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    groups = tl.program_id(0) * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
    c0 = groups.to(tl.uint32)
    c1 = tl.zeros((BLOCK // 4,), dtype=tl.uint32) + tl.load(keys_ptr + 4 * row + 3).to(tl.uint32)
    c2 = tl.zeros((BLOCK // 4,), dtype=tl.uint32) + tl.load(keys_ptr + 4 * row + 2).to(tl.uint32)
    c3 = tl.zeros((BLOCK // 4,), dtype=tl.uint32)
    k0 = tl.load(keys_ptr + 4 * row).to(tl.uint32)
    k1 = tl.load(keys_ptr + 4 * row + 1).to(tl.uint32)
    for _ in tl.static_range(10):
        high0, low0 = tl.umulhi(c0, 0xD2511F53), c0 * 0xD2511F53
        high1, low1 = tl.umulhi(c2, 0xCD9E8D57), c2 * 0xCD9E8D57
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    words = tl.join(tl.join(c0, c2), tl.join(c1, c3))  # [BLOCK // 4, 2, 2]: word 2 i + j
    words = tl.reshape(words, (BLOCK,))
    ids = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    # words are rounded to 24 bits only where they are that long: finest near 0, the tail that decides a pick
    u = tl.minimum((words.to(tl.float64) + 0.5) * 2.3283064365386963e-10, 1.0).to(tl.float32)
    u = tl.minimum(u, 0.99999994)
    noise = -tl.log(-_log1p(-u))
    tl.store(out_ptr + row * num_ids + ids, noise, mask=ids < num_ids)


def gumbel(seeds: Sequence[tuple[int, int, int]], num_ids: int, device: torch.device | None = None) -> Tensor:
    """Standard Gumbel noise, float32 [M, num_ids], for M rows named by (seed, sample, position).

    Philox4x32-10 with key = the seed's low and high 32 bits and counter = (id // 4, position, sample, 0); id takes
    word id % 4. A word x gives u = (x + 1/2) 2^-32, at most 1 - 2^-24, and noise = -log(-log1p(-u)): u is finest near
    0, which is the Gumbel tail that decides a pick.

    Source: Salmon et al. 2011, Parallel random numbers: as easy as 1, 2, 3.
    """
    words = [
        (seed & WORD, (seed >> 32) & WORD, sample & WORD, position & WORD) for seed, sample, position in seeds
    ]
    out = torch.empty(len(words), num_ids, dtype=torch.float32, device=device)
    if words:
        keys = torch.tensor(words, dtype=torch.int64, device=device)
        launch(
            _gumbel_kernel,
            (ceil_div(num_ids, NOISE_IDS), len(words)),
            keys,
            out,
            num_ids,
            BLOCK=NOISE_IDS,
            num_warps=NOISE_WARPS,
            enable_fp_fusion=False,
        )
    return out
