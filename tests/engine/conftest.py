"""Checkpoints for the engine's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.model import checkpoints


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A lively random hybrid with an MTP head, odd dimensions, no tokenizer."""
    oracle = checkpoints.build(checkpoints.text_config("qwen3_5_text", tie_word_embeddings=True))
    plain = checkpoints.save(oracle, tmp_path_factory.mktemp("plain"))
    return checkpoints.copy_with_mtp(plain, tmp_path_factory.mktemp("random") / "model")
