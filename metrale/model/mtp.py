"""The multi-token-prediction head: one decoder layer that drafts the token after the next."""

from __future__ import annotations

import torch
from torch import Tensor

from metrale.model.batch import Batch
from metrale.model.config import ModelConfig
from metrale.model.decoder import HybridModel, decoder_layer
from metrale.model.layers import MtpWeights
from metrale.state.pool import Pool


class MtpHead:
    """The MTP head of a trunk; it shares the trunk's embedding, output head and rotary tables.

    Its keys and values lie in the pool's attention layer `config.num_attention_layers`, one row a committed
    position: row t pairs the trunk's hidden row t (after the final norm) with token t + 1.
    """

    def __init__(self, config: ModelConfig, weights: MtpWeights, model: HybridModel) -> None:
        self.config = config
        self.weights = weights
        self.model = model
        self._layer_index = config.num_attention_layers  # after the trunk's

    def forward(self, token_ids: Tensor, hidden: Tensor, batch: Batch, pool: Pool) -> Tensor:
        """Hidden rows [T, D] after the head's norm, for `logits` and for the next step of a chain.

        Args:
            token_ids: [T] int64, the token after each row's position (not `batch.token_ids`).
            hidden: [T, D], the trunk's hidden rows after the final norm; in a chain the head's own output.
            batch: positions, KV places and row groups of the rows.
            pool: written at the head's own KV layer.

        Source: DeepSeek-V3 2024 (arXiv:2412.19437, section 2.2), with the embedding first and the hidden row
        after its norm.
        """
        weights, model, ops, eps = self.weights, self.model, self.model.ops, self.config.rms_norm_eps
        with torch.inference_mode():
            if hidden.shape[0] == 0:
                return hidden
            pair = torch.cat((model.embed(token_ids), hidden), dim=1)  # [T, 2D]
            x = ops.linear(pair, weights.fc, batch.num_generated, norm=weights.pair_norm, eps=eps)
            x = decoder_layer(
                x, weights.layer, self.config, ops, batch, pool, self._layer_index, model.rotary
            )
            return ops.rms_norm(x, weights.norm, eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 draft logits [M, V] of the head's hidden rows [M, D]."""
        return self.model.logits(hidden)
