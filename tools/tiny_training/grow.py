"""From a shallow network to a deep one that computes the same, so that half of the training costs half as much."""

import torch

from tiny_training.network import OUTPUTS, Network


@torch.no_grad()
def grow(shallow: Network, deep: Network) -> None:
    """Fill `deep` from `shallow`: its layers in turn, over and over; all but the first round write nothing yet.

    Source: Gong et al. 2019, Efficient Training of BERT by Progressively Stacking, with the new layers' output
    projections at zero so that the function stays what it was.
    """
    deep.mtp.load_state_dict(shallow.mtp.state_dict())
    deep.model.embed_tokens.load_state_dict(shallow.model.embed_tokens.state_dict())
    deep.model.norm.load_state_dict(shallow.model.norm.state_dict())
    depth = len(shallow.model.layers)
    for index, layer in enumerate(deep.model.layers):
        layer.load_state_dict(shallow.model.layers[index % depth].state_dict())
        if index >= depth:
            for name, parameter in layer.named_parameters():
                if name.endswith(OUTPUTS):
                    parameter.zero_()
