"""What the network can do before it has learned anything: copy from its context.

Text, and code above all, is full of repeats. Finding out how to look back by descent takes a large part of a short
training, so some heads of the linear layers start with work to do, which training then adapts like any other weight:
heads that recall what followed the current token when it last stood in the text, and, in the first layer, heads that
tell which tokens stand before it, from which attention can learn to look for the same places (Olsson et al. 2022,
In-context Learning and Induction Heads). If all heads recalled, nothing would know a token's predecessor, and attention
would not learn it.
"""

import torch

from tiny_training.config import TinyConfig
from tiny_training.network import GatedDeltaNet, Network, draw_dt_bias

OPEN_GATE = 0.8
OUTPUT_SCALE = 2.0
RECALL_SCALE = 0.25
RECALL_LOG_RATES = (-7.5, -4.0)
"""Natural logarithms of the decay per token, from 1/1800 to 1/55: repeats are hundreds of tokens apart."""
FORGETTING_DT_BIAS = 5.0  # all but the current row
PREDECESSOR_STD = 0.004


@torch.no_grad()
def start_as_copier(network: Network, seed: int) -> None:
    """Overwrite random weights, so that repeated text is likely text to the untrained network."""
    generator = torch.Generator().manual_seed(seed)
    embedding = network.model.embed_tokens.weight
    # a channel that is the same for all tokens, for gates to hold on to
    embedding[:, 0] = 2 * embedding.std()
    for norm in (network.model.norm, network.mtp.norm):
        # embeddings start small, and a recall should show in the logits
        norm.weight.fill_(OUTPUT_SCALE - 1.0)
    linear = [layer.linear_attn for layer in network.model.layers if layer.is_linear]
    for index, gdn in enumerate(linear):
        gdn.in_proj_z.weight[:, 0] = OPEN_GATE
        recall_successors(gdn, network.config, index % 2, generator)
    tell_predecessors(linear[0], network.config, generator)


def recall_successors(
    gdn: GatedDeltaNet, config: TinyConfig, behind: int, generator: torch.Generator
) -> None:
    """Let the last half of the heads map each token to its successor in the state, and write what the current one finds.

    Queries and keys share a projection, and the convolution shifts keys by one token. With `behind` = 1 they match pairs
    of tokens.
    """
    key_dim, size = config.key_dim, config.linear_key_head_dim
    keys_from = (config.linear_num_key_heads // 2) * size
    values_from = (config.linear_num_value_heads // 2) * config.linear_value_head_dim
    queries, keys = slice(keys_from, key_dim), slice(key_dim + keys_from, 2 * key_dim)
    values = slice(2 * key_dim + values_from, None)
    rows, taps = gdn.in_proj_qkv.weight, gdn.conv1d.weight[:, 0]
    rows[keys] = rows[queries]
    for channels, newest in ((queries, -1), (keys, -2)):
        for tap in range(newest - behind, newest + 1):
            taps[channels, tap] += 1.0
    taps[values, -1] += 1.0
    gdn.out_proj.weight[:, values_from:] = RECALL_SCALE * rows[values].T
    draw_dt_bias(gdn.dt_bias[config.linear_num_value_heads // 2 :], RECALL_LOG_RATES, generator)


def tell_predecessors(gdn: GatedDeltaNet, config: TinyConfig, generator: torch.Generator) -> None:
    """Let the first two value heads write the token one back and the token two back, in directions of their own."""
    key_dim, key_size, size = config.key_dim, config.linear_key_head_dim, config.linear_value_head_dim
    rows, taps = gdn.in_proj_qkv.weight, gdn.conv1d.weight[:, 0]
    rows[key_dim : key_dim + key_size] = rows[:key_size]
    for start in (0, key_dim):  # key equals query: what is read is what was just written
        taps[start : start + key_size] = 0.0
        taps[start : start + key_size, -1] = 1.0
    gdn.dt_bias[:2] = FORGETTING_DT_BIAS
    for back in (1, 2):
        head = slice((back - 1) * size, back * size)
        channels = slice(2 * key_dim + head.start, 2 * key_dim + head.stop)
        taps[channels] = 0.0
        taps[channels, -1 - back] = 1.0
        gdn.out_proj.weight[:, head].normal_(0.0, PREDECESSOR_STD, generator=generator)
