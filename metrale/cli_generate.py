"""`metrale generate`: one prompt through the engine, and how it compares with plain decode.

Knows what a user sees of one generation. Knows nothing of options and of how errors are shown.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from metrale import LLM, SamplingParams
    from metrale.engine.outputs import StreamChunk


@dataclass(frozen=True)
class Generation:
    """One finished request, all that the identity covers, and what it took.

    `seconds` run from handing over the prompt to the last token; loading is not in them.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    stop_reason: int | str | None
    error: str | None
    logprobs: tuple[Mapping[int, Any], ...] | None
    seconds: float
    speculative_decoding: Mapping[str, Any]

    @property
    def tokens_per_second(self) -> float:
        return len(self.token_ids) / self.seconds if self.seconds > 0 else 0.0


def stream(llm: LLM, prompt: str, params: SamplingParams, write: Callable[[str], None]) -> Generation:
    """One prompt through an engine that has served nobody else; `write` gets each new piece of text."""
    logprobs: list[Mapping[int, Any]] = []
    texts: list[str] = []
    token_ids: list[int] = []
    last: StreamChunk | None = None
    start = time.perf_counter()
    for chunk in llm.stream(prompt, params):
        texts.append(chunk.text)
        token_ids.extend(chunk.token_ids)
        logprobs.extend(chunk.logprobs or ())
        last = chunk
        write(chunk.text)
    seconds = time.perf_counter() - start
    assert last is not None, "a stream ends with the chunk that says why"
    return Generation(
        text="".join(texts),
        token_ids=tuple(token_ids),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        error=last.error,
        logprobs=None if params.logprobs is None else tuple(logprobs),
        seconds=seconds,
        speculative_decoding=llm.stats(),
    )


def generate(llm: LLM, prompt: str, params: SamplingParams) -> Generation:
    """One prompt through an engine that has served nobody else, its output all at once."""
    start = time.perf_counter()
    output = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]
    return Generation(
        text=output.text,
        token_ids=tuple(output.token_ids),
        finish_reason=output.finish_reason,
        stop_reason=output.stop_reason,
        error=output.error,
        logprobs=output.logprobs,
        seconds=time.perf_counter() - start,
        speculative_decoding=llm.stats(),
    )


def first_difference(ours: Generation, plain: Generation) -> str | None:
    """Where a generation leaves plain decode, as a clause; None: all that the identity covers is equal."""
    for i, (a, b) in enumerate(zip(ours.token_ids, plain.token_ids, strict=False)):
        if a != b:
            return f"token {i} is {a}, plain decode gives {b}"
    if len(ours.token_ids) != len(plain.token_ids):
        return f"{len(ours.token_ids)} tokens, plain decode gives {len(plain.token_ids)}"
    for name in ("text", "finish_reason", "stop_reason", "error"):
        a, b = getattr(ours, name), getattr(plain, name)
        if a != b:
            return f"{name} is {a!r}, plain decode gives {b!r}"
    for i, (mine, theirs) in enumerate(zip(ours.logprobs or (), plain.logprobs or (), strict=True)):
        if mine != theirs:
            return f"the logprobs of token {i} are {mine}, plain decode gives {theirs}"
    return None


def showable(text: str) -> str:
    """Text with escapes for what the terminal's encoding cannot show."""
    encoding = sys.stdout.encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def write_stdout(text: str) -> None:
    """Writes and flushes; what the terminal's encoding cannot show is written as an escape."""
    sys.stdout.write(showable(text))
    sys.stdout.flush()


def as_json(result: Generation, is_identical: bool | None) -> dict[str, Any]:
    """The object of --json; `logprobs` stands in it when they were asked for."""
    out: dict[str, Any] = {
        "text": result.text,
        "token_ids": list(result.token_ids),
        "finish_reason": result.finish_reason,
        "stop_reason": result.stop_reason,
        "error": result.error,
        "tokens_per_second": result.tokens_per_second,
        "speculative_decoding": dict(result.speculative_decoding),
        "identical": is_identical,
    }
    if result.logprobs is not None:
        out["logprobs"] = [
            {str(i): {"logprob": _finite(entry.logprob), "rank": entry.rank} for i, entry in at.items()}
            for at in result.logprobs
        ]
    return out


def _finite(number: float) -> float | None:
    """JSON has no infinities."""
    return number if math.isfinite(number) else None


def table(result: Generation, plain: Generation | None) -> Table:
    """Speed and acceptance of a generation, beside a plain decode that gave the same."""
    out = Table(show_header=False)
    out.add_column("what")
    out.add_column("value")
    stats = result.speculative_decoding
    reason = "" if result.stop_reason is None else f" ({result.stop_reason!r})"
    out.add_row("finish reason", escape(showable(f"{result.finish_reason}{reason}")))
    out.add_row("tokens", f"{len(result.token_ids)} in {result.seconds:.3f} s")
    out.add_row("tokens/s", f"{result.tokens_per_second:.1f}")
    if plain is not None:
        ratio = plain.seconds / result.seconds if result.seconds > 0 else 0.0
        out.add_row("tokens/s, plain decode", f"{plain.tokens_per_second:.1f}")
        out.add_row("speed over plain decode", f"{ratio:.2f} x")
    if stats["num_drafts"]:
        rounds = stats["num_drafts"]
        by_position = "  ".join(f"{count / rounds:.2f}" for count in stats["num_accepted_tokens_per_pos"])
        out.add_row("mean acceptance length", f"{stats['mean_acceptance_length']:.2f}")
        out.add_row("acceptance by position", by_position)
        out.add_row("draft acceptance rate", f"{stats['draft_acceptance_rate']:.2f}")
        out.add_row("rounds (num_drafts)", str(rounds))
        out.add_row("num_draft_tokens", str(stats["num_draft_tokens"]))
        out.add_row("num_accepted_tokens", str(stats["num_accepted_tokens"]))
    return out
