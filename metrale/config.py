"""What an engine is configured with, and the only reader of the environment."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from metrale.errors import ConfigError

MAX_SPECULATIVE_TOKENS = 16
MAX_NUM_SEQS = 65536
METHODS = ("mtp", "ngram")
METHODS_TO_COME = ("dflash", "prompt_lookup", "self")
KEYS_TO_COME = (
    "model",
    "prompt_lookup",
    "num_speculative_tokens_per_batch_size",
    "cost_table",
    "cost_calibration",
    "cost_slack",
    "draft_confidence_stop",
    "dcut_ratio",
    "dcut_max_seqs",
    "suspend_below",
    "reprobe_after",
    "adaptive_num_speculative_tokens",
    "throughput_gate",
    "synthetic_acceptance_rates",
)
BACKENDS = ("auto", "triton", "cpu", "torch", "interpret")
DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16")
DEFAULT_KV_CACHE_BYTES = 4 << 30


@dataclass(frozen=True)
class SpeculativeConfig:
    """How drafts are made and how many.

    | field | meaning |
    | --- | --- |
    | method | "mtp" or "ngram" |
    | num_speculative_tokens | the ceiling of drafts in a verify, 0 to 16 |
    | prompt_lookup_max, prompt_lookup_min | ngram: longest and shortest suffix matched |
    | max_num_seqs_speculative | above this many running sequences, no drafts; the drafter still follows |
    | depth_policy | "fixed": the ceiling itself |
    """

    method: str
    num_speculative_tokens: int = 3
    prompt_lookup_max: int = 4
    prompt_lookup_min: int = 2
    max_num_seqs_speculative: int = 32
    depth_policy: str = "fixed"

    def __post_init__(self) -> None:
        if self.method in METHODS_TO_COME:
            raise ConfigError(
                f"speculative_config: method {self.method!r} is not supported yet; use one of {METHODS}"
            )
        if self.method not in METHODS:
            raise ConfigError(f"speculative_config: unknown method {self.method!r}; use one of {METHODS}")
        _check_int(
            "speculative_config: num_speculative_tokens",
            self.num_speculative_tokens,
            0,
            MAX_SPECULATIVE_TOKENS,
        )
        _check_int("speculative_config: prompt_lookup_min", self.prompt_lookup_min, 1)
        _check_int("speculative_config: prompt_lookup_max", self.prompt_lookup_max, 1)
        _check_int("speculative_config: max_num_seqs_speculative", self.max_num_seqs_speculative, 0)
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError(
                f"speculative_config: prompt_lookup_min {self.prompt_lookup_min} is above "
                f"prompt_lookup_max {self.prompt_lookup_max}"
            )
        if self.depth_policy != "fixed":
            raise ConfigError(
                f"speculative_config: depth_policy {self.depth_policy!r} is not supported yet; use 'fixed'"
            )

    @staticmethod
    def from_mapping(mapping: Mapping[str, Any] | None) -> SpeculativeConfig | None:
        """The config of `LLM(speculative_config=...)`; None is plain decode. An unknown key names the nearest known one."""
        if mapping is None:
            return None
        if not isinstance(mapping, Mapping):
            raise ConfigError(f"speculative_config must be a mapping or None, got {type(mapping).__name__}")
        known = [field.name for field in fields(SpeculativeConfig)]
        for key in mapping:
            if key in KEYS_TO_COME:
                raise ConfigError(f"speculative_config: key {key!r} is not supported yet")
            if key not in known:
                near = _nearest(str(key), [*known, *KEYS_TO_COME])
                raise ConfigError(
                    f"speculative_config: unknown key {key!r}; the nearest known key is {near!r}"
                )
        if "method" not in mapping:
            raise ConfigError(f"speculative_config: the key 'method' is missing; use one of {METHODS}")
        return SpeculativeConfig(**mapping)


@dataclass(frozen=True)
class EngineConfig:
    """Everything that `LLM` takes.

    | field | meaning |
    | --- | --- |
    | model | "tiny", a local directory, or a Hub repository id |
    | speculative_config | None is plain decode |
    | backend | "triton": Triton kernels on a GPU; "cpu": C kernels; "torch": the reference operators; "interpret": the Triton
      kernels under Triton's interpreter, for tests; "auto": the first of triton, cpu, torch that this machine can run |
    | device | "auto", "cpu" or "cuda" (a GPU, ROCm's too); it must be the backend's |
    | dtype | activations and caches: "float32" or "bfloat16" (not the cpu backend); "auto" is bfloat16 on a GPU |
    | max_model_len | most tokens of prompt and output together; None is what the checkpoint and the cache allow |
    | max_num_seqs | most sequences that run at once |
    | max_num_batched_tokens | row budget of a step; a step may pass it by one prompt unit of 64 rows |
    | kv_cache_memory_bytes | most memory for keys and values; None is what max_num_seqs needs, 4 GiB at most |
    | skip_tokenizer_init | serve token ids only |
    | seed | source of the seeds of unseeded requests |
    | fold_threshold | rows that may stay unfolded in a Gated DeltaNet layer's ring; speed only |
    """

    model: str = "tiny"
    speculative_config: SpeculativeConfig | None = None
    backend: str = "auto"
    device: str = "auto"
    dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 2048
    kv_cache_memory_bytes: int | None = None
    skip_tokenizer_init: bool = False
    seed: int = 0
    fold_threshold: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError("model must be 'tiny', a directory or a Hub repository id")
        if self.speculative_config is not None and not isinstance(self.speculative_config, SpeculativeConfig):
            raise ConfigError(
                f"speculative_config must be a SpeculativeConfig or None, got {self.speculative_config!r}"
            )
        if not isinstance(self.skip_tokenizer_init, bool):
            raise ConfigError(f"skip_tokenizer_init must be True or False, got {self.skip_tokenizer_init!r}")
        _check_choice("backend", self.backend, BACKENDS)
        _check_choice("device", self.device, DEVICES)
        _check_choice("dtype", self.dtype, DTYPES)
        if self.max_model_len is not None:
            _check_int("max_model_len", self.max_model_len, 2)
        _check_int("max_num_seqs", self.max_num_seqs, 1, MAX_NUM_SEQS)
        _check_int("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        if self.kv_cache_memory_bytes is not None:
            _check_int("kv_cache_memory_bytes", self.kv_cache_memory_bytes, 1)
        _check_int("seed", self.seed)
        _check_int("fold_threshold", self.fold_threshold, 0)

    @staticmethod
    def from_options(**options: Any) -> EngineConfig:
        """The config of keyword options; an unknown one names the nearest known one."""
        known = [field.name for field in fields(EngineConfig)]
        for name in options:
            if name not in known:
                near = _nearest(name, known)
                raise ConfigError(f"unknown option {name!r}; the nearest known one is {near!r}")
        return EngineConfig(**options)

    @property
    def max_rows(self) -> int:
        """R: most rows of one verify."""
        return 1 + (self.speculative_config.num_speculative_tokens if self.speculative_config else 0)


def cache_dir() -> Path:
    """Where compiled kernels are kept: METRALE_CACHE_DIR, or metrale/ under XDG_CACHE_HOME or ~/.cache."""
    explicit = os.environ.get("METRALE_CACHE_DIR")
    if explicit:
        return Path(explicit)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "metrale"


def c_compiler() -> str | None:
    """The C compiler that the environment asks for (CC), if any."""
    return os.environ.get("CC") or None


def _nearest(name: str, known: list[str]) -> str:
    return difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"unknown {name} {value!r}; use one of {choices}")


def _check_int(name: str, value: object, lowest: int | None = None, highest: int | None = None) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{name} must be an integer, got {value!r}")
    if (lowest is not None and value < lowest) or (highest is not None and value > highest):
        bounds = f"at least {lowest}" if highest is None else f"{lowest} to {highest}"
        raise ConfigError(f"{name} must be {bounds}, got {value}")
