"""What a checkpoint's config.json says, validated once.

Knows the three families (`qwen3_5`, `qwen3_5_moe`, `qwen3_next`) and nothing of tensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metrale.errors import ConfigError
from metrale.state.pool import StateShape, ring_lengths

LINEAR = "linear_attention"
FULL = "full_attention"

# model_type -> family; a multimodal type wraps the text type in `text_config`
_TEXT_TYPES = {"qwen3_5_text": "qwen3_5", "qwen3_5_moe_text": "qwen3_5_moe", "qwen3_next": "qwen3_next"}
_MULTIMODAL_TYPES = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}

DEFAULT_PARTIAL_ROTARY_FACTOR = 0.25


@dataclass(frozen=True)
class ModelConfig:
    """A hybrid model's shape. Field names are those of config.json where both exist.

    `layer_types[i]` is "linear_attention" or "full_attention"; `moe_layers[i]` tells whether layer i's MLP is
    a mixture of experts. `num_mtp_layers` is None where config.json does not say: the tensors then decide.
    `rotary_dim` counts the leading dimensions of a head that are rotated.
    """

    family: str
    is_multimodal: bool
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layer_types: tuple[str, ...]
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    moe_layers: tuple[bool, ...]
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    norm_topk_prob: bool
    num_mtp_layers: int | None
    eos_token_ids: tuple[int, ...]

    @property
    def num_hidden_layers(self) -> int:
        return len(self.layer_types)

    @property
    def gdn_layers(self) -> tuple[int, ...]:
        """Layer indices of the Gated DeltaNet layers; the place in this tuple is the pool's layer index."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == LINEAR)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Layer indices of the full-attention layers; the place in this tuple is the pool's layer index."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == FULL)

    @property
    def num_gdn_layers(self) -> int:
        return len(self.gdn_layers)

    @property
    def num_attention_layers(self) -> int:
        return len(self.attention_layers)

    @property
    def is_moe(self) -> bool:
        return self.num_experts > 0

    @property
    def key_width(self) -> int:
        """Hk * dk."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_width(self) -> int:
        """Hv * dv."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def num_conv_channels(self) -> int:
        """C = 2 * Hk * dk + Hv * dv, the channels of the causal convolution."""
        return 2 * self.key_width + self.value_width

    def state_shape(self, *, with_mtp: bool = False) -> StateShape:
        """What a pool must know of the model.

        Args:
            with_mtp: add the key-value layer of the MTP head, which comes after the trunk's.
        """
        return StateShape(
            num_gdn_layers=self.num_gdn_layers,
            num_attention_layers=self.num_attention_layers + int(with_mtp),
            num_key_heads=self.linear_num_key_heads,
            num_value_heads=self.linear_num_value_heads,
            key_dim=self.linear_key_head_dim,
            value_dim=self.linear_value_head_dim,
            conv_width=self.linear_conv_kernel_dim,
            num_kv_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
        )

    def kv_bytes_per_token(self, *, itemsize: int, with_mtp: bool = False) -> int:
        """Bytes of keys and values that one token costs over all attention layers.

        Args:
            itemsize: bytes of one element of the cache.
            with_mtp: count the MTP head's layer too.
        """
        num_layers = self.num_attention_layers + int(with_mtp)
        return 2 * num_layers * self.num_key_value_heads * self.head_dim * itemsize

    def state_bytes_per_slot(self, *, itemsize: int, max_rows: int, fold_threshold: int = 0) -> int:
        """Bytes of recurrent state and rings that one sequence costs over all Gated DeltaNet layers.

        Args:
            itemsize: bytes of one activation element (`ring_k`, `ring_x`); all else is 4 bytes wide.
            max_rows, fold_threshold: as given to the pool; they set the rings' lengths.
        """
        ring, conv_ring = ring_lengths(self.linear_conv_kernel_dim, max_rows, fold_threshold)
        heads = self.linear_num_value_heads
        state = 4 * heads * (self.linear_value_head_dim * self.linear_key_head_dim + 1)  # ssm, num_folded
        ring_row = self.key_width * itemsize + 4 * (self.value_width + heads)
        return self.num_gdn_layers * (state + ring * ring_row + conv_ring * self.num_conv_channels * itemsize)

    @staticmethod
    def from_directory(directory: Path) -> ModelConfig:
        """The config of the checkpoint in `directory`; ConfigError where config.json is absent or bad."""
        return ModelConfig.from_dict(read_json(directory / "config.json"))

    @staticmethod
    def from_dict(raw: Mapping[str, Any]) -> ModelConfig:
        """The config that the parsed config.json `raw` describes. ConfigError names the field at fault."""
        outer, text = raw, raw
        model_type = raw.get("model_type")
        if model_type in _MULTIMODAL_TYPES:
            inner = raw.get("text_config")
            if not isinstance(inner, Mapping):
                raise ConfigError(f"config.json: model_type '{model_type}' needs a text_config")
            text = inner
            expected = _MULTIMODAL_TYPES[model_type]
            if text.get("model_type", expected) != expected:
                raise ConfigError(
                    f"config.json: text_config has model_type '{text['model_type']}', expected '{expected}'"
                )
            family = _TEXT_TYPES[expected]
        elif model_type in _TEXT_TYPES:
            family = _TEXT_TYPES[model_type]
        else:
            known = ", ".join(sorted([*_TEXT_TYPES, *_MULTIMODAL_TYPES]))
            raise ConfigError(f"config.json: model_type '{model_type}' is not known; metrale runs {known}")
        return _read(family, outer, _Fields(text))


class _Fields:
    """Typed access to one mapping of config.json; every failure is a ConfigError that names the field."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw = raw

    def get(self, name: str, default: Any = None) -> Any:
        value = self.raw.get(name)
        return default if value is None else value

    def integer(self, name: str, default: int | None = None, *, minimum: int = 1) -> int:
        value = self.get(name, default)
        if value is None:
            raise ConfigError(f"config.json lacks {name}")
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise ConfigError(f"config.json: {name} must be an integer of at least {minimum}, got {value!r}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.get(name, default)
        if value is None:
            raise ConfigError(f"config.json lacks {name}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise ConfigError(f"config.json: {name} must be a positive number, got {value!r}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise ConfigError(f"config.json: {name} must be true or false, got {value!r}")
        return value


def _read(family: str, outer: Mapping[str, Any], text: _Fields) -> ModelConfig:
    _refuse_unsupported(outer, text)
    layer_types = _layer_types(text)
    head_dim = text.integer("head_dim")
    rope_theta, rotary_dim = _rope(text, head_dim)
    num_experts, moe_layers = _moe_layers(family, text, len(layer_types))
    has_moe, has_dense = num_experts > 0, not all(moe_layers)
    config = ModelConfig(
        family=family,
        is_multimodal=outer is not text.raw,
        vocab_size=text.integer("vocab_size"),
        hidden_size=text.integer("hidden_size"),
        intermediate_size=text.integer("intermediate_size") if has_dense else 0,
        layer_types=layer_types,
        num_attention_heads=text.integer("num_attention_heads"),
        num_key_value_heads=text.integer("num_key_value_heads"),
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        rope_theta=rope_theta,
        linear_num_key_heads=text.integer("linear_num_key_heads"),
        linear_num_value_heads=text.integer("linear_num_value_heads"),
        linear_key_head_dim=text.integer("linear_key_head_dim"),
        linear_value_head_dim=text.integer("linear_value_head_dim"),
        linear_conv_kernel_dim=text.integer("linear_conv_kernel_dim", minimum=2),
        rms_norm_eps=text.number("rms_norm_eps", 1e-6),
        max_position_embeddings=text.integer("max_position_embeddings"),
        tie_word_embeddings=_tie_word_embeddings(outer, text),
        moe_layers=moe_layers,
        num_experts=num_experts,
        num_experts_per_tok=text.integer("num_experts_per_tok") if has_moe else 0,
        moe_intermediate_size=text.integer("moe_intermediate_size") if has_moe else 0,
        shared_expert_intermediate_size=text.integer("shared_expert_intermediate_size") if has_moe else 0,
        # Only qwen3_next makes it a choice; the others always renormalise.
        norm_topk_prob=text.flag("norm_topk_prob", True) if family == "qwen3_next" else True,
        num_mtp_layers=_num_mtp_layers(text),
        eos_token_ids=token_ids("config.json", text.get("eos_token_id", outer.get("eos_token_id"))),
    )
    _check_ratio(config, "num_attention_heads", "num_key_value_heads")
    _check_ratio(config, "linear_num_value_heads", "linear_num_key_heads")
    if config.num_experts_per_tok > num_experts:
        raise ConfigError(
            f"config.json: num_experts_per_tok {config.num_experts_per_tok} exceeds num_experts {num_experts}"
        )
    return config


def _refuse_unsupported(outer: Mapping[str, Any], text: _Fields) -> None:
    for raw in (outer, text.raw):
        for key in ("quantization_config", "compression_config"):
            quantization = raw.get(key)
            if quantization is not None:
                method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
                raise ConfigError(
                    f"config.json: {key} says that the checkpoint is quantised (method {method}); "
                    "metrale loads float32, float16 and bfloat16 checkpoints"
                )
    allowed: dict[str, tuple[Any, ...]] = {
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "attn_output_gate": (True,),
        "output_gate_type": ("swish", "silu"),
        "use_sliding_window": (False,),
        "mtp_use_dedicated_embeddings": (False,),
    }
    for name, values in allowed.items():
        value = text.get(name, values[0])
        if value not in values:
            raise ConfigError(f"config.json: {name} is {value!r}; metrale runs {values[0]!r} only")


def _layer_types(text: _Fields) -> tuple[str, ...]:
    num_layers = text.integer("num_hidden_layers")
    types = text.get("layer_types")
    if types is None:
        if text.get("full_attention_interval") is None:
            raise ConfigError("config.json lacks layer_types (or full_attention_interval)")
        interval = text.integer("full_attention_interval")
        return tuple(LINEAR if (i + 1) % interval else FULL for i in range(num_layers))
    if not isinstance(types, list) or len(types) != num_layers:
        size = len(types) if isinstance(types, list) else repr(types)
        raise ConfigError(f"config.json: layer_types must list {num_layers} layers, got {size}")
    for i, kind in enumerate(types):
        if kind not in (LINEAR, FULL):
            raise ConfigError(f"config.json: layer_types[{i}] is {kind!r}; metrale runs {LINEAR} and {FULL}")
    return tuple(types)


def _rope(text: _Fields, head_dim: int) -> tuple[float, int]:
    """(theta, rotated dimensions). The three axes of mrope carry one position for text: it is plain rope."""
    merged: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        block = text.get(key, {})
        if not isinstance(block, Mapping):
            raise ConfigError(f"config.json: {key} must be an object, got {block!r}")
        # Older files say "type", and "mrope" where only the sections of a multimodal input differ.
        rope_type = block.get("rope_type", block.get("type", "default"))
        if rope_type not in ("default", "mrope"):
            raise ConfigError(f"config.json: {key} has rope_type '{rope_type}'; metrale runs 'default' only")
        merged.update(block)
    rope = _Fields({**text.raw, **merged})
    theta = rope.number("rope_theta")
    factor = rope.number("partial_rotary_factor", DEFAULT_PARTIAL_ROTARY_FACTOR)
    rotary_dim = int(head_dim * factor)
    if rotary_dim < 2 or rotary_dim % 2 or rotary_dim > head_dim:
        raise ConfigError(
            f"config.json: partial_rotary_factor {factor} rotates {rotary_dim} of {head_dim} dimensions; "
            "it must give an even number from 2 to head_dim"
        )
    return theta, rotary_dim


def _moe_layers(family: str, text: _Fields, num_layers: int) -> tuple[int, tuple[bool, ...]]:
    """(experts, which layers use them). Only qwen3_next mixes dense and MoE layers."""
    if family == "qwen3_5":
        return 0, (False,) * num_layers
    num_experts = text.integer("num_experts", minimum=0)
    if family == "qwen3_5_moe":
        if num_experts == 0:
            raise ConfigError("config.json: num_experts must be at least 1 for qwen3_5_moe")
        return num_experts, (True,) * num_layers
    step = text.integer("decoder_sparse_step", 1)
    dense = text.get("mlp_only_layers", [])
    if not isinstance(dense, list) or not all(isinstance(i, int) and 0 <= i < num_layers for i in dense):
        raise ConfigError(
            f"config.json: mlp_only_layers must list layers from 0 to {num_layers - 1}, got {dense!r}"
        )
    layers = tuple(num_experts > 0 and i not in dense and (i + 1) % step == 0 for i in range(num_layers))
    return num_experts, layers


def _tie_word_embeddings(outer: Mapping[str, Any], text: _Fields) -> bool:
    own = text.raw.get("tie_word_embeddings")
    wrapper = outer.get("tie_word_embeddings")
    if own is not None and wrapper is not None and own != wrapper:
        raise ConfigError(
            f"config.json: tie_word_embeddings is {wrapper} outside and {own} inside text_config; "
            "make them agree"
        )
    given = _Fields({"tie_word_embeddings": wrapper if own is None else own})
    return given.flag("tie_word_embeddings", False)


def _num_mtp_layers(text: _Fields) -> int | None:
    counts: dict[str, int] = {}
    for key in ("mtp_num_hidden_layers", "num_nextn_predict_layers"):
        if text.get(key) is not None:
            counts[key] = text.integer(key, minimum=0)
            if counts[key] > 1:
                raise ConfigError(f"config.json: {key} is {counts[key]}; metrale runs MTP heads of one layer")
    if len(set(counts.values())) > 1:
        said = " and ".join(f"{key} {count}" for key, count in counts.items())
        raise ConfigError(f"config.json: {said} contradict each other")
    return next(iter(counts.values()), None)


def _check_ratio(config: ModelConfig, many: str, few: str) -> None:
    num_many, num_few = getattr(config, many), getattr(config, few)
    if num_many % num_few:
        raise ConfigError(f"config.json: {many} {num_many} is not a multiple of {few} {num_few}")


def token_ids(file: str, value: Any) -> tuple[int, ...]:
    """The ids in the `eos_token_id` of `file`: an id, a list of ids or None; else a ConfigError."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            raise ConfigError(f"{file}: eos_token_id must be an id or a list of ids, got {value!r}")
    return tuple(ids)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. ConfigError where it is absent, not JSON or not an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON ({error})") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    return value
