"""`rms_norm` in Triton: a program norms the rows that its registers hold."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from metrale.kernels.launch import ceil_div, check, kernel, launch, next_power_of_2

TILE = 16384
"""Elements of a program's tile, 64 a thread: several rows share one read of the scales."""
NUM_WARPS = 8


@kernel(sizes=["num_rows"])
def _rms_norm_kernel(
    x_ptr, scale_ptr, out_ptr, num_rows, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    offs = tl.arange(0, BLOCK)
    mask = (rows < num_rows)[:, None] & (offs < SIZE)[None, :]
    at = rows[:, None] * SIZE + offs[None, :]
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    scale = tl.load(scale_ptr + offs, mask=offs < SIZE, other=0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / SIZE + eps)
    out = x * inverse[:, None] * scale[None, :]
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=mask)


def rms_norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * scale over the last dimension, in float32, rounded once.

    | tensor | shape | dtype | dir | meaning |
    | --- | --- | --- | --- | --- |
    | x | [T, D] | float32, bfloat16 | in | |
    | scale | [D] | float32 | in | already 1 + w where the checkpoint stores w centred on 0 |
    | result | [T, D] | as x | out | |

    Requires: contiguous 16-byte aligned tensors; D up to 65536.
    Source: Zhang and Sennrich 2019, Root Mean Square Layer Normalization (arXiv:1910.07467).
    """
    check("rms_norm", "x", x, (None, None), torch.float32, torch.bfloat16)
    size = x.shape[1]
    check("rms_norm", "scale", scale, (size,), torch.float32)
    out = torch.empty_like(x)
    block = next_power_of_2(size)
    rows = min(16, max(1, TILE // block))
    launch(
        _rms_norm_kernel,
        (ceil_div(x.shape[0], rows),),
        x,
        scale,
        out,
        x.shape[0],
        eps,
        SIZE=size,
        BLOCK=block,
        ROWS=rows,
        num_warps=NUM_WARPS,
        enable_fp_fusion=True,
    )
    return out
