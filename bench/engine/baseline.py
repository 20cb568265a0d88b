"""transformers' `generate` on the same checkpoint: the figure that ours stands beside."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

# With these importable, transformers binds their GPU kernels at import and its CPU forward fails.
BLOCKED = ("fla", "causal_conv1d")


def is_available() -> bool:
    return importlib.util.find_spec("transformers") is not None


class Baseline:
    """One checkpoint in transformers, in one dtype, on the CPU."""

    def __init__(self, directory: Path, dtype: torch.dtype) -> None:
        for name in BLOCKED:
            sys.modules.setdefault(name, None)  # type: ignore[arg-type]
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        logging.set_verbosity_error()
        self._model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
        # Both sides run to the last token: an early end would count fewer steps.
        self._model.generation_config.eos_token_id = None
        self._model.generation_config.pad_token_id = 0

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
        """Greedy continuations of prompts of one length, as one batch."""
        ids = torch.tensor([list(prompt) for prompt in prompts])
        with torch.inference_mode():
            out = self._model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False
            )
        return [list(row) for row in out[:, ids.shape[1] :].tolist()]
