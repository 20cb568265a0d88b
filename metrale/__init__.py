"""metrale: hybrid language models with speculative decoding, bit-identical whatever the drafter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from metrale.engine.llm import LLM
    from metrale.errors import CapacityError, ConfigError, RequestError
    from metrale.sampling.params import SamplingParams, StructuredOutputsParams

__all__ = ["LLM", "CapacityError", "ConfigError", "RequestError", "SamplingParams", "StructuredOutputsParams"]

_HOMES = {
    "LLM": "metrale.engine.llm",
    "CapacityError": "metrale.errors",
    "ConfigError": "metrale.errors",
    "RequestError": "metrale.errors",
    "SamplingParams": "metrale.sampling.params",
    "StructuredOutputsParams": "metrale.sampling.params",
}


def __getattr__(name: str) -> Any:
    """Load public names on first use, so that `import metrale` costs nothing."""
    if name not in _HOMES:
        raise AttributeError(f"module 'metrale' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
