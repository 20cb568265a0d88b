"""From a shallow network to a deep one that computes the same, so that half of the training costs half as much."""

import re

import torch

from tiny_training.network import Network

LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
OUTPUTS = ("out_proj.weight", "o_proj.weight", "down_proj.weight")


@torch.no_grad()
def grow(shallow: Network, deep: Network) -> None:
    """Fill `deep` from `shallow`: its layers in turn, over and over, of which all but the first round write nothing yet.

    Source: Gong et al. 2019, Efficient Training of BERT by Progressively Stacking, with the new layers' output
    projections at zero so that the function stays what it was.
    """
    depth = len(shallow.model.layers)
    source = dict(shallow.named_parameters())
    for name, parameter in deep.named_parameters():
        match = LAYER.fullmatch(name)
        if match is None:
            parameter.copy_(source[name])
            continue
        index, rest = int(match[1]), match[2]
        if index >= depth and rest.endswith(OUTPUTS):
            parameter.zero_()
        else:
            parameter.copy_(source[f"model.layers.{index % depth}.{rest}"])
