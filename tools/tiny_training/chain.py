"""The head unrolled: every position of a text is the root of its own chain of drafts, all chains at once."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tiny_training.network import Network, Sizes, attention_inputs, repeat_heads, rms_norm


def chain_attention(
    q: Tensor, roots: tuple[Tensor, Tensor], own: list[tuple[Tensor, Tensor]], sizes: Sizes
) -> Tensor:
    """Attention of one chain step: the root keys at and before the own root, then the chain's own later keys.

    q [B, heads, R, d]; roots and each entry of own are (k, v), [B, heads, R, d]. Returns [B, heads, R, d].
    """
    if not own:
        return F.scaled_dot_product_attention(q, *roots, is_causal=True)
    length = q.shape[2]
    scale = sizes.head_dim**-0.5
    future = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    scores = ((q * scale) @ roots[0].mT).masked_fill(future, float("-inf"))
    own_scores = [(q * key).sum(-1, keepdim=True) * scale for key, _ in own]
    weights = torch.cat([scores, *own_scores], dim=-1).softmax(dim=-1)
    out = weights[..., :length] @ roots[1]
    for index, (_, value) in enumerate(own):
        out = out + weights[..., length + index, None] * value
    return out


def unroll(network: Network, hidden: Tensor, ids: Tensor, depth: int) -> list[Tensor]:
    """Head outputs [B, R, H] of steps 0 .. depth-1 for the roots 0 .. R-1.

    hidden [B, R, H] is the trunk's; ids [B, at least R + depth] is the text. Step s of root t has read the text up to
    token t + 1 + s, stands at rope position t + s, and drafts token t + 2 + s.
    """
    length = hidden.shape[1]
    layer, sizes = network.mtp.layers[0], network.sizes
    repeats = sizes.num_heads // sizes.num_kv_heads
    roots: tuple[Tensor, Tensor] | None = None
    own: list[tuple[Tensor, Tensor]] = []
    outputs = []
    for step in range(depth):
        x = network.head_input(hidden, ids[:, 1 + step : 1 + step + length])
        rope = network.rope.at(step, length)
        q, k, v, gate = attention_inputs(x, *layer.attention_weights(), rope, sizes)
        pair = (repeat_heads(k, repeats), repeat_heads(v, repeats))
        if roots is None:
            roots = pair
        else:
            own.append(pair)
        out = chain_attention(q, roots, own, sizes).transpose(1, 2).flatten(2)
        x = x + F.linear(out * gate.sigmoid(), layer.self_attn.o_proj.weight)
        x = network.operators.mlp_block(x, *layer.mlp_weights(), sizes)
        hidden = rms_norm(x, network.mtp.norm.weight, sizes.eps)
        outputs.append(hidden)
    return outputs
