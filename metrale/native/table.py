"""The table of the `cpu` backend."""

from __future__ import annotations

import torch

from metrale.kernels.ops import Ops
from metrale.native.attention import attention_prefill, attention_verify
from metrale.native.build import library
from metrale.native.conv import MOST_TAPS, conv_prefill, conv_verify
from metrale.native.gdn import MOST_KEY_DIM, gdn_chunk, gdn_verify
from metrale.native.linear import linear
from metrale.native.moe import moe
from metrale.native.norms import gated_rms_norm, rms_norm
from metrale.native.pick import masked_argmax
from metrale.native.rotary import rotary_store
from metrale.reference.pick import thresholds


def ops() -> Ops:
    """The C kernels. Raises ConfigError where they cannot be compiled."""
    library()
    return Ops(
        name="cpu",
        activation_dtypes=(torch.float32,),
        keeps_weight_dtype=True,
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
        max_key_dim=MOST_KEY_DIM,
        max_conv_width=MOST_TAPS,
    )
