"""The shape of `tiny`, the recipe that trains it, and the malloc settings that the training wants."""

import os
import sys
from dataclasses import dataclass, replace
from typing import Any

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END_OF_TEXT = 0

# Gigabytes of activations are freed and asked for again in every step. By default glibc hands large blocks back to the
# kernel each time, and the page faults of getting them again cost a quarter of the step.
MALLOC_ENVIRONMENT = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "1000000000000",
    "MALLOC_TOP_PAD_": "268435456",
}


def restart_with_malloc_settings() -> None:
    """Replace the process by itself with MALLOC_ENVIRONMENT set; glibc reads these only when a process starts."""
    missing = {name: value for name, value in MALLOC_ENVIRONMENT.items() if name not in os.environ}
    if missing and sys.platform == "linux":
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **missing})


@dataclass(frozen=True)
class TinyConfig:
    """The model: names follow the keys of a `qwen3_5_text` config.json."""

    vocab_size: int = 2048
    hidden_size: int = 256
    intermediate_size: int = 512
    num_hidden_layers: int = 8
    full_attention_interval: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    linear_num_key_heads: int = 2
    linear_num_value_heads: int = 4
    linear_key_head_dim: int = 64
    linear_value_head_dim: int = 64
    linear_conv_kernel_dim: int = 4
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    partial_rotary_factor: float = 0.25
    max_position_embeddings: int = 2048

    @property
    def layer_types(self) -> list[str]:
        interval = self.full_attention_interval
        kinds = ("linear_attention", "full_attention")
        return [kinds[(index + 1) % interval == 0] for index in range(self.num_hidden_layers)]

    @property
    def shallow(self) -> "TinyConfig":
        """The same model with one group of layers, from which the whole one grows."""
        return replace(self, num_hidden_layers=self.full_attention_interval)

    @property
    def key_dim(self) -> int:
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_dim(self) -> int:
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.partial_rotary_factor)

    def to_json(self) -> dict[str, object]:
        """The content of config.json."""
        return {
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_position_embeddings,
            "rms_norm_eps": self.rms_norm_eps,
            "tie_word_embeddings": True,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "layer_types": self.layer_types,
            "linear_conv_kernel_dim": self.linear_conv_kernel_dim,
            "linear_key_head_dim": self.linear_key_head_dim,
            "linear_value_head_dim": self.linear_value_head_dim,
            "linear_num_key_heads": self.linear_num_key_heads,
            "linear_num_value_heads": self.linear_num_value_heads,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": self.rope_theta,
                "partial_rotary_factor": self.partial_rotary_factor,
            },
            "mtp_num_hidden_layers": 1,
            "eos_token_id": END_OF_TEXT,
            "bos_token_id": None,
            "pad_token_id": None,
            "use_cache": True,
            "dtype": "bfloat16",
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "TinyConfig":
        """Read back what to_json wrote; other keys are ignored."""
        flat = {**content, **content["rope_parameters"]}
        known = {name: flat[name] for name in cls.__dataclass_fields__ if name in flat}
        layer_types = content["layer_types"]
        config = cls(**known, full_attention_interval=layer_types.index("full_attention") + 1)
        if config.layer_types != layer_types:
            raise ValueError(
                f"layer_types: expected every n-th layer to be full_attention, got {layer_types}"
            )
        return config


@dataclass(frozen=True)
class Recipe:
    """How `tiny` is trained. Durations are seconds of wall time."""

    seed: int = 1
    chunk: int = 32
    sequence_length: int = 512
    rows: int = 4
    library_share: float = 0.65
    warmup: float = 0.02
    weight_decay: float = 0.05

    recall_weight: float = 0.5  # falls to zero over the first `recall_until` of a phase on text
    recall_until: float = 0.4

    shallow_seconds: float = 1260.0
    shallow_steps: int = 10000
    shallow_double_rows_from: float = 0.25

    trunk_seconds: float = 1290.0
    trunk_steps: int = 10000
    trunk_muon_lr: float = 3e-3
    trunk_adamw_lr: float = 3e-3
    trunk_hold_until: float = 0.2
    head_weight: float = 0.3
    head_rows_share: float = 0.5

    chain_seconds: float = 570.0
    chain_steps: int = 600
    chain_depth: int = 3
    chain_decay: float = 0.8
    chain_muon_lr: float = 2e-3
    chain_adamw_lr: float = 1e-3
    chain_hold_until: float = 0.1
