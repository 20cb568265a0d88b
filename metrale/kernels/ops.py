"""Ops: the table of operators that a backend hands to a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from metrale.kernels.picks import Picks


def whole_head(key_dim: int, value_dim: int) -> int:
    """`num_tiles` of operators that fold a head's state at once."""
    return 1


@dataclass(frozen=True)
class Ops:
    """One backend's operators. The function of the same name in `metrale.reference` is the definition of each.

    `name` is the backend's public name. `activation_dtypes` lists the activation dtypes that the operators
    compute in, the default first. `keeps_weight_dtype` says whether the big matrices stay in the dtype in which they are
    stored, instead of the activation dtype. `max_key_dim` and `max_conv_width` bound the Gated DeltaNet layers that it can
    run, None: any. `num_tiles(dk, dv)` is how many parts of a head's state keep a `num_folded` of their own. `device_type` is
    where the tensors must lie. A row's bits never depend on which rows stand beside it.
    """

    name: str
    activation_dtypes: tuple[torch.dtype, ...]
    keeps_weight_dtype: bool
    linear: Callable[..., Tensor]
    rms_norm: Callable[..., Tensor]
    gated_rms_norm: Callable[..., Tensor]
    conv_verify: Callable[..., tuple[Tensor, Tensor, Tensor]]
    conv_prefill: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]
    gdn_verify: Callable[..., Tensor]
    gdn_chunk: Callable[..., Tensor]
    rotary_store: Callable[..., Tensor]
    attention_verify: Callable[..., Tensor]
    attention_prefill: Callable[..., Tensor]
    moe: Callable[..., Tensor]
    masked_argmax: Callable[..., Picks]
    thresholds: Callable[..., Tensor]
    max_key_dim: int | None = None
    max_conv_width: int | None = None
    num_tiles: Callable[[int, int], int] = whole_head
    device_type: str = "cpu"
