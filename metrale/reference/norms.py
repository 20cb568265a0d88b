"""References of `rms_norm` and `gated_rms_norm`."""

from __future__ import annotations

import torch
from torch import Tensor

from metrale.reference.numeric import silu


def rms_norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * scale over the last dimension, in float32, rounded once.

    | tensor | shape | dtype | dir | meaning |
    | --- | --- | --- | --- | --- |
    | x | [T, D] | activation | in | |
    | scale | [D] | float32 | in | already 1 + w where the checkpoint stores w centred on 0 |
    | result | [T, D] | activation | out | |

    Source: Zhang and Sennrich 2019, Root Mean Square Layer Normalization.
    """
    x32 = x.float()
    inverse = torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return (x32 * inverse * scale).to(x.dtype)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm per value head, then weight, then SiLU of the gate (norm before gate).

    | tensor | shape | dtype | dir | meaning |
    | --- | --- | --- | --- | --- |
    | x | [T, Hv, dv] | activation | in | recurrence output |
    | gate | [T, Hv, dv] | activation | in | the projection's z; a strided view will do |
    | weight | [dv] | float32 | in | plain weight (ones at init) |
    | result | [T, Hv, dv] | activation | out | |

    The normalised value is rounded to the activation dtype before the weight, as the published models were trained.
    Source: Yang et al. 2024, Gated Delta Networks, section 3.4.
    """
    x32 = x.float()
    inverse = torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    normalised = (x32 * inverse).to(x.dtype).float()
    return (normalised * weight * silu(gate.float())).to(x.dtype)
