"""Keeps a drafter's faults from the sequences that it drafts for."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from contextlib import suppress
from operator import index

from torch import Tensor

from metrale.core import Draft, SequenceKey
from metrale.drafters.base import Ask, Committed, Drafter

logger = logging.getLogger(__name__)


class GuardedDrafter:
    """A drafter whose exceptions end nothing but its own work for the sequences that it was called for.

    What a drafter knows of a sequence may have a gap after a fault: it is told to forget the sequence and not asked for it
    again, unless its prompt starts over. The first fault is logged.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.inner = drafter
        self.needs_hidden = drafter.needs_hidden
        self._lost: set[SequenceKey] = set()
        self._has_warned = False

    def propose(self, asks: Seq[Ask]) -> list[Draft]:
        followed = [ask for ask in asks if ask.sequence.key not in self._lost]
        try:
            drafts = [_plain(draft) for draft in self.inner.propose(followed)]
            if len(drafts) != len(followed):
                raise ValueError(f"propose gave {len(drafts)} drafts for {len(followed)} asks")
        except Exception as error:
            self._lose([ask.sequence.key for ask in followed], error)
            return [Draft()] * len(asks)
        in_order = iter(drafts)
        return [Draft() if ask.sequence.key in self._lost else next(in_order) for ask in asks]

    def commit(self, committed: Seq[Committed], hidden: Tensor | None) -> None:
        followed = [rows for rows in committed if rows.sequence.key not in self._lost]
        try:
            self.inner.commit(followed, hidden)
        except Exception as error:
            self._lose([rows.sequence.key for rows in followed], error)

    def restart(self, key: SequenceKey) -> None:
        self._lost.discard(key)
        try:
            self.inner.restart(key)
        except Exception as error:
            self._lose([key], error)

    def release(self, key: SequenceKey) -> None:
        try:
            self.inner.release(key)
        except Exception as error:
            self._lose([], error)
        self._lost.discard(key)

    def _lose(self, keys: Seq[SequenceKey], error: Exception) -> None:
        if not self._has_warned:
            logger.warning("the drafter failed; sequences go on without it", exc_info=error)
            self._has_warned = True
        self._lost.update(keys)
        for key in keys:
            with suppress(Exception):
                self.inner.release(key)


def _plain(draft: Draft) -> Draft:
    """Its tokens as integers of the interpreter's own, whose comparisons are to be trusted."""
    return Draft(tuple(int(index(token)) for token in draft.token_ids))
