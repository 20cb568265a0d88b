"""Small random checkpoints of the three families, written by transformers, with logits that are not flat."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5Config, Qwen3_5TextConfig
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeConfig, Qwen3_5MoeTextConfig
from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig

SHAPE: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 40,
    "intermediate_size": 72,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 48,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 20,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    "tie_word_embeddings": False,
    "eos_token_id": 0,
    "attn_implementation": "eager",
}
MOE: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 28,
}
VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 40,
    "num_position_embeddings": 16,
    "patch_size": 4,
}
CONFIGS: dict[str, Any] = {
    "qwen3_5_text": Qwen3_5TextConfig,
    "qwen3_5_moe_text": Qwen3_5MoeTextConfig,
    "qwen3_next": Qwen3NextConfig,
}
WRAPPERS: dict[str, Any] = {"qwen3_5": Qwen3_5Config, "qwen3_5_moe": Qwen3_5MoeConfig}


def text_config(model_type: str, **changes: Any) -> Any:
    """The transformers config of a small model of a text family."""
    extra = {} if model_type == "qwen3_5_text" else MOE
    return CONFIGS[model_type](**{**SHAPE, **extra, **changes})


def build(config: Any, *, seed: int = 0) -> PreTrainedModel:
    """A float32 transformers model with lively weights."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    enliven(dict(model.named_parameters()), seed)
    return model


def enliven(parameters: dict[str, Tensor], seed: int) -> None:
    """Random values, in place, that make every part matter: gates, decays, norms away from their neutral values."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in sorted(parameters.items()):
        with torch.no_grad():
            noise = torch.randn(tensor.shape, generator=generator)
            if name.endswith("A_log"):
                tensor.copy_(noise * 0.7)
            elif name.endswith("dt_bias"):
                tensor.copy_(noise - 1.5)
            elif name.endswith("linear_attn.norm.weight"):
                tensor.copy_(1 + 0.3 * noise)
            elif tensor.ndim == 1:
                tensor.copy_(0.3 * noise)
            elif name.endswith("conv1d.weight"):
                tensor.copy_(noise * 0.5)
            elif name.endswith("embed_tokens.weight"):
                tensor.copy_(0.4 * noise)
            else:
                tensor.copy_(noise * 1.3 / tensor.shape[-1] ** 0.5)


def save(model: PreTrainedModel, directory: Path, **options: Any) -> Path:
    """The model as transformers writes it."""
    model.save_pretrained(directory, **options)
    return directory


def mtp_tensors(model_type: str, config: dict[str, Any], *, seed: int = 7) -> dict[str, Tensor]:
    """The `mtp.*` tensors of a lively random head, as the published layouts have them."""
    width, dim = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes: dict[str, tuple[int, ...]] = {
        "mtp.fc.weight": (width, 2 * width),
        "mtp.pre_fc_norm_embedding.weight": (width,),
        "mtp.pre_fc_norm_hidden.weight": (width,),
        "mtp.norm.weight": (width,),
        "mtp.layers.0.input_layernorm.weight": (width,),
        "mtp.layers.0.post_attention_layernorm.weight": (width,),
        "mtp.layers.0.self_attn.q_proj.weight": (2 * queries, width),
        "mtp.layers.0.self_attn.k_proj.weight": (keys, width),
        "mtp.layers.0.self_attn.v_proj.weight": (keys, width),
        "mtp.layers.0.self_attn.o_proj.weight": (width, queries),
        "mtp.layers.0.self_attn.q_norm.weight": (dim,),
        "mtp.layers.0.self_attn.k_norm.weight": (dim,),
    }
    mlps = {"mtp.layers.0.mlp": config["intermediate_size"]} if model_type == "qwen3_5_text" else {}
    if not mlps:
        shapes["mtp.layers.0.mlp.gate.weight"] = (config["num_experts"], width)
        shapes["mtp.layers.0.mlp.shared_expert_gate.weight"] = (1, width)
        mlps["mtp.layers.0.mlp.shared_expert"] = config["shared_expert_intermediate_size"]
        for n in range(config["num_experts"]):
            mlps[f"mtp.layers.0.mlp.experts.{n}"] = config["moe_intermediate_size"]
    for prefix, inner in mlps.items():
        shapes[f"{prefix}.gate_proj.weight"] = shapes[f"{prefix}.up_proj.weight"] = (inner, width)
        shapes[f"{prefix}.down_proj.weight"] = (width, inner)
    tensors = {name: torch.empty(shape) for name, shape in shapes.items()}
    enliven(tensors, seed)
    return tensors


def edit_tensors(
    directory: Path, *, add: dict[str, Tensor] | None = None, drop: tuple[str, ...] = ()
) -> None:
    """Rewrite model.safetensors with tensors added or replaced, and others dropped."""
    path = directory / "model.safetensors"
    tensors = {k: v.clone() for k, v in load_file(path).items() if k not in drop}
    save_file({**tensors, **(add or {})}, path, metadata={"format": "pt"})


def edit_config(directory: Path, **changes: Any) -> None:
    """Rewrite config.json; a value of None removes the key."""
    path = directory / "config.json"
    raw = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in raw.items() if v is not None}))


def copy_with_mtp(source: Path, target: Path) -> Path:
    """A copy of a text checkpoint to which a random MTP head is added."""
    shutil.copytree(source, target)
    raw = json.loads((target / "config.json").read_text())
    edit_tensors(target, add=mtp_tensors(raw["model_type"], raw))
    edit_config(target, mtp_num_hidden_layers=1)
    return target


def relative_error(got: Tensor, expected: Tensor) -> float:
    """max |got - expected| / max |expected|."""
    return float((got - expected).abs().max() / expected.abs().max())


def tensors_of(weights: Any) -> list[Tensor]:
    """The tensors of a weight dataclass, in field order."""
    if isinstance(weights, Tensor):
        return [weights]
    if isinstance(weights, tuple):
        return [tensor for item in weights for tensor in tensors_of(item)]
    return [t for field in dataclasses.fields(weights) for t in tensors_of(getattr(weights, field.name))]


def digest(weights: Any) -> str:
    """A hash over the bytes, shapes and dtypes of a weight dataclass."""
    state = hashlib.sha256()
    for tensor in tensors_of(weights):
        state.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        state.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return state.hexdigest()
