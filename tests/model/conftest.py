"""Checkpoints that several tests read, each written once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from metrale import native, reference
from metrale.kernels.ops import Ops
from tests.compiler import needs_compiler
from tests.model import checkpoints


class Saved(NamedTuple):
    """A checkpoint on disk and the transformers model that wrote it."""

    directory: Path
    oracle: Any


@pytest.fixture(scope="session")
def ops() -> Ops:
    return reference.ops()


@pytest.fixture(scope="session", params=["torch", pytest.param("cpu", marks=needs_compiler)])
def backend(request: pytest.FixtureRequest) -> Ops:
    """The operators of each backend of this machine."""
    return reference.ops() if request.param == "torch" else native.ops()


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Saved]:
    """Writes a random checkpoint of a text family, or gives the one that was written before. Read only."""
    known: dict[str, Saved] = {}

    def save(model_type: str, **changes: Any) -> Saved:
        key = f"{model_type} {sorted(changes.items())}"
        if key not in known:
            oracle = checkpoints.build(checkpoints.text_config(model_type, **changes))
            known[key] = Saved(checkpoints.save(oracle, tmp_path_factory.mktemp("checkpoint")), oracle)
        return known[key]

    return save


@pytest.fixture
def dense_with_mtp(tmp_path: Path, saved: Callable[..., Saved]) -> Path:
    """A copy of a tied dense checkpoint with a head, free to edit."""
    return checkpoints.copy_with_mtp(
        saved("qwen3_5_text", tie_word_embeddings=True).directory, tmp_path / "mtp"
    )
