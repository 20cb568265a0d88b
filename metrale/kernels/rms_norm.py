"""`rms_norm` in Triton: one program a row."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from metrale.kernels.launch import check, kernel, launch, next_power_of_2


def num_warps_of(size: int) -> int:
    """Warps for a row of `size` elements: 16 elements a thread, one to eight warps."""
    return min(8, max(1, next_power_of_2(size) // 512))


@kernel()
def _rms_norm_kernel(x_ptr, scale_ptr, out_ptr, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    mask = offs < SIZE
    x = tl.load(x_ptr + row * SIZE + offs, mask=mask, other=0.0).to(tl.float32)
    scale = tl.load(scale_ptr + offs, mask=mask, other=0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / SIZE + eps)
    tl.store(out_ptr + row * SIZE + offs, (x * inverse * scale).to(out_ptr.dtype.element_ty), mask=mask)


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
    size = x.shape[-1]
    check("rms_norm", "x", x, (None, size), torch.float32, torch.bfloat16)
    check("rms_norm", "scale", scale, (size,), torch.float32)
    out = torch.empty_like(x)
    launch(
        _rms_norm_kernel,
        (x.shape[0],),
        x,
        scale,
        out,
        eps,
        SIZE=size,
        BLOCK=next_power_of_2(size),
        num_warps=num_warps_of(size),
        enable_fp_fusion=True,
    )
    return out
