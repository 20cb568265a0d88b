"""Defaults from generation_config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from metrale.errors import ConfigError
from metrale.model.config import ModelConfig
from metrale.model.generation import GenerationDefaults
from tests.model.test_config import DENSE


def defaults(directory: Path, raw: dict[str, Any] | None, **changes: Any) -> GenerationDefaults:
    if raw is not None:
        (directory / "generation_config.json").write_text(json.dumps(raw))
    return GenerationDefaults.from_directory(directory, ModelConfig.from_dict({**DENSE, **changes}))


def test_absent_file(tmp_path: Path) -> None:
    assert defaults(tmp_path, None, eos_token_id=[3, 4]) == GenerationDefaults(eos_token_ids=(3, 4))
    assert defaults(tmp_path, None, eos_token_id=None).eos_token_ids == ()


def test_file_wins_over_config(tmp_path: Path) -> None:
    raw = {
        "eos_token_id": [1, 2],
        "do_sample": True,
        "temperature": 0.7,
        "top_p": 0.8,
        "top_k": 20,
        "min_p": 0.1,
    }
    expected = GenerationDefaults(eos_token_ids=(1, 2), temperature=0.7, top_p=0.8, top_k=20, min_p=0.1)
    assert defaults(tmp_path, raw, eos_token_id=9) == expected


def test_one_eos_id(tmp_path: Path) -> None:
    assert defaults(tmp_path, {"eos_token_id": 0}, eos_token_id=9).eos_token_ids == (0,)
    assert defaults(tmp_path, {}, eos_token_id=9).eos_token_ids == (9,)


def test_no_sampling_is_greedy(tmp_path: Path) -> None:
    raw = {"do_sample": False, "temperature": 0.7, "top_k": 20, "repetition_penalty": 1.1}
    expected = GenerationDefaults(eos_token_ids=(5,), temperature=0.0, repetition_penalty=1.1)
    assert defaults(tmp_path, raw, eos_token_id=5) == expected


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"temperature": "hot"}, "temperature must be a number"),
        ({"top_k": 1.5}, "top_k must be an integer"),
        ({"eos_token_id": [1, "x"]}, "eos_token_id must be an id or a list of ids"),
    ],
)
def test_wrong_types(tmp_path: Path, raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        defaults(tmp_path, raw)
