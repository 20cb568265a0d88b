"""The operators in plain torch: the definition of each kernel, and the `torch` backend."""

from __future__ import annotations

import torch

from metrale.kernels.ops import Ops
from metrale.reference.accept import accept as accept
from metrale.reference.attention import attention_prefill, attention_verify, rotary_store
from metrale.reference.conv import conv_prefill, conv_verify
from metrale.reference.gdn import gdn_chunk, gdn_verify
from metrale.reference.linear import linear
from metrale.reference.moe import moe
from metrale.reference.norms import gated_rms_norm, rms_norm
from metrale.reference.pick import gumbel as gumbel
from metrale.reference.pick import masked_argmax, thresholds
from metrale.reference.state_copy import state_copy as state_copy


def ops() -> Ops:
    """The table of the `torch` backend."""
    return Ops(
        name="torch",
        activation_dtypes=(torch.float32, torch.bfloat16),
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
    )
