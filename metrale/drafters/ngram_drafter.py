"""Drafts copied from each sequence's own history."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from torch import Tensor

from metrale.core import Draft, SequenceKey
from metrale.drafters.base import Ask, Committed
from metrale.drafters.ngram import NgramIndex


class NgramDrafter:
    """One index a sequence, fed with what the sequence has gained since it was last asked."""

    needs_hidden = False

    def __init__(self, min_match: int, max_match: int) -> None:
        self._bounds = (min_match, max_match)
        self._indices: dict[SequenceKey, NgramIndex] = {}

    def propose(self, asks: Seq[Ask]) -> list[Draft]:
        return [self._draft(ask) for ask in asks]

    def _draft(self, ask: Ask) -> Draft:
        sequence = ask.sequence
        index = self._indices.get(sequence.key)
        if index is None:
            index = self._indices[sequence.key] = NgramIndex(*self._bounds)
        index.extend(sequence.token_ids[len(index) :])
        return Draft(index.propose(ask.num_drafts))

    def commit(self, committed: Seq[Committed], hidden: Tensor | None) -> None:
        """Nothing to learn: history is read at the next proposal."""

    def restart(self, key: SequenceKey) -> None:
        """History stays as it is when rows are computed again."""

    def release(self, key: SequenceKey) -> None:
        self._indices.pop(key, None)
