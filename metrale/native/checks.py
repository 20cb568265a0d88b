"""The refusals that launchers share: operator, argument, expected, got."""

from __future__ import annotations

import torch
from torch import Tensor


def refuse(operator: str, argument: str, expected: str, got: object) -> ValueError:
    return ValueError(f"{operator}: {argument}: expected {expected}, got {got}")


def refuse_tensors(operator: str, **tensors: Tensor) -> ValueError:
    """The refusal of the first tensor that is not contiguous float32, for launchers that found one to be wrong."""
    for name, tensor in tensors.items():
        if tensor.dtype is not torch.float32 or not tensor.is_contiguous():
            return refuse(operator, name, "contiguous float32", describe(tensor))
    return refuse(operator, ", ".join(tensors), "matching shapes", [tuple(t.shape) for t in tensors.values()])


def describe(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()}"
