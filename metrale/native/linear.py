"""`linear` as a C kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from metrale.native.build import Kernel
from metrale.native.checks import describe, new_rows, refuse

_kernel = Kernel("linear", "q" * 9 + "d" + "q" * 4)


def linear(
    x: Tensor,
    weight: Tensor,
    num_generated: int,
    residual: Tensor | None = None,
    silu_mul: bool = False,
    norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """y = norm(x) W^T, plus an optional epilogue.

    | tensor | shape | dtype | dir | meaning |
    | --- | --- | --- | --- | --- |
    | x | [T, K] | float32 | in | rows; the row stride may exceed K |
    | weight | [N, K] | float32, bfloat16 | in | read once for every 24 to 96 rows, widened on the way; with `silu_mul` [2 I, K]: gate, up |
    | residual | [T, N] | float32 | in | added to the product |
    | norm | [K] or [G, K / G] | float32 | in | RMSNorm scales, one norm for each of a row's G parts, with `eps` |
    | result | [T, N] or [T, I] | float32 | out | |

    Both row classes share one arithmetic, so `num_generated` changes nothing: a dot product has an order of its own,
    fixed by K and the weight's dtype, and rows share no more than the loads of the weight. Outputs are shared out over
    `torch.get_num_threads()` threads, which changes no bit.

    Requires: `x.shape[1] == weight.shape[1]`, a contiguous weight and norm, no residual with `silu_mul`.
    """
    num_rows, inner = x.shape
    num_outputs, weight_inner = weight.shape
    row_stride, step = x.stride()
    if inner != weight_inner or not inner:
        raise refuse("linear", "x", f"{max(weight_inner, 1)} columns as the weight has", inner)
    if x.dtype is not torch.float32 or (step != 1 and inner != 1):
        raise refuse("linear", "x", "float32 with contiguous rows", describe(x))
    is_bf16 = weight.dtype is torch.bfloat16
    if not (is_bf16 or weight.dtype is torch.float32) or not weight.is_contiguous():
        raise refuse("linear", "weight", "contiguous float32 or bfloat16", describe(weight))
    width = num_outputs
    if silu_mul:
        width = num_outputs // 2
        if residual is not None or num_outputs % 2:
            raise refuse("linear", "silu_mul", "an even number of outputs and no residual", num_outputs)
    added = 0
    if residual is not None:
        if (
            residual.shape != (num_rows, width)
            or residual.dtype is not torch.float32
            or not residual.is_contiguous()
        ):
            raise refuse("linear", "residual", f"contiguous float32 {(num_rows, width)}", describe(residual))
        added = residual.data_ptr()
    scales, norm_groups = 0, 1
    if norm is not None:
        norm_groups = norm.shape[0] if norm.ndim == 2 else 1
        if norm.dtype is not torch.float32 or norm.numel() != inner or not norm.is_contiguous():
            raise refuse("linear", "norm", f"contiguous float32, {inner} scales", describe(norm))
        scales = norm.data_ptr()
    out = new_rows(num_rows, width)
    arguments = _kernel.pack(
        x.data_ptr(),
        row_stride,
        weight.data_ptr(),
        is_bf16,
        num_outputs,
        inner,
        num_rows,
        scales,
        norm_groups,
        eps,
        added,
        silu_mul,
        torch.get_num_threads(),
        out.data_ptr(),
    )
    if status := _kernel.run(arguments):
        raise _kernel.fail(status)
    return out
