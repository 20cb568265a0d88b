"""`rms_norm` and `gated_rms_norm` as C kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from metrale.native.build import Kernel
from metrale.native.checks import describe, new_rows, refuse, refuse_tensors

_rms_norm = Kernel("rms_norm", "qqqqdq")
_gated_rms_norm = Kernel("gated_rms_norm", "qqqqqqqdq")


def rms_norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * scale over the last dimension.

    | tensor | shape | dtype | dir | meaning |
    | --- | --- | --- | --- | --- |
    | x | [T, D] | float32 | in | |
    | scale | [D] | float32 | in | already 1 + w where the checkpoint stores w centred on 0 |
    | result | [T, D] | float32 | out | |

    Requires: contiguous tensors. Source: Zhang and Sennrich 2019, Root Mean Square Layer Normalization.
    """
    num_rows, width = x.shape
    if (
        scale.shape != (width,)
        or x.dtype is not torch.float32
        or scale.dtype is not torch.float32
        or not (x.is_contiguous() and scale.is_contiguous())
    ):
        raise refuse_tensors("rms_norm", x=x, scale=scale)
    out = new_rows(num_rows, width)
    arguments = _rms_norm.pack(x.data_ptr(), scale.data_ptr(), num_rows, width, eps, out.data_ptr())
    if status := _rms_norm.run(arguments):
        raise _rms_norm.fail(status)
    return out


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm per value head, then weight, then SiLU of the gate (norm before gate).

    | tensor | shape | dtype | dir | meaning |
    | --- | --- | --- | --- | --- |
    | x | [T, Hv, dv] | float32 | in | recurrence output |
    | gate | [T, Hv, dv] | float32 | in | the projection's z; the row stride is free |
    | weight | [dv] | float32 | in | plain weight (ones at init) |
    | result | [T, Hv, dv] | float32 | out | |

    Requires: x and weight contiguous, gate contiguous within a row.
    Source: Yang et al. 2024, Gated Delta Networks, section 3.4.
    """
    num_rows, num_heads, dim = x.shape
    if (
        weight.shape != (dim,)
        or x.dtype is not torch.float32
        or weight.dtype is not torch.float32
        or not (x.is_contiguous() and weight.is_contiguous())
    ):
        raise refuse_tensors("gated_rms_norm", x=x, weight=weight)
    gate_stride, *inner = gate.stride()
    if (
        gate.shape != x.shape
        or gate.dtype is not torch.float32
        or (inner != [dim, 1] and not gate.is_contiguous())
    ):
        raise refuse(
            "gated_rms_norm", "gate", f"float32 {tuple(x.shape)}, contiguous in a row", describe(gate)
        )
    out = new_rows(num_rows, num_heads, dim)
    arguments = _gated_rms_norm.pack(
        x.data_ptr(),
        gate.data_ptr(),
        gate_stride,
        weight.data_ptr(),
        num_rows,
        num_heads,
        dim,
        eps,
        out.data_ptr(),
    )
    if status := _gated_rms_norm.run(arguments):
        raise _gated_rms_norm.fail(status)
    return out
