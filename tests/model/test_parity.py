"""The trunk against transformers, which is an independent implementation, on small random checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from metrale.kernels.ops import Ops
from metrale.model.loader import load_model
from tests.model import checkpoints
from tests.model.conftest import Saved
from tests.model.drive import Solo

TOLERANCE = 1e-4
NUM_DECODED = 64
FAMILIES = [
    pytest.param("qwen3_5_text", {"tie_word_embeddings": True}, id="qwen3_5"),
    pytest.param("qwen3_5_moe_text", {}, id="qwen3_5_moe"),
    pytest.param("qwen3_next", {"norm_topk_prob": False, "mlp_only_layers": [1]}, id="qwen3_next"),
]
# Head ratios 1 to 4 (value over key heads, query over key-value heads), widths that are no powers of two, both tyings.
SHAPES = [
    pytest.param(
        {"linear_num_key_heads": 3, "linear_num_value_heads": 3, "num_attention_heads": 2}, id="ratio-1"
    ),
    pytest.param(
        {"linear_num_value_heads": 4, "linear_conv_kernel_dim": 3, "tie_word_embeddings": True}, id="ratio-2"
    ),
    pytest.param(
        {
            "linear_num_value_heads": 6,
            "num_attention_heads": 6,
            "linear_key_head_dim": 20,
            "linear_value_head_dim": 28,
        },
        id="ratio-3",
    ),
    pytest.param(
        {
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
        },
        id="ratio-4",
    ),
    pytest.param(
        {
            "head_dim": 36,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5},
            "layer_types": ["full_attention", "linear_attention", "full_attention"],
            "num_hidden_layers": 3,
            "hidden_size": 44,
        },
        id="layer-order",
    ),
]


def check(directory: Path, oracle: Any, ops: Ops, num_prompt: int) -> None:
    """Greedy decoding after a prompt: logits within tolerance at every row, and the same greedy tokens."""
    model = load_model(directory, ops).model
    solo = Solo(model, num_positions=num_prompt + NUM_DECODED)
    generator = torch.Generator().manual_seed(num_prompt)
    prompt = torch.randint(model.config.vocab_size, (num_prompt,), generator=generator).tolist()
    token_ids, logits = solo.greedy(prompt, NUM_DECODED)
    with torch.inference_mode():
        expected = oracle(torch.tensor([prompt + token_ids[:-1]])).logits[0, num_prompt - 1 :]
    assert expected.argmax(-1).tolist() == token_ids
    assert len(set(token_ids)) > NUM_DECODED // 8, "a flat model would agree with anything"
    error = checkpoints.relative_error(logits, expected)
    print(f"\n{ops.name} {model.config.family}, prompt {num_prompt}: relative error {error:.1e}")
    assert error < TOLERANCE


@pytest.mark.parametrize("num_prompt", [1, 63, 64, 65, 130])
@pytest.mark.parametrize(("model_type", "changes"), FAMILIES)
def test_families(
    model_type: str, changes: dict[str, Any], num_prompt: int, saved: Callable[..., Saved], backend: Ops
) -> None:
    directory, oracle = saved(model_type, **changes)
    check(directory, oracle, backend, num_prompt)


@pytest.mark.parametrize("model_type", ["qwen3_5_text", "qwen3_next"])
@pytest.mark.parametrize("changes", SHAPES)
def test_shapes(model_type: str, changes: dict[str, Any], saved: Callable[..., Saved], backend: Ops) -> None:
    extra = {"num_experts": 0} if model_type == "qwen3_next" else {}
    directory, oracle = saved(model_type, **changes, **extra)
    check(directory, oracle, backend, num_prompt=67)


@pytest.mark.parametrize("model_type", ["qwen3_5", "qwen3_5_moe"])
def test_multimodal_wrapper(model_type: str, tmp_path: Path, ops: Ops) -> None:
    """Text under `model.language_model.`, a vision tower that is left alone, text_config inside config.json."""
    from transformers import AutoModelForImageTextToText

    text = checkpoints.text_config(f"{model_type}_text").to_dict()
    config = checkpoints.WRAPPERS[model_type](text_config=text, vision_config=checkpoints.VISION)
    oracle = AutoModelForImageTextToText.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    checkpoints.enliven(dict(oracle.named_parameters()), seed=0)
    checkpoints.save(oracle, tmp_path)
    check(tmp_path, oracle, ops, num_prompt=66)


@pytest.mark.parametrize(("model_type", "changes"), FAMILIES)
def test_prompt_rows(
    model_type: str, changes: dict[str, Any], saved: Callable[..., Saved], backend: Ops
) -> None:
    """Every row of a prompt, not only its last one."""
    directory, oracle = saved(model_type, **changes)
    model = load_model(directory, backend).model
    prompt = torch.randint(model.config.vocab_size, (130,), generator=torch.Generator().manual_seed(3))
    logits = model.logits(Solo(model).prefill(prompt.tolist()))
    with torch.inference_mode():
        expected = oracle(prompt[None]).logits[0]
    assert checkpoints.relative_error(logits, expected) < TOLERANCE
