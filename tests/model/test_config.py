"""config.json is read once, and what metrale does not run is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from metrale.errors import ConfigError
from metrale.model.config import ModelConfig
from metrale.state.pool import ring_lengths

DENSE: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "vocab_size": 248320,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 262144,
    "full_attention_interval": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    },
    "attn_output_gate": True,
    "output_gate_type": "swish",
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "tie_word_embeddings": True,
    "eos_token_id": 248044,
}
MOE: dict[str, Any] = {
    **DENSE,
    "model_type": "qwen3_next",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 256,
}


def without(raw: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in raw.items() if key not in names}


def test_dense() -> None:
    config = ModelConfig.from_dict(DENSE)
    assert config.family == "qwen3_5"
    assert not config.is_multimodal
    assert config.gdn_layers == (0, 1, 2, 4, 5, 6)
    assert config.attention_layers == (3, 7)
    assert (config.rotary_dim, config.rope_theta) == (64, 1e7)
    assert config.num_conv_channels == 2 * 16 * 128 + 32 * 128
    assert config.rms_norm_eps == 1e-6
    assert config.num_mtp_layers == 1
    assert config.eos_token_ids == (248044,)
    assert config.tie_word_embeddings
    assert not config.is_moe


def test_multimodal_wrapper() -> None:
    text = without(DENSE, "tie_word_embeddings", "eos_token_id")
    outer = {
        "model_type": "qwen3_5",
        "text_config": text,
        "vision_config": {},
        "tie_word_embeddings": True,
        "eos_token_id": [7, 9],
    }
    config = ModelConfig.from_dict(outer)
    assert config.is_multimodal
    assert config.tie_word_embeddings
    assert config.eos_token_ids == (7, 9)
    assert config.family == "qwen3_5"


def test_moe_layers() -> None:
    config = ModelConfig.from_dict({**MOE, "decoder_sparse_step": 2, "mlp_only_layers": [3]})
    assert config.moe_layers == (False, True, False, False, False, True, False, True)
    assert config.norm_topk_prob
    assert not ModelConfig.from_dict({**MOE, "num_experts": 0}).is_moe
    assert all(ModelConfig.from_dict({**MOE, "model_type": "qwen3_5_moe_text"}).moe_layers)


def test_old_rope_fields() -> None:
    raw = {
        **without(DENSE, "rope_parameters"),
        "rope_theta": 5e5,
        "rope_scaling": None,
        "partial_rotary_factor": 0.5,
    }
    config = ModelConfig.from_dict(raw)
    assert (config.rope_theta, config.rotary_dim) == (5e5, 128)


def test_layer_types_win_over_the_interval() -> None:
    types = ["full_attention", *["linear_attention"] * 7]
    assert ModelConfig.from_dict({**DENSE, "layer_types": types}).attention_layers == (0,)


def test_bytes() -> None:
    config = ModelConfig.from_dict(DENSE)
    assert config.kv_bytes_per_token(itemsize=2) == 2 * 2 * 2 * 256 * 2
    assert config.kv_bytes_per_token(itemsize=2, with_mtp=True) == 2 * 3 * 2 * 256 * 2
    ring, conv_ring = ring_lengths(4, 4, 0)
    per_layer = 32 * 128 * 128 * 4 + 32 * 4 + conv_ring * 8192 * 2
    per_layer += ring * (16 * 128 * 2 + 32 * 128 * 4 + 32 * 4)
    assert config.state_bytes_per_slot(itemsize=2, max_rows=4) == 6 * per_layer


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "llama"}, "model_type 'llama' is not known.*qwen3_5_text.*qwen3_next"),
    ({"model_type": None}, "model_type 'None' is not known"),
    ({"quantization_config": {"quant_method": "fp8"}}, r"quantization_config.*quantised \(method fp8\)"),
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ({"attention_bias": True}, "attention_bias is True"),
    ({"attn_output_gate": False}, "attn_output_gate is False"),
    ({"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings is True"),
    ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_parameters has rope_type 'yarn'"),
    ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling has rope_type 'linear'"),
    ({"rope_parameters": {"rope_type": "default"}}, "lacks rope_theta"),
    ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.0001}}, "rotates 0 of 256"),
    ({"head_dim": 0}, "head_dim must be an integer of at least 1, got 0"),
    ({"hidden_size": "big"}, "hidden_size must be an integer"),
    ({"vocab_size": None}, "lacks vocab_size"),
    ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim must be an integer of at least 2"),
    ({"num_attention_heads": 3}, "num_attention_heads 3 is not a multiple of num_key_value_heads 2"),
    (
        {"linear_num_value_heads": 24},
        "linear_num_value_heads 24 is not a multiple of linear_num_key_heads 16",
    ),
    ({"layer_types": ["linear_attention"]}, "layer_types must list 8 layers, got 1"),
    ({"layer_types": ["mamba"] * 8}, r"layer_types\[0\] is 'mamba'"),
    ({"full_attention_interval": None}, r"lacks layer_types \(or full_attention_interval\)"),
    ({"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers is 2"),
    ({"num_nextn_predict_layers": 0}, "mtp_num_hidden_layers 1 and num_nextn_predict_layers 0 contradict"),
    ({"rms_norm_eps": -1.0}, "rms_norm_eps must be a positive number"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
    ({"eos_token_id": "</s>"}, "eos_token_id must be an id or a list of ids"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_dict({**DENSE, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 exceeds num_experts 8"),
        ({"num_experts": None}, "lacks num_experts"),
        ({"mlp_only_layers": [8]}, "mlp_only_layers must list layers from 0 to 7"),
        (
            {"shared_expert_intermediate_size": 0},
            "shared_expert_intermediate_size must be an integer of at least 1",
        ),
        ({"norm_topk_prob": 1}, "norm_topk_prob must be true or false"),
    ],
)
def test_refused_moe(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_dict({**MOE, **changes})


def test_refused_wrapper() -> None:
    with pytest.raises(ConfigError, match="needs a text_config"):
        ModelConfig.from_dict({"model_type": "qwen3_5"})
    with pytest.raises(ConfigError, match="text_config has model_type 'qwen3_next'"):
        ModelConfig.from_dict({"model_type": "qwen3_5", "text_config": MOE})
    with pytest.raises(ConfigError, match="tie_word_embeddings is False outside and True inside"):
        ModelConfig.from_dict({"model_type": "qwen3_5", "text_config": DENSE, "tie_word_embeddings": False})


def test_unreadable_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json cannot be read as JSON"):
        ModelConfig.from_directory(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read as JSON"):
        ModelConfig.from_directory(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps([1]))
    with pytest.raises(ConfigError, match="must hold a JSON object"):
        ModelConfig.from_directory(tmp_path)
