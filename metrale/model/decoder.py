"""The hybrid decoder: Gated DeltaNet layers with full attention every few layers."""

from __future__ import annotations

import torch
from torch import Tensor

from metrale.kernels.ops import Ops
from metrale.model.attention import RotaryTables, attention_mixer, rotary_tables
from metrale.model.batch import Batch
from metrale.model.config import ModelConfig
from metrale.model.gdn import gdn_mixer
from metrale.model.layers import GdnWeights, LayerWeights, TrunkWeights
from metrale.model.mlp import mlp
from metrale.state.pool import Pool


class HybridModel:
    """The target model. It holds weights and tables only; every sequence's state lives in the pool.

    Args:
        config: the model's shape.
        weights: its tensors, all on one device.
        ops: the backend's operators.
        max_positions: length of the rotary tables, the longest sequence in tokens.
        activation_dtype: dtype of the hidden rows; None: the first that the operators list.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: TrunkWeights,
        ops: Ops,
        max_positions: int,
        activation_dtype: torch.dtype | None = None,
    ) -> None:
        self.config = config
        self.weights = weights
        self.ops = ops
        self.activation_dtype = ops.activation_dtypes[0] if activation_dtype is None else activation_dtype
        self.device = weights.embed.device
        self.rotary = rotary_tables(config, max_positions, self.device)
        # The pool numbers the layers of each kind on their own.
        numbers = {i: n for kind in (config.gdn_layers, config.attention_layers) for n, i in enumerate(kind)}
        self._layers = tuple((layer, numbers[i]) for i, layer in enumerate(weights.layers))

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embeddings [T, D] in the activation dtype of token ids [T] int64."""
        return self.weights.embed.index_select(0, token_ids).to(self.activation_dtype)

    def forward(self, batch: Batch, pool: Pool) -> Tensor:
        """Hidden rows [T, D] after the final norm.

        Writes the rings and KV rows of the batch; generated rows leave the logical state as it was, prompt
        rows advance the recurrent state. T = 0 is an empty result.
        """
        with torch.inference_mode():
            x = self.embed(batch.token_ids)
            if batch.num_rows == 0:
                return x
            for layer, index in self._layers:
                x = decoder_layer(x, layer, self.config, self.ops, batch, pool, index, self.rotary)
            return self.ops.rms_norm(x, self.weights.norm, self.config.rms_norm_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits [M, V] of hidden rows [M, D], always in the generated-row class.

        A row's bits are the same whichever class computed its hidden row.
        """
        with torch.inference_mode():
            return self.ops.linear(hidden, self.weights.lm_head, hidden.shape[0]).float()


def decoder_layer(
    x: Tensor,
    layer: LayerWeights,
    config: ModelConfig,
    ops: Ops,
    batch: Batch,
    pool: Pool,
    index: int,
    rotary: RotaryTables,
) -> Tensor:
    """The residual stream [T, D] after one layer; `index` numbers the pool's layers of the mixer's kind."""
    eps = config.rms_norm_eps
    if isinstance(layer.mixer, GdnWeights):
        x = gdn_mixer(x, layer.input_norm, layer.mixer, ops, batch, pool, index, eps)
    else:
        x = attention_mixer(x, layer.input_norm, layer.mixer, ops, batch, pool, index, rotary, eps)
    top_k, norm_topk = config.num_experts_per_tok, config.norm_topk_prob
    return mlp(x, layer.post_norm, layer.mlp, ops, batch.num_generated, top_k, norm_topk, eps)
