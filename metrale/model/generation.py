"""What a checkpoint's generation_config.json asks for when a request says nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metrale.errors import ConfigError
from metrale.model.config import ModelConfig, read_json, token_ids

GREEDY_TEMPERATURE = 0.0


@dataclass(frozen=True)
class GenerationDefaults:
    """Sampling defaults of a checkpoint; None where the checkpoint says nothing.

    `eos_token_ids` come from generation_config.json, or else from config.json. `do_sample: false` reads as
    temperature 0; the temperature, top_p, top_k and min_p beside it are dropped, since greedy decoding has no
    use for them.
    """

    eos_token_ids: tuple[int, ...] = ()
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    @staticmethod
    def from_directory(directory: Path, config: ModelConfig) -> GenerationDefaults:
        """The defaults of the checkpoint in `directory`; ConfigError names a field of the wrong type."""
        path = directory / "generation_config.json"
        raw = read_json(path) if path.is_file() else {}
        eos_token_ids = token_ids("generation_config.json", raw.get("eos_token_id"))
        if raw.get("do_sample") is False:
            return GenerationDefaults(
                eos_token_ids=eos_token_ids or config.eos_token_ids,
                temperature=GREEDY_TEMPERATURE,
                repetition_penalty=_number(raw, "repetition_penalty"),
            )
        top_k = _number(raw, "top_k")
        if top_k is not None and not top_k.is_integer():
            raise ConfigError(f"generation_config.json: top_k must be an integer, got {top_k}")
        return GenerationDefaults(
            eos_token_ids=eos_token_ids or config.eos_token_ids,
            temperature=_number(raw, "temperature"),
            top_p=_number(raw, "top_p"),
            top_k=None if top_k is None else int(top_k),
            min_p=_number(raw, "min_p"),
            repetition_penalty=_number(raw, "repetition_penalty"),
        )


def _number(raw: dict[str, Any], name: str) -> float | None:
    value = raw.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"generation_config.json: {name} must be a number, got {value!r}")
    return float(value)
