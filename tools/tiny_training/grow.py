"""From a shallow network to a deep one that computes almost the same, so that half of the training costs half as much.

The new layers come first and write nothing yet, but for two: the first tells every token which two tokens stand before it, and
the new attention layer looks for the places whose predecessors are the current token, or the current pair of tokens. What
it finds there it may learn to use; finding this pattern of attention by descent takes longer than the whole training.

Sources: Gong et al. 2019, Efficient Training of BERT by Progressively Stacking; Olsson et al. 2022, In-context Learning
and Induction Heads.
"""

import re

import torch
from torch import Tensor

from tiny_training.config import TinyConfig
from tiny_training.network import Attention, GatedDeltaNet, Network, rms_norm

LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
NEUTRAL_AT_ZERO = (
    "out_proj.weight",
    "o_proj.weight",
    "down_proj.weight",
    "layernorm.weight",
    "q_norm.weight",
    "k_norm.weight",
)

VALUE_STD = 0.5  # small enough for SiLU to be nearly linear
GATE = 2.0
FORGETTING_DT_BIAS = 5.0  # all but the current row
PREDECESSOR_SHARE = 0.12  # of an embedding's length
SHARPNESS = 0.9
UNUSED_STD = 0.002


@torch.no_grad()
def grow(shallow: Network, deep: Network, seed: int) -> None:
    """Fill `deep` from `shallow`: the last layers are the shallow ones, the layers before copies that write nothing."""
    depth = len(shallow.model.layers)
    first_kept = len(deep.model.layers) - depth
    source = dict(shallow.named_parameters())
    for name, parameter in deep.named_parameters():
        match = LAYER.fullmatch(name)
        if match is None:
            parameter.copy_(source[name])
            continue
        index, rest = int(match[1]), match[2]
        if index < first_kept and rest.endswith(NEUTRAL_AT_ZERO):
            parameter.zero_()
        else:
            parameter.copy_(source[f"model.layers.{index % depth}.{rest}"])
    if first_kept:
        attention_at = deep.config.layer_types.index("full_attention")
        layers = deep.model.layers
        tokens = Embeddings(deep, seed)
        tell_predecessors(layers[0].linear_attn, deep.config, tokens)
        attend_to_successors(layers[attention_at].self_attn, deep.config, tokens)


class Embeddings:
    """Directions in the residual stream, found from trained embeddings as the layers read them (after their norm).

    identity [size, H]: a projection that tells tokens apart. constant [H]: a functional that is about 1 for every token.
    free [2, H, size]: orthonormal directions that embeddings use least. length: of the mean embedding row, unnormed.
    """

    def __init__(self, network: Network, seed: int) -> None:
        config = network.config
        raw = network.model.embed_tokens.weight.detach()
        rows = rms_norm(raw, torch.zeros(config.hidden_size), config.rms_norm_eps)
        width, size = config.hidden_size, config.linear_value_head_dim
        ridge = 1e-3 * len(rows) * torch.eye(width)
        self.constant = torch.linalg.solve(rows.T @ rows + ridge, rows.sum(0))
        centred = rows - rows.mean(0)
        values, vectors = torch.linalg.eigh(centred.T @ centred / len(rows))  # rising
        self.free = torch.stack((vectors[:, :size], vectors[:, size : 2 * size]))
        generator = torch.Generator().manual_seed(seed)
        used = vectors[:, 2 * size :] / values[2 * size :].sqrt()
        mixed = torch.randn(size, used.shape[1], generator=generator) * used.shape[1] ** -0.5
        self.identity = VALUE_STD * mixed @ used.T
        self.length = raw.norm(dim=1).mean()


def tell_predecessors(gdn: GatedDeltaNet, config: TinyConfig, tokens: Embeddings) -> None:
    """Let the first two value heads write the token one back, and the token two back, into the free directions."""
    key_dim, key_size, size = config.key_dim, config.linear_key_head_dim, config.linear_value_head_dim
    taps = gdn.conv1d.weight[:, 0]
    rows = gdn.in_proj_qkv.weight
    for start in (0, key_dim):  # key equals query: what is read is what was just written
        rows[start : start + key_size] = tokens.identity[:1]
        taps[start : start + key_size] = 0.0
        taps[start : start + key_size, -1] = 1.0
    gdn.dt_bias[:2] = FORGETTING_DT_BIAS
    gdn.A_log[:2] = 0.0
    gdn.in_proj_a.weight[:2] = 0.0
    gdn.in_proj_b.weight[:2] = 0.0
    gdn.norm.weight.fill_(1.0)
    gdn.in_proj_z.weight[: 2 * size] = GATE * tokens.constant
    scale = PREDECESSOR_SHARE * tokens.length / size**0.5
    for back in (1, 2):
        head = slice((back - 1) * size, back * size)
        channels = slice(2 * key_dim + head.start, 2 * key_dim + head.stop)
        rows[channels] = tokens.identity
        taps[channels] = 0.0
        taps[channels, -1 - back] = 1.0
        gdn.out_proj.weight[:, head] = scale * tokens.free[back - 1]


def attend_to_successors(attention: Attention, config: TinyConfig, tokens: Embeddings) -> None:
    """Match the current token with predecessors (the first half of the heads), or the current pair with pairs.

    Only channels that do not turn with the position take part.
    """
    turning, size = config.rotary_dim, config.head_dim - config.rotary_dim
    size = min(size, config.linear_value_head_dim)
    place = slice(turning, turning + size)
    current = tokens.identity[:size]
    one_back, two_back = (part.T[:size] for part in tokens.free)
    half = size // 2

    def pair(first: Tensor, second: Tensor) -> Tensor:
        """The same channels of both, at equal lengths."""
        return torch.cat((first[:half] / first.norm(), second[:half] / second.norm()))

    generator = torch.Generator().manual_seed(0)
    for projection in (attention.q_proj, attention.k_proj):
        projection.weight.normal_(0.0, UNUSED_STD, generator=generator)
    group = config.num_attention_heads // config.num_key_value_heads
    queries = attention.q_proj.weight.view(config.num_attention_heads, 2, config.head_dim, -1)
    keys = attention.k_proj.weight.view(config.num_key_value_heads, config.head_dim, -1)
    for head in range(config.num_attention_heads):
        is_pair = head // group >= config.num_key_value_heads // 2
        if is_pair:
            width = slice(turning, turning + 2 * half)
            queries[head, 0, width] = pair(current, one_back)
            keys[head // group, width] = pair(one_back, two_back)
        else:
            queries[head, 0, place] = current
            keys[head // group, place] = one_back
    attention.q_norm.weight.fill_(SHARPNESS)
    attention.k_norm.weight.fill_(SHARPNESS)
