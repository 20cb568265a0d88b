"""Drafts from the checkpoint's multi-token-prediction head, chained over its own output."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

import torch
from torch import Tensor

from metrale.core import Draft, Sequence, SequenceKey
from metrale.drafters.base import Ask, Committed
from metrale.model.build import RowSpec, build_batch
from metrale.model.mtp import MtpHead
from metrale.sampling.pipeline import PickRow, choose
from metrale.state.pool import Pool


class _Rows(NamedTuple):
    """Committed rows whose place in the head's cache is not written yet."""

    sequence: Sequence
    start: int
    hidden: Tensor  # [rows, D] of the trunk
    is_prompt: bool


class _Root(NamedTuple):
    """The head's output at the newest committed row, from which a chain starts."""

    position: int
    hidden: Tensor  # [1, D]


class MtpDrafter:
    """The head's cache holds one row a committed position, made from the trunk's hidden rows alone.

    Row t pairs the trunk's hidden row t with token t + 1. Chain rows go past the committed ones and are overwritten by the
    next catch-up. Picks use the target's noise at the same positions, so that draft and target agree more often.
    """

    needs_hidden = True

    def __init__(self, head: MtpHead, pool: Pool, num_valid: int) -> None:
        self._head = head
        self._pool = pool
        self._num_valid = num_valid
        self._backlog: dict[SequenceKey, list[_Rows]] = {}
        self._roots: dict[SequenceKey, _Root] = {}

    def commit(self, committed: Seq[Committed], hidden: Tensor | None) -> None:
        assert hidden is not None
        for rows in committed:
            kept = hidden[rows.first_row : rows.first_row + rows.num_rows]
            entry = _Rows(rows.sequence, rows.start, kept, rows.is_prompt)
            self._backlog.setdefault(rows.sequence.key, []).append(entry)

    def restart(self, key: SequenceKey) -> None:
        self._backlog.pop(key, None)
        self._roots.pop(key, None)

    release = restart

    def propose(self, asks: Seq[Ask]) -> list[Draft]:
        self._catch_up()
        chains: dict[int, list[int]] = {i: [] for i in range(len(asks))}
        live = [i for i, ask in enumerate(asks) if ask.num_drafts and self._has_root(ask.sequence)]
        hidden = [self._roots[asks[i].sequence.key].hidden for i in live]
        rows = torch.cat(hidden) if hidden else None
        step = 0
        while live and rows is not None:
            picks = self._pick(rows, [asks[i].sequence for i in live], step)
            kept = []
            for at, (i, token_id) in enumerate(zip(live, picks, strict=True)):
                if token_id >= 0:
                    chains[i].append(token_id)
                    if len(chains[i]) < asks[i].num_drafts:
                        kept.append(at)
            step += 1
            live = [live[at] for at in kept]
            if live:
                rows = rows if len(kept) == rows.shape[0] else rows[kept]
                rows = self._extend(
                    rows, [asks[i].sequence for i in live], [chains[i][-1] for i in live], step
                )
        return [Draft(tuple(chains[i])) for i in range(len(asks))]

    def _has_root(self, sequence: Sequence) -> bool:
        root = self._roots.get(sequence.key)
        return root is not None and root.position == sequence.num_committed - 1

    def _pick(self, hidden: Tensor, sequences: Seq[Sequence], step: int) -> list[int]:
        """Draft `step` of each sequence from the head's rows [N, D]; -1 where the head gives no number."""
        rows = [
            PickRow(s.params, s.seed, s.sample, s.num_committed + 1 + step) for s in sequences
        ]  # the position that the draft will stand at
        return choose(self._head.logits(hidden), rows, self._head.model.ops, self._num_valid)

    def _extend(self, hidden: Tensor, sequences: Seq[Sequence], token_ids: Seq[int], step: int) -> Tensor:
        """One chain row a sequence: pairs the head's row `step` - 1 with the draft that it gave."""
        specs = [
            RowSpec(s.slot, s.num_committed - 1 + step, (token,), s.pages)
            for s, token in zip(sequences, token_ids, strict=True)
        ]
        batch = build_batch(specs, (), None, self._pool)
        return self._head.forward(batch.token_ids, hidden, batch, self._pool)

    def _catch_up(self) -> None:
        """Write the head's rows for everything committed; a sequence's entries in order, all sequences together."""
        while self._backlog:
            entries = sorted(
                (rows[0] for rows in self._backlog.values()), key=lambda e: (e.is_prompt, e.sequence.slot)
            )
            specs = [self._spec(entry) for entry in entries]
            num_generated = sum(not entry.is_prompt for entry in entries)
            batch = build_batch(specs[:num_generated], specs[num_generated:], None, self._pool)
            hidden = (
                entries[0].hidden if len(entries) == 1 else torch.cat([entry.hidden for entry in entries])
            )
            out = self._head.forward(batch.token_ids, hidden, batch, self._pool)
            end = 0
            for entry in entries:
                end += entry.hidden.shape[0]
                key = entry.sequence.key
                self._roots[key] = _Root(entry.start + entry.hidden.shape[0] - 1, out[end - 1 : end])
                remaining = self._backlog[key]
                del remaining[0]
                if not remaining:
                    del self._backlog[key]

    def _spec(self, entry: _Rows) -> RowSpec:
        first = entry.start + 1
        tokens = entry.sequence.token_ids[first : first + entry.hidden.shape[0]]
        return RowSpec(entry.sequence.slot, entry.start, tokens, entry.sequence.pages)
