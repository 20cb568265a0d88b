"""What the network can do before it has learned anything: copy from its context.

Text, and code above all, is full of repeats. Finding out how to look back by descent takes a large part of a short
training, so every GDN layer starts with a recall of what followed the current token when it last stood in the text,
written back as an embedding. Training then adapts it like any other weight.
"""

import torch

from tiny_training.config import TinyConfig
from tiny_training.network import GatedDeltaNet, Network

RECALL_SCALE = 0.25
OPEN_GATE = 0.8
OUTPUT_SCALE = 2.0
LOG_RATES = (-7.5, -4.0)
"""Natural logarithms of the decay per token, from 1/1800 to 1/55: repeats are hundreds of tokens apart."""


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
    for layer in network.model.layers:
        if layer.is_linear:
            gdn = layer.linear_attn
            gdn.in_proj_z.weight[:, 0] = OPEN_GATE
            rates = torch.empty_like(gdn.dt_bias).uniform_(*LOG_RATES, generator=generator).exp()
            gdn.dt_bias.copy_(torch.log(torch.expm1(rates)))  # the inverse softplus
            recall_successors(gdn, network.config)


def recall_successors(gdn: GatedDeltaNet, config: TinyConfig) -> None:
    """Map each token to its successor in the state, and write what the current token finds.

    Queries and keys share a projection, and the convolution shifts keys by one token. The second half of the key heads
    matches pairs of tokens.
    """
    key_dim, head_dim = config.key_dim, config.linear_key_head_dim
    gdn.in_proj_qkv.weight[key_dim : 2 * key_dim] = gdn.in_proj_qkv.weight[:key_dim]
    taps = gdn.conv1d.weight[:, 0]
    pairs_from = (config.linear_num_key_heads // 2) * head_dim
    taps[:key_dim, -1] += 1.0
    taps[pairs_from:key_dim, -2] += 1.0
    taps[key_dim : 2 * key_dim, -2] += 1.0
    taps[key_dim + pairs_from : 2 * key_dim, -3] += 1.0
    taps[2 * key_dim :, -1] += 1.0
    gdn.out_proj.weight.copy_(RECALL_SCALE * gdn.in_proj_qkv.weight[2 * key_dim :].T)
