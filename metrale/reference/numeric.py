"""Element-wise functions whose bits do not depend on how many elements stand beside one another.

`torch.sigmoid`, `silu` and `softplus` round differently in their vector body and their scalar tail, so they are
written with `exp` and `log1p`, which do not.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x), float32."""
    return 1.0 / (1.0 + torch.exp(-x))


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x), float32."""
    return x / (1.0 + torch.exp(-x))


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x), float32, without overflow."""
    return torch.log1p(torch.exp(-x.abs())) + x.clamp(min=0.0)
