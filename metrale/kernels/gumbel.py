"""`gumbel` in Triton: the counter-based noise of a pick."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from metrale.kernels.launch import ceil_div, kernel, launch
from metrale.kernels.picks import noise_words

BLOCK_IDS = 1024
NUM_WARPS = 4


@triton.jit
def _log1p(x):
    # Kahan's: the quotient mends the rounding of 1 + x
    total = 1.0 + x
    is_small = total == 1.0
    return tl.where(is_small, x, tl.log(total) * (x / tl.where(is_small, 1.0, total - 1.0)))


@triton.jit
def noise_of(p_words, first_id, BLOCK: tl.constexpr):
    """Gumbel noise float32 [BLOCK] of the ids from `first_id`, a multiple of 4, of the row named by the words there."""
    c0 = (first_id // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    c1 = tl.zeros((BLOCK // 4,), dtype=tl.uint32) + tl.load(p_words + 3).to(tl.uint32)
    c2 = tl.zeros((BLOCK // 4,), dtype=tl.uint32) + tl.load(p_words + 2).to(tl.uint32)
    c3 = tl.zeros((BLOCK // 4,), dtype=tl.uint32)
    k0 = tl.load(p_words).to(tl.uint32)
    k1 = tl.load(p_words + 1).to(tl.uint32)
    for _ in tl.static_range(10):
        high0, low0 = tl.umulhi(c0, 0xD2511F53), c0 * 0xD2511F53
        high1, low1 = tl.umulhi(c2, 0xCD9E8D57), c2 * 0xCD9E8D57
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    words = tl.join(tl.join(c0, c2), tl.join(c1, c3))  # [BLOCK // 4, 2, 2]: word 2 i + j
    words = tl.reshape(words, (BLOCK,))
    # words are rounded to 24 bits only where they are that long: finest near 0, the tail that decides a pick
    u = tl.minimum((words.to(tl.float64) + 0.5) * 2.3283064365386963e-10, 1.0).to(tl.float32)
    u = tl.minimum(u, 0.99999994)
    return -tl.log(-_log1p(-u))


@kernel(sizes=["num_ids"], indices=["words_ptr", "out_ptr"])
def _gumbel_kernel(words_ptr, out_ptr, num_ids, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    ids = first + tl.arange(0, BLOCK)
    tl.store(out_ptr + row * num_ids + ids, noise_of(words_ptr + 4 * row, first, BLOCK), mask=ids < num_ids)


def gumbel(seeds: Sequence[tuple[int, int, int]], num_ids: int, device: torch.device | None = None) -> Tensor:
    """Standard Gumbel noise, float32 [M, num_ids], for M rows named by (seed, sample, position): what `masked_argmax` adds.

    Philox4x32-10 with key = the seed's low and high 32 bits and counter = (id // 4, position, sample, 0); id takes
    word id % 4. A word x gives u = (x + 1/2) 2^-32, at most 1 - 2^-24, and noise = -log(-log1p(-u)): u is finest near
    0, which is the Gumbel tail that decides a pick.

    Source: Salmon et al. 2011, Parallel random numbers: as easy as 1, 2, 3.
    """
    out = torch.empty(len(seeds), num_ids, dtype=torch.float32, device=device)
    launch(
        _gumbel_kernel,
        (len(seeds), ceil_div(num_ids, BLOCK_IDS)),
        noise_words(seeds, device),
        out,
        num_ids,
        BLOCK=BLOCK_IDS,
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,
    )
    return out
