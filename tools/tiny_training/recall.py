"""A loss that shows attention where to look: at what followed the current token when it last stood in the text.

Attention of that kind (induction heads: Olsson et al. 2022) is much of what a small model of code gains from its context,
but it forms late by descent alone: nothing rewards half of it. Once it has formed, the text's own loss keeps it.
"""

import torch
from torch import Tensor

from tiny_training.network import Layer, Rope, Sizes, attention_inputs, repeat_heads


def recall_loss(layer: Layer, x: Tensor, ids: Tensor, rope: Rope, sizes: Sizes) -> Tensor:
    """Mean of -log(attention mass on the right places), over heads and the rows that have one.

    x [B, T, H] enters the attention layer, ids [B, T] is the text. A right place for row i is any j <= i whose
    forerunner is token i; for the second half of the heads, token i - 1 and the one before it must be equal as well.
    """
    q, k, _, _ = attention_inputs(x, *layer.attention_weights(), rope, sizes)
    k = repeat_heads(k, sizes.num_heads // sizes.num_kv_heads)
    scores = q @ k.mT * sizes.head_dim**-0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
    scores = scores.masked_fill(future, float("-inf"))
    before = torch.cat((torch.full_like(ids[:, :1], -1), ids[:, :-1]), dim=1)
    single = (ids[:, :, None] == before[:, None, :]) & ~future
    earlier = torch.cat((torch.full_like(ids[:, :1], -2), before[:, :-1]), dim=1)
    pair = single & (before[:, :, None] == earlier[:, None, :])
    half = sizes.num_heads // 2
    losses = []
    for right, part in ((single, scores[:, :half]), (pair, scores[:, half:])):
        found = part.masked_fill(~right[:, None], float("-inf")).logsumexp(-1)
        missed = part.logsumexp(-1) - found
        losses.append(missed[right.any(-1)[:, None].expand_as(missed)])
    return torch.cat(losses).mean()
