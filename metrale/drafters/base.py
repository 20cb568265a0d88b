"""The protocol of a drafter. Whatever it proposes, or fails to, changes speed and never the output."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple, Protocol

from torch import Tensor

from metrale.core import Draft, Sequence, SequenceKey


class Ask(NamedTuple):
    """A request for up to `num_drafts` tokens after the sequence's anchor. The sequence is read, never changed."""

    sequence: Sequence
    num_drafts: int


class Committed(NamedTuple):
    """Rows [start, start + num_rows) of a sequence that became part of it, at `first_row` of the step's hidden rows."""

    sequence: Sequence
    start: int
    first_row: int
    num_rows: int
    is_prompt: bool


class Drafter(Protocol):
    """Proposes drafts; holds whatever it needs by sequence key.

    `needs_hidden` says whether `commit` is to be given the step's hidden rows.
    """

    needs_hidden: bool

    def propose(self, asks: Seq[Ask]) -> list[Draft]:
        """One draft an ask, in order; each may be shorter than asked, or empty."""

    def commit(self, committed: Seq[Committed], hidden: Tensor | None) -> None:
        """Learn which rows were committed. `hidden` [T, D] is the trunk's output after the final norm."""

    def restart(self, key: SequenceKey) -> None:
        """Forget a sequence's rows: its prompt starts over."""

    def release(self, key: SequenceKey) -> None:
        """Forget a sequence."""
