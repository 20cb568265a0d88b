"""SamplingParams takes what it can serve and refuses the rest in one sentence that names field and value."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from metrale.errors import RequestError
from metrale.sampling.params import SamplingParams, StructuredOutputsParams


def test_defaults() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.seed, params.max_tokens, params.min_tokens, params.logprobs) == (None, 16, 0, None)
    assert (params.stop_strings, params.stop_token_ids) == ((), ())
    assert (params.ignore_eos, params.skip_special_tokens) == (False, True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0),
        ("n", -1),
        ("n", 1.0),
        ("n", True),
        ("n", "2"),
        ("n", None),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", 1e-40),
        ("temperature", 1e-7),
        ("temperature", 1e7),
        ("temperature", 10**400),
        ("temperature", "1"),
        ("temperature", True),
        ("temperature", None),
        ("top_p", 0.0),
        ("top_p", -0.5),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("top_p", False),
        ("top_k", -2),
        ("top_k", 2.0),
        ("top_k", True),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("min_p", math.nan),
        ("min_p", "0"),
        ("seed", -1),
        ("seed", 2**64),
        ("seed", 1.5),
        ("seed", True),
        ("max_tokens", 0),
        ("max_tokens", -3),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("logprobs", -1),
        ("logprobs", 2.0),
        ("logprobs", True),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", ["a", 3]),
        ("stop", 3),
        ("stop", b"a"),
        ("stop_token_ids", 5),
        ("stop_token_ids", "5"),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [1.0]),
        ("stop_token_ids", [True]),
        ("ignore_eos", 1),
        ("ignore_eos", None),
        ("skip_special_tokens", "yes"),
    ],
)
def test_refused(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=name) as caught:
        SamplingParams(**{name: value})
    assert isinstance(caught.value, ValueError)
    message = str(caught.value)
    assert repr(value[-1] if isinstance(value, list) else value) in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("min_tokens", 1),
        ("presence_penalty", 0.5),
        ("frequency_penalty", -0.5),
        ("repetition_penalty", 1.1),
        ("logit_bias", {3: 1.0}),
        ("bad_words", ["x"]),
        ("allowed_token_ids", [1, 2]),
        ("allowed_token_ids", []),
        ("logits_processors", [len]),
        ("structured_outputs", StructuredOutputsParams(regex="a+")),
        ("thinking_budget", 0),
        ("min_tokens", False),
    ],
)
def test_later_fields_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"^{name} is not supported yet") as caught:
        SamplingParams(**{name: value})
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("min_tokens", 0),
        ("presence_penalty", 0),
        ("frequency_penalty", 0.0),
        ("repetition_penalty", 1),
        ("logit_bias", {}),
        ("bad_words", []),
        ("logits_processors", []),
        ("structured_outputs", None),
    ],
)
def test_neutral_values_pass(name: str, value: Any) -> None:
    SamplingParams(**{name: value})


def test_no_field_escapes_a_check() -> None:
    """Every field has a value that is refused: a field added without a check fails here."""
    for field in dataclasses.fields(SamplingParams):
        with pytest.raises(RequestError, match=field.name):
            SamplingParams(**{field.name: object()})


def test_unknown_field() -> None:
    with pytest.raises(TypeError):
        SamplingParams(temprature=1.0)  # type: ignore[call-arg]


def test_values_are_normalised() -> None:
    params = SamplingParams(
        temperature=np.float32(0.5),
        top_k=np.int64(-1),
        seed=np.uint64(2**64 - 1),
        stop="a",
        stop_token_ids={7},
    )
    assert type(params.temperature) is float
    assert (params.top_k, params.seed, params.stop, params.stop_token_ids) == (0, 2**64 - 1, ("a",), (7,))
    assert type(params.seed) is int
    assert SamplingParams(stop=["b", "a"]).stop_strings == ("b", "a")
    assert SamplingParams(temperature=0).temperature == 0.0
    assert SamplingParams(max_tokens=None).max_tokens is None


def test_frozen_and_equal_by_value() -> None:
    params = SamplingParams(stop=["a"])
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 2  # type: ignore[misc]
    assert params == SamplingParams(stop="a")
    assert hash(params) == hash(SamplingParams(stop="a"))
    assert dataclasses.replace(params, n=3) == SamplingParams(stop="a", n=3)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"regex": "a", "choice": ["b"]},
        {"json": 3},
        {"regex": 3},
        {"grammar": b"x"},
        {"choice": []},
        {"choice": "abc"},
        {"choice": [1]},
    ],
)
def test_structured_outputs_refused(given: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="structured_outputs"):
        StructuredOutputsParams(**given)


def test_structured_outputs_taken() -> None:
    assert StructuredOutputsParams(json={"type": "object"}).json == {"type": "object"}
    assert StructuredOutputsParams(choice=["a", "b"]).choice == ("a", "b")
