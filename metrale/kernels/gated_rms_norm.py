"""`gated_rms_norm` in Triton: one program for a tile of heads of one row."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from metrale.kernels.launch import (
    ALIGNMENT_BYTES,
    ceil_div,
    check,
    describe,
    kernel,
    launch,
    next_power_of_2,
    shape_of,
)

BLOCK_HEADS = 16
NUM_WARPS = 4


@kernel()
def _gated_rms_norm_kernel(
    x_ptr,
    gate_ptr,
    weight_ptr,
    out_ptr,
    eps,
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    GATE_STRIDE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    offs_d = tl.arange(0, BLOCK_DIM)
    mask_d = offs_d < DIM
    mask = (heads < NUM_HEADS)[:, None] & mask_d[None, :]
    offs = heads[:, None] * DIM + offs_d[None, :]
    x = tl.load(x_ptr + row * (NUM_HEADS * DIM) + offs, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * GATE_STRIDE + offs, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + offs_d, mask=mask_d, other=0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / DIM + eps)
    normed = (x * inverse[:, None]).to(x_ptr.dtype.element_ty).to(tl.float32)
    out = normed * weight[None, :] * (gate / (1.0 + tl.exp(-gate)))
    tl.store(out_ptr + row * (NUM_HEADS * DIM) + offs, out.to(out_ptr.dtype.element_ty), mask=mask)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm per value head, then weight, then SiLU of the gate (norm before gate).

    | tensor | shape | dtype | dir | meaning |
    | --- | --- | --- | --- | --- |
    | x | [T, Hv, dv] | float32, bfloat16 | in | recurrence output |
    | gate | [T, Hv, dv] | as x | in | the projection's z; rows may lie apart, their stride a property of the model, for one row too |
    | weight | [dv] | float32 | in | plain weight (ones at init) |
    | result | [T, Hv, dv] | as x | out | |

    The normalised value is rounded to the activation dtype before the weight, as the published models were trained.

    Requires: 16-byte aligned tensors, contiguous but for the rows of `gate`, which lies at one offset of such a tensor.
    Source: Yang et al. 2024, Gated Delta Networks (arXiv:2412.06464), section 3.4.
    """
    num_rows, num_heads, dim = shape_of("gated_rms_norm", "x", x, 3)
    check("gated_rms_norm", "x", x, (None, None, None), torch.float32, torch.bfloat16)
    check("gated_rms_norm", "weight", weight, (dim,), torch.float32)
    if gate.shape != x.shape or gate.dtype is not x.dtype or gate.stride()[1:] != (dim, 1):
        raise ValueError(f"gated_rms_norm: gate: expected rows like those of x, got {describe(gate)}")
    stride = gate.stride(0)
    is_aligned = stride * gate.element_size() % ALIGNMENT_BYTES == gate.data_ptr() % ALIGNMENT_BYTES == 0
    out = torch.empty_like(x)
    launch(
        _gated_rms_norm_kernel,
        (num_rows, ceil_div(num_heads, BLOCK_HEADS)),
        x,
        gate,
        weight,
        out,
        eps,
        NUM_HEADS=num_heads,
        DIM=dim,
        GATE_STRIDE=stride,
        is_aligned=is_aligned,
        BLOCK_HEADS=BLOCK_HEADS,
        BLOCK_DIM=next_power_of_2(dim),
        num_warps=NUM_WARPS,
        enable_fp_fusion=True,
    )
    return out
