"""Products of float32 matrices on the units that multiply bf16: an operand is a sum of bf16 tensors."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from metrale.kernels.launch import IS_INTERPRETED

NUM_PARTS = {torch.float32: 3, torch.bfloat16: 2}
"""bf16 parts of a float32 operand, by the dtype of the rows: all of its 24 bits, or the first 16 where rows have 8."""


def num_parts(dtype: torch.dtype) -> int:
    """Parts of a float32 operand beside rows of `dtype`; the interpreter multiplies float32 as it is."""
    return 1 if IS_INTERPRETED else NUM_PARTS[dtype]


@triton.jit
def dot(a, b, acc, IS_INTERPRETED: tl.constexpr):
    """acc + a @ b in float32. The interpreter's own product is a BLAS's, whose bits depend on where a row stands."""
    if IS_INTERPRETED:
        acc += tl.sum(a.to(tl.float32)[:, :, None] * b.to(tl.float32)[None, :, :], axis=1)
    else:
        acc = tl.dot(a, b, acc, input_precision="ieee")
    return acc


@triton.jit
def split(x, PARTS: tl.constexpr):
    """x as a sum of bf16 tensors, the largest first: of a float32, 2 hold 16 of its 24 bits and 3 all; 1: x itself.

    More parts than one of an infinity are NaN.
    """
    if PARTS == 1 or x.dtype == tl.bfloat16:
        return (x,)
    parts = ()
    for _ in tl.static_range(PARTS):
        part = x.to(tl.bfloat16)
        parts = parts + (part,)
        x = x - part.to(tl.float32)
    return parts


@triton.jit
def product(a, b, PARTS: tl.constexpr, IS_INTERPRETED: tl.constexpr):
    """a @ b in float32, of sums of at most PARTS bf16 tensors, on the units that multiply bf16; the largest product last.

    Products as small as what PARTS leave out of an operand are left out too.
    """
    total = tl.zeros((a[0].shape[0], b[0].shape[1]), dtype=tl.float32)
    for j in tl.static_range(len(b)):
        for i in tl.static_range(len(a)):
            if (len(b) - 1 - j) + (len(a) - 1 - i) < PARTS:
                total = dot(a[len(a) - 1 - i], b[len(b) - 1 - j], total, IS_INTERPRETED)
    return total


@triton.jit
def transposed(parts):
    """Every part transposed."""
    flipped = ()
    for i in tl.static_range(len(parts)):
        flipped = flipped + (tl.trans(parts[i]),)
    return flipped


@triton.jit
def load_parts(p_parts, mask, stride, PARTS: tl.constexpr):
    """What `store_parts` wrote, in parts; 0 where `mask` does not hold."""
    parts = ()
    for i in tl.static_range(PARTS):
        parts = parts + (tl.load(p_parts + i * stride, mask=mask, other=0.0),)
    return parts


@triton.jit
def store_parts(p_parts, x, mask, stride, PARTS: tl.constexpr):
    """The parts of a float32 x: the first at `p_parts`, each `stride` elements (int64) after the one before."""
    parts = split(x, PARTS)
    for i in tl.static_range(PARTS):
        tl.store(p_parts + i * stride, parts[i], mask=mask)


@triton.jit
def keep_order(PARTS: tl.constexpr):
    """Where 3 parts of every operand fill the registers, what is loaded after here is not loaded before."""
    if PARTS > 2:
        tl.debug_barrier()
