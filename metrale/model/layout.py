"""Which tensors a checkpoint of a given config must hold, by name and shape.

Names are normalised: `model.` for the trunk (multimodal checkpoints store `model.language_model.`), `mtp.`
for the head.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container

from metrale.model.config import LINEAR, ModelConfig

Shapes = dict[str, tuple[int, ...]]

TRUNK_PREFIX = "model."
MULTIMODAL_PREFIX = "model.language_model."
MTP_PREFIX = "mtp."
MTP_LAYER = "mtp.layers.0"
LM_HEAD = "lm_head.weight"
EMBED = "model.embed_tokens.weight"

# The only tensors that are dropped unread: buffers that the config already determines, and the vision tower.
IGNORED = re.compile(r"(^|\.)rotary_emb\.inv_freq$")
IGNORED_IF_MULTIMODAL = re.compile(r"^model\.visual\.")


def renamer(config: ModelConfig) -> Callable[[str], str | None]:
    """From a stored name to the normalised one; None for a tensor on the ignore list."""

    def rename(name: str) -> str | None:
        if IGNORED.search(name) or (config.is_multimodal and IGNORED_IF_MULTIMODAL.match(name)):
            return None
        if name.startswith(MULTIMODAL_PREFIX):
            return TRUNK_PREFIX + name.removeprefix(MULTIMODAL_PREFIX)
        return name

    return rename


def trunk_shapes(config: ModelConfig, present: Container[str]) -> Shapes:
    """Tensors of the target. `present` tells which of the optional forms a checkpoint uses.

    A tied head may be stored too; the experts of a layer are stored fused or one by one.
    """
    width = config.hidden_size
    shapes: Shapes = {EMBED: (config.vocab_size, width), "model.norm.weight": (width,)}
    if not config.tie_word_embeddings or LM_HEAD in present:
        shapes[LM_HEAD] = (config.vocab_size, width)
    for i, kind in enumerate(config.layer_types):
        prefix = f"model.layers.{i}"
        mixer = _gdn_shapes(config, prefix) if kind == LINEAR else _attention_shapes(config, prefix)
        shapes |= (
            _norm_shapes(config, prefix) | mixer | _mlp_shapes(config, prefix, config.moe_layers[i], present)
        )
    return shapes


def mtp_shapes(config: ModelConfig, present: Container[str]) -> Shapes:
    """Tensors of the MTP head, whose layer has experts where the family has."""
    width = config.hidden_size
    return {
        "mtp.fc.weight": (width, 2 * width),
        "mtp.pre_fc_norm_embedding.weight": (width,),
        "mtp.pre_fc_norm_hidden.weight": (width,),
        "mtp.norm.weight": (width,),
        **_norm_shapes(config, MTP_LAYER),
        **_attention_shapes(config, MTP_LAYER),
        **_mlp_shapes(config, MTP_LAYER, config.is_moe, present),
    }


def _norm_shapes(config: ModelConfig, prefix: str) -> Shapes:
    return {
        f"{prefix}.input_layernorm.weight": (config.hidden_size,),
        f"{prefix}.post_attention_layernorm.weight": (config.hidden_size,),
    }


def _gdn_shapes(config: ModelConfig, prefix: str) -> Shapes:
    width, heads = config.hidden_size, config.linear_num_value_heads
    channels, values = config.num_conv_channels, config.value_width
    if config.family == "qwen3_next":
        projections: Shapes = {
            "in_proj_qkvz.weight": (channels + values, width),
            "in_proj_ba.weight": (2 * heads, width),
        }
    else:
        projections = {
            "in_proj_qkv.weight": (channels, width),
            "in_proj_z.weight": (values, width),
            "in_proj_b.weight": (heads, width),
            "in_proj_a.weight": (heads, width),
        }
    shapes: Shapes = {
        **projections,
        "conv1d.weight": (channels, 1, config.linear_conv_kernel_dim),
        "A_log": (heads,),
        "dt_bias": (heads,),
        "norm.weight": (config.linear_value_head_dim,),
        "out_proj.weight": (width, values),
    }
    return {f"{prefix}.linear_attn.{name}": shape for name, shape in shapes.items()}


def _attention_shapes(config: ModelConfig, prefix: str) -> Shapes:
    width, dim = config.hidden_size, config.head_dim
    queries, keys = config.num_attention_heads * dim, config.num_key_value_heads * dim
    shapes: Shapes = {
        "q_proj.weight": (2 * queries, width),
        "k_proj.weight": (keys, width),
        "v_proj.weight": (keys, width),
        "o_proj.weight": (width, queries),
        "q_norm.weight": (dim,),
        "k_norm.weight": (dim,),
    }
    return {f"{prefix}.self_attn.{name}": shape for name, shape in shapes.items()}


def _mlp_shapes(config: ModelConfig, prefix: str, is_moe: bool, present: Container[str]) -> Shapes:
    if not is_moe:
        return _dense_shapes(f"{prefix}.mlp", config.hidden_size, config.intermediate_size)
    width, inner, experts = config.hidden_size, config.moe_intermediate_size, config.num_experts
    shapes: Shapes = {
        f"{prefix}.mlp.gate.weight": (experts, width),
        f"{prefix}.mlp.shared_expert_gate.weight": (1, width),
        **_dense_shapes(f"{prefix}.mlp.shared_expert", width, config.shared_expert_intermediate_size),
    }
    if f"{prefix}.mlp.experts.gate_up_proj" in present:
        shapes[f"{prefix}.mlp.experts.gate_up_proj"] = (experts, 2 * inner, width)
        shapes[f"{prefix}.mlp.experts.down_proj"] = (experts, width, inner)
    else:
        for n in range(experts):
            shapes |= _dense_shapes(f"{prefix}.mlp.experts.{n}", width, inner)
    return shapes


def _dense_shapes(prefix: str, width: int, inner: int) -> Shapes:
    return {
        f"{prefix}.gate_proj.weight": (inner, width),
        f"{prefix}.up_proj.weight": (inner, width),
        f"{prefix}.down_proj.weight": (width, inner),
    }
