"""SamplingParams: what a request asks of the pick of its tokens, checked once at construction."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any

from metrale.errors import RequestError

MIN_TEMPERATURE = 1e-6
"""Below it logits / T could leave float32; 0 is greedy."""
MAX_TEMPERATURE = 1e6
MAX_SEED = 2**64 - 1

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "min_tokens": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": (None, {}),
    "bad_words": (None, [], ()),
    "allowed_token_ids": (None,),
    "logits_processors": (None, [], ()),
    "structured_outputs": (None,),
    "thinking_budget": (None,),
}
"""Fields that this version refuses, and the values under which they ask for nothing."""
_PLAIN = (int, float, list, tuple, dict)


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """What the output must match: exactly one of the four.

    json: a JSON schema, as text or as a dict. regex: a regular expression. grammar: an EBNF grammar. choice:
    the texts of which the output is one. RequestError where none or several are given, or one has the wrong
    type.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: Sequence[str] | None = None

    def __post_init__(self) -> None:
        given = [field.name for field in fields(self) if getattr(self, field.name) is not None]
        if len(given) != 1:
            raise RequestError(
                f"structured_outputs needs exactly one of json, regex, grammar, choice; got {given or 'none'}"
            )
        if self.json is not None and not isinstance(self.json, str | Mapping):
            raise RequestError(f"structured_outputs.json must be a string or a dict, got {self.json!r}")
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise RequestError(f"structured_outputs.{name} must be a string, got {value!r}")
        if self.choice is not None:
            object.__setattr__(self, "choice", _strings("structured_outputs.choice", self.choice))
            if not self.choice:
                raise RequestError("structured_outputs.choice must hold at least one string, got none")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to pick the tokens of one request, and when to end. Defaults as in vLLM.

    | field | meaning |
    | --- | --- |
    | n | samples of the prompt; sample i differs from the others by its noise |
    | temperature | 0: greedy; else logits are divided by it, 1e-6 to 1e6 |
    | top_p | keep the smallest set of most likely ids whose probability reaches it, (0, 1]; 1: off |
    | top_k | keep the k highest ids; 0 or -1: off |
    | min_p | keep ids at least this fraction as likely as the likeliest, [0, 1]; 0: off |
    | seed | 0 to 2**64 - 1; None: the engine draws one |
    | max_tokens | most tokens to emit, at least 1; None: up to the model's limit |
    | stop | a string or several; output ends before the first that appears |
    | stop_token_ids | ids that end the output |
    | ignore_eos | EOS does not end the output |
    | logprobs | log-probabilities of the emitted token and of this many top ids a token; None: none |
    | skip_special_tokens | special tokens leave no text |

    min_tokens, the three penalties, logit_bias, bad_words, allowed_token_ids, logits_processors,
    structured_outputs and thinking_budget must be neutral: this version refuses them by name. After
    construction `stop`, `stop_token_ids` are tuples. RequestError (a ValueError) names the field and its
    value.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    bad_words: Sequence[str] | None = None
    allowed_token_ids: Sequence[int] | None = None
    logits_processors: Sequence[Callable[..., Any]] | None = None
    structured_outputs: StructuredOutputsParams | None = None
    thinking_budget: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        for name, neutral in _NEUTRAL.items():
            value = getattr(self, name)
            if not any(value is each or (type(value) in _PLAIN and value == each) for each in neutral):
                raise RequestError(f"{name} is not supported yet, leave it at {neutral[0]!r}; got {value!r}")
        self._set("n", _integer("n", self.n, "an integer of at least 1", 1))
        temperature = _number("temperature", self.temperature, "a number of at least 0", 0.0)
        if temperature and not MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE:
            raise RequestError(
                f"temperature must be 0 (greedy) or from {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}, "
                f"got {self.temperature!r}"
            )
        self._set("temperature", temperature)
        top_p = _number("top_p", self.top_p, "a number above 0 and at most 1", 0.0, 1.0)
        if not top_p:
            raise RequestError(f"top_p must be a number above 0 and at most 1, got {self.top_p!r}")
        self._set("top_p", top_p)
        self._set(
            "top_k", max(0, _integer("top_k", self.top_k, "a positive integer, or 0 or -1 for off", -1))
        )
        self._set("min_p", _number("min_p", self.min_p, "a number from 0 to 1", 0.0, 1.0))
        if self.seed is not None:
            self._set(
                "seed", _integer("seed", self.seed, "None or an integer from 0 to 2**64 - 1", 0, MAX_SEED)
            )
        if self.max_tokens is not None:
            expected = "None or an integer of at least 1"
            self._set("max_tokens", _integer("max_tokens", self.max_tokens, expected, 1))
        if self.logprobs is not None:
            self._set("logprobs", _integer("logprobs", self.logprobs, "None or an integer of at least 0", 0))
        self._set("stop", _strings("stop", (self.stop,) if isinstance(self.stop, str) else self.stop))
        self._set("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        for name in ("ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be True or False, got {getattr(self, name)!r}")

    def _set(self, name: str, value: Any) -> None:
        """Store the checked value: a plain int, float or tuple whatever type came in."""
        object.__setattr__(self, name, value)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as the tuple that it is after construction."""
        assert isinstance(self.stop, tuple)
        return self.stop


def _integer(name: str, value: Any, expected: str, minimum: int, maximum: int | None = None) -> int:
    if isinstance(value, Integral) and not isinstance(value, bool):
        number = int(value)
        if number >= minimum and (maximum is None or number <= maximum):
            return number
    raise RequestError(f"{name} must be {expected}, got {value!r}")


def _number(name: str, value: Any, expected: str, minimum: float, maximum: float = math.inf) -> float:
    if isinstance(value, Real) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isfinite(number) and minimum <= number <= maximum:
            return number
    raise RequestError(f"{name} must be {expected}, got {value!r}")


def _strings(name: str, value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise RequestError(f"{name} must be a list of strings, got {value!r}")
    for item in value:
        if not isinstance(item, str) or not item:
            raise RequestError(f"{name} must hold strings of at least one character, got {item!r}")
    return tuple(value)


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    if isinstance(value, str | bytes) or not isinstance(value, Sequence | set | frozenset):
        raise RequestError(f"{name} must be a list of token ids, got {value!r}")
    return tuple(_integer(name, item, "a list of token ids, integers of at least 0", 0) for item in value)
