"""EngineConfig and SpeculativeConfig: every bad value is one sentence that names its field."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metrale.config import (
    KEYS_TO_COME,
    MAX_SPECULATIVE_TOKENS,
    EngineConfig,
    SpeculativeConfig,
    c_compiler,
    cache_dir,
)
from metrale.errors import ConfigError

NOT_INTEGERS: list[Any] = [None, 1.5, "3", True, [1]]
ENGINE: list[tuple[str, list[Any]]] = [
    ("model", ["", None, 3]),
    ("speculative_config", [{"method": "ngram"}, "ngram", 3]),
    ("backend", ["gpu", "", None, "cuda", "CPU"]),
    ("device", ["gpu", "tpu", None, "cuda:0"]),
    ("dtype", ["float16", "half", None, "fp32"]),
    ("max_model_len", [*NOT_INTEGERS[1:], 1, 0, -5]),
    ("max_num_seqs", [*NOT_INTEGERS, 0, -1]),
    ("max_num_batched_tokens", [*NOT_INTEGERS, 0, -1]),
    ("kv_cache_memory_bytes", [*NOT_INTEGERS[1:], 0, -1]),
    ("skip_tokenizer_init", ["yes", None, 1]),
    ("seed", NOT_INTEGERS),
    ("fold_threshold", [*NOT_INTEGERS, -1]),
]
SPECULATIVE: list[tuple[str, list[Any]]] = [
    ("method", ["medusa", "", None, "dflash", "prompt_lookup", "self", "MTP"]),
    ("num_speculative_tokens", [*NOT_INTEGERS, -1, MAX_SPECULATIVE_TOKENS + 1]),
    ("prompt_lookup_max", [*NOT_INTEGERS, 0, -1, 1]),
    ("prompt_lookup_min", [*NOT_INTEGERS, 0, -1, 5]),
    ("max_num_seqs_speculative", [*NOT_INTEGERS, -1]),
    ("depth_policy", ["adaptive", "ladder", "", None]),
]


def each(table: list[tuple[str, list[Any]]]) -> list[Any]:
    return [pytest.param(name, value, id=f"{name}-{value!r}") for name, values in table for value in values]


def assert_one_sentence(message: str, *words: str) -> None:
    assert all(word in message for word in words), message
    assert "\n" not in message
    assert 10 < len(message) < 300


@pytest.mark.parametrize(("name", "value"), each(ENGINE))
def test_bad_engine_values(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as raised:
        EngineConfig(**{name: value})
    assert_one_sentence(str(raised.value), name)


@pytest.mark.parametrize(("name", "value"), each(SPECULATIVE))
def test_bad_speculative_values(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as raised:
        SpeculativeConfig(**{"method": "ngram", name: value})
    assert_one_sentence(str(raised.value), "speculative_config", name)


@pytest.mark.parametrize(("config", "table"), [(EngineConfig, ENGINE), (SpeculativeConfig, SPECULATIVE)])
def test_no_field_escapes(config: type, table: list[tuple[str, list[Any]]]) -> None:
    assert [field.name for field in dataclasses.fields(config)] == [name for name, _ in table]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_model_len": 2, "max_num_seqs": 1, "max_num_batched_tokens": 1, "kv_cache_memory_bytes": 1},
        {"seed": -1},
        {"seed": 1 << 70, "fold_threshold": 0},
        {"backend": "torch", "dtype": "bfloat16", "device": "cpu", "skip_tokenizer_init": True},
    ],
)
def test_good_engine_values(options: dict[str, Any]) -> None:
    config = EngineConfig.from_options(**options)
    assert {name: getattr(config, name) for name in options} == options
    assert config.max_rows == 1


@settings(deadline=None)
@given(st.integers(0, 16), st.integers(1, 9), st.integers(1, 9), st.integers(0, 99))
def test_good_speculative_values(depth: int, shortest: int, longest: int, width: int) -> None:
    given_keys = {
        "method": "ngram",
        "num_speculative_tokens": depth,
        "prompt_lookup_min": min(shortest, longest),
        "prompt_lookup_max": max(shortest, longest),
        "max_num_seqs_speculative": width,
    }
    config = SpeculativeConfig.from_mapping(given_keys)
    assert config is not None
    assert {name: getattr(config, name) for name in given_keys} == given_keys
    assert EngineConfig(speculative_config=config).max_rows == depth + 1


def test_defaults() -> None:
    """The documented ones."""
    config = SpeculativeConfig("mtp")
    assert (config.num_speculative_tokens, config.prompt_lookup_max, config.prompt_lookup_min) == (3, 4, 2)
    assert config.max_num_seqs_speculative == 32
    engine = EngineConfig()
    assert (engine.model, engine.max_num_seqs, engine.max_num_batched_tokens, engine.seed) == (
        "tiny",
        32,
        2048,
        0,
    )
    assert SpeculativeConfig.from_mapping(None) is None


def test_frozen() -> None:
    for config in (EngineConfig(), SpeculativeConfig("mtp")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            config.seed = 3  # type: ignore[misc, union-attr]


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("num_speculative_token", "num_speculative_tokens"),
        ("num_spec_tokens", "num_speculative_tokens"),
        ("metod", "method"),
        ("promt_lookup_max", "prompt_lookup_max"),
        ("prompt_lookup_mim", "prompt_lookup_min"),
        ("depth_polcy", "depth_policy"),
        ("max_num_seqs_speculativ", "max_num_seqs_speculative"),
        ("dcut_ration", "dcut_ratio"),
    ],
)
def test_an_unknown_speculative_key_names_the_nearest(key: str, nearest: str) -> None:
    with pytest.raises(ConfigError) as raised:
        SpeculativeConfig.from_mapping({"method": "ngram", key: 3})
    assert_one_sentence(str(raised.value), "speculative_config", repr(key), repr(nearest))


@settings(deadline=None)
@given(st.text(max_size=30) | st.integers() | st.none())
def test_no_unknown_key_is_ignored(key: Any) -> None:
    known = {field.name for field in dataclasses.fields(SpeculativeConfig)}
    if key not in known:
        with pytest.raises(ConfigError, match="speculative_config"):
            SpeculativeConfig.from_mapping({"method": "ngram", key: 3})


@pytest.mark.parametrize("key", KEYS_TO_COME)
def test_keys_to_come_are_refused_by_name(key: str) -> None:
    with pytest.raises(ConfigError) as raised:
        SpeculativeConfig.from_mapping({"method": "ngram", key: None})
    assert_one_sentence(str(raised.value), "speculative_config", repr(key), "not supported yet")


@pytest.mark.parametrize("mapping", ["ngram", ["ngram"], 3, True])
def test_only_a_mapping_will_do(mapping: Any) -> None:
    with pytest.raises(ConfigError, match="speculative_config must be a mapping or None"):
        SpeculativeConfig.from_mapping(mapping)


@pytest.mark.parametrize("mapping", [{}, {"num_speculative_tokens": 3}])
def test_the_method_is_not_optional(mapping: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="speculative_config: the key 'method' is missing"):
        SpeculativeConfig.from_mapping(mapping)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("max_model_length", "max_model_len"),
        ("max_seqs", "max_num_seqs"),
        ("devise", "device"),
        ("Seed", "seed"),
    ],
)
def test_an_unknown_option_names_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(ConfigError) as raised:
        EngineConfig.from_options(**{name: 3})
    assert_one_sentence(str(raised.value), repr(name), repr(nearest))


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("METRALE_CACHE_DIR", "XDG_CACHE_HOME", "CC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/nowhere")
    assert (cache_dir(), c_compiler()) == (Path("/nowhere/.cache/metrale"), None)
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_dir() == Path("/x/metrale")
    monkeypatch.setenv("METRALE_CACHE_DIR", "/c")
    monkeypatch.setenv("CC", "")
    assert (cache_dir(), c_compiler()) == (Path("/c"), None)
    monkeypatch.setenv("CC", "clang -m64")
    assert c_compiler() == "clang -m64"
