"""What a caller gets back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from metrale.sampling.logprobs import Logprob


@dataclass(frozen=True)
class CompletionOutput:
    """One sample of a request.

    `token_ids` and `logprobs` run up to and including the token that completed a stop; `text` leaves the stop out.
    `finish_reason` is "stop", "length", "abort" or "error"; `stop_reason` is the stop string or stop token id, None for EOS
    and for a length. `error` says what went wrong when the reason is "error".
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[dict[int, Logprob], ...] | None
    finish_reason: str | None
    stop_reason: int | str | None
    error: str | None = None


@dataclass(frozen=True)
class RequestMetrics:
    """`speculative_decoding` holds the fields of `LLM.stats()` for this request alone."""

    speculative_decoding: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RequestOutput:
    """All samples of one request; `prompt` is None where token ids were given."""

    request_id: int
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    metrics: RequestMetrics


@dataclass(frozen=True)
class StreamChunk:
    """What is new since the last chunk of a stream.

    `text` may lag behind `token_ids`, by a character that is not whole or the beginning of a stop string. `logprobs`
    holds one entry a token, None unless asked for. `finish_reason` is None until a sample's last chunk, `stop_reason` and
    `error` come with it (see `CompletionOutput`). `index` is the sample's.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    stop_reason: int | str | None = None
    index: int = 0
    error: str | None = None
    logprobs: tuple[dict[int, Logprob], ...] | None = None
