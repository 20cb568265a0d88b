"""How many drafts a sequence gets. Pure: imports core alone."""

from __future__ import annotations

from typing import NamedTuple

from metrale.core import SequenceView


class Depth(NamedTuple):
    """Drafts to verify, and the cap that decided."""

    num_drafts: int
    bound_by: str


def depth(
    view: SequenceView, num_running: int, num_speculative_tokens: int, max_num_seqs_speculative: int
) -> Depth:
    """The configured depth under the caps of width and of the sequence's remaining tokens.

    A verify emits at most one token more than it has drafts, so the last token that may be emitted needs no draft row.
    """
    caps = [
        Depth(num_speculative_tokens, "configured"),
        Depth(max(0, view.num_remaining - 1), "remaining"),
    ]
    if num_running > max_num_seqs_speculative:
        caps.append(Depth(0, "width"))
    return min(caps, key=lambda cap: cap.num_drafts)
