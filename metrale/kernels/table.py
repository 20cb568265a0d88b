"""The tables of the `triton` and `interpret` backends: one set of kernels, on a GPU or under Triton's interpreter."""

from __future__ import annotations

import torch

from metrale.errors import ConfigError
from metrale.kernels.attention_verify import attention_prefill, attention_verify
from metrale.kernels.conv_prefill import conv_prefill
from metrale.kernels.conv_verify import MAX_WIDTH, conv_verify
from metrale.kernels.gated_rms_norm import gated_rms_norm
from metrale.kernels.gdn_chunk import gdn_chunk
from metrale.kernels.gdn_verify import CONFIGS, gdn_verify, num_tiles
from metrale.kernels.launch import IS_INTERPRETED
from metrale.kernels.linear import linear
from metrale.kernels.masked_argmax import masked_argmax
from metrale.kernels.moe import moe
from metrale.kernels.ops import Ops
from metrale.kernels.rms_norm import rms_norm
from metrale.kernels.rotary_store import rotary_store
from metrale.kernels.thresholds import thresholds


def ops(name: str) -> Ops:
    """The kernels as backend "triton" or "interpret". Raises ConfigError where this process cannot run them so."""
    is_interpreted = name == "interpret"
    if is_interpreted and not IS_INTERPRETED:
        raise ConfigError(
            "backend 'interpret' needs TRITON_INTERPRET=1 in the environment before triton is imported"
        )
    if not is_interpreted and IS_INTERPRETED:
        raise ConfigError("backend 'triton' cannot compile where TRITON_INTERPRET is set; use 'interpret'")
    if not is_interpreted and not torch.cuda.is_available():
        raise ConfigError("backend 'triton' found no GPU; use 'cpu' or 'torch'")
    dtypes = (torch.float32, torch.bfloat16)
    return Ops(
        name=name,
        activation_dtypes=dtypes if is_interpreted else dtypes[::-1],
        keeps_weight_dtype=False,
        linear=linear,
        rms_norm=rms_norm,
        gated_rms_norm=gated_rms_norm,
        conv_verify=conv_verify,
        conv_prefill=conv_prefill,
        gdn_verify=gdn_verify,
        gdn_chunk=gdn_chunk,
        rotary_store=rotary_store,
        attention_verify=attention_verify,
        attention_prefill=attention_prefill,
        moe=moe,
        masked_argmax=masked_argmax,
        thresholds=thresholds,
        max_key_dim=max(CONFIGS),
        max_conv_width=MAX_WIDTH,
        num_tiles=num_tiles,
        device_type="cpu" if is_interpreted else "cuda",
    )
