"""Where a sequence ends: the cut of a step's new tokens at the earliest stop or limit. Pure."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import NamedTuple, Protocol


class TextState(Protocol):
    """A sequence's text bookkeeping, as the cut needs it.

    `push` takes one token and returns text that may be shown and the stop string that the token completed, if
    any. `flush` returns the text that is still held back. `copy` is cheap.
    """

    def copy(self) -> TextState: ...

    def push(self, token_id: int) -> tuple[str, str | None]: ...

    def flush(self) -> str: ...


class FinishView(NamedTuple):
    """What the cut may know of a sequence before the step.

    `num_remaining` >= 1 counts tokens that may still be emitted: what max_tokens leaves, or the room up to
    max_model_len where that is less. `eos_token_ids` is empty under ignore_eos. `text` is None without a
    tokenizer.
    """

    num_remaining: int
    eos_token_ids: Set[int] = frozenset()
    stop_token_ids: Set[int] = frozenset()
    text: TextState | None = None


class Cut(NamedTuple):
    """The first `num_kept` new tokens are emitted; the others never happened.

    `finish_reason` is "stop", "length", "error" or None for a sequence that goes on. `stop_reason` is the
    stop id or string, None for EOS and for other ends. `new_text` is what the kept tokens add to the text
    shown; with a finish reason it completes the text. `text` is the bookkeeping after the kept tokens, to be
    stored at the commit.
    """

    num_kept: int
    finish_reason: str | None
    stop_reason: int | str | None
    new_text: str
    text: TextState | None


def scan(new_token_ids: Sequence[int], view: FinishView) -> Cut:
    """Cut a step's new tokens (accepted drafts, then one more) at the earliest end.

    Tokens are taken in order. At one token EOS comes before a stop id, a stop before a stop string, and each
    of them before a length. The token that completes a stop is kept; the text of EOS, of a stop id and of a
    stop string is left out. An invalid pick (-1) is not kept and ends the sequence with "error". `view.text`
    is not changed: a verdict that is never committed leaves no trace.

    ValueError where `view` leaves no token to emit.
    """
    if view.num_remaining < 1:
        raise ValueError(f"finish: num_remaining {view.num_remaining}, expected at least 1")
    text = None if view.text is None else view.text.copy()
    shown: list[str] = []

    def end(num_kept: int, finish_reason: str, stop_reason: int | None = None) -> Cut:
        if text is not None:
            shown.append(text.flush())
        return Cut(num_kept, finish_reason, stop_reason, "".join(shown), text)

    for num_kept, token_id in enumerate(new_token_ids, start=1):
        if token_id < 0:
            return end(num_kept - 1, "error")
        if token_id in view.eos_token_ids:
            return end(num_kept, "stop")
        if token_id in view.stop_token_ids:
            return end(num_kept, "stop", token_id)
        if text is not None:
            new_text, stop_string = text.push(token_id)
            shown.append(new_text)
            if stop_string is not None:
                return Cut(num_kept, "stop", stop_string, "".join(shown), text)
        if num_kept == view.num_remaining:
            return end(num_kept, "length")
    return Cut(len(new_token_ids), None, None, "".join(shown), text)
