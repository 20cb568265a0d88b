"""One step: propose, one ragged forward, pick, cut. It commits nothing until every verdict stands."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import NamedTuple, Protocol

from torch import Tensor

from metrale.core import Draft, GroupPlan, Sequence, SequenceKey, StepPlan, Verdict
from metrale.drafters.base import Ask, Committed, Drafter
from metrale.errors import CapacityError
from metrale.model.batch import Batch
from metrale.model.build import RowSpec, build_batch
from metrale.sampling.pipeline import Pick, PickRow
from metrale.scheduler.accept import accept
from metrale.scheduler.finish import FinishView, scan
from metrale.state.pool import Pool


class Model(Protocol):
    """What a step asks of the target."""

    def forward(self, batch: Batch, pool: Pool) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


Picker = Callable[[Tensor, Seq[PickRow]], list[Pick]]


class RowGroup(NamedTuple):
    """A sequence's rows in this step; `wanted` are the rows whose picks count, from the group's first row."""

    plan: GroupPlan
    sequence: Sequence
    first_row: int
    token_ids: tuple[int, ...]
    draft: tuple[int, ...]
    num_trimmed: int
    wanted: range

    def pick_rows(self) -> list[PickRow]:
        """The pick of a row stands one position after it."""
        sequence, first = self.sequence, self.plan.start + 1
        return [PickRow(sequence.params, sequence.seed, sequence.sample, first + row) for row in self.wanted]


class Prepared(NamedTuple):
    """A step's rows, ready for the forward."""

    groups: tuple[RowGroup, ...]
    batch: Batch


class Outcome(NamedTuple):
    """A step's verdicts and the hidden rows behind them. Nothing is committed yet."""

    verdicts: tuple[Verdict, ...]
    committed: tuple[Committed, ...]
    hidden: Tensor


class Step:
    """Runs plans against a model. It holds collaborators and no state of its own."""

    def __init__(
        self, model: Model, pool: Pool, drafter: Drafter | None, pick: Picker, num_valid: int
    ) -> None:
        self._model = model
        self._pool = pool
        self._drafter = drafter
        self._pick = pick
        self._num_valid = num_valid

    def prepare(
        self, plan: StepPlan, sequences: Mapping[SequenceKey, Sequence], *, drafting: bool = True
    ) -> Prepared:
        """Drafts and a batch for a plan. Where this raises no row was written but a drafter's own. Without `drafting`
        the drafter is not called at all."""
        self._reserve(plan, sequences)
        drafts = self._propose(plan, sequences) if drafting else []
        groups = self._rows(plan, sequences, drafts)
        return Prepared(tuple(groups), self._batch(groups, len(plan.generated)))

    def run(self, prepared: Prepared) -> Outcome:
        """Forward, pick, cut. It writes rings and pages past the committed rows only; prompt chunks alone advance a
        state in place, so their sequences start over when this raises."""
        groups, batch = prepared
        hidden = self._model.forward(batch, self._pool)
        logits = self._model.logits(hidden.index_select(0, batch.logit_rows))
        picks = iter(self._pick(logits, [row for group in groups for row in group.pick_rows()]))
        verdicts = tuple(_verdict(group, [next(picks) for _ in group.wanted]) for group in groups)
        committed = tuple(
            Committed(g.sequence, g.plan.start, g.first_row, v.num_rows, g.plan.is_prompt)
            for g, v in zip(groups, verdicts, strict=True)
        )
        return Outcome(verdicts, committed, hidden)

    def commit(self, outcome: Outcome) -> None:
        """The only advance: the verdicts' rows become part of their sequences."""
        for rows in outcome.committed:
            self._pool.commit(rows.sequence.slot, rows.num_rows)
            rows.sequence.num_committed += rows.num_rows
        if self._drafter is None:
            return
        going_on = zip(outcome.committed, outcome.verdicts, strict=True)
        live = [rows for rows, verdict in going_on if verdict.finish_reason is None]
        self._drafter.commit(live, outcome.hidden if self._drafter.needs_hidden else None)

    def _reserve(self, plan: StepPlan, sequences: Mapping[SequenceKey, Sequence]) -> None:
        """Raise CapacityError before any device work where a group passes its ring or its pages."""
        for group in plan.groups:
            num_rows = group.num_known + group.num_drafts
            num_positions = len(sequences[group.key].pages) * self._pool.page_size
            if group.start + num_rows > num_positions or (
                not group.is_prompt and num_rows > self._pool.max_rows
            ):
                raise CapacityError(f"{num_rows} rows at position {group.start} do not fit slot {group.slot}")

    def _propose(self, plan: StepPlan, sequences: Mapping[SequenceKey, Sequence]) -> list[Draft]:
        if self._drafter is None:
            return []
        return self._drafter.propose([Ask(sequences[g.key], g.num_drafts) for g in plan.generated])

    def _rows(
        self, plan: StepPlan, sequences: Mapping[SequenceKey, Sequence], drafts: Seq[Draft]
    ) -> list[RowGroup]:
        groups: list[RowGroup] = []
        first_row = 0
        for i, group in enumerate(plan.groups):
            sequence = sequences[group.key]
            known = sequence.token_ids[group.start : group.start + group.num_known]
            proposed = drafts[i].token_ids if i < len(drafts) else ()
            draft = self._usable(proposed, group.num_drafts)
            tokens = (*known, *draft)
            is_last = group.start + len(tokens) >= sequence.prompt_len
            num_wanted = (1 if is_last else 0) if group.is_prompt else len(tokens)
            wanted = range(len(tokens) - num_wanted, len(tokens))
            groups.append(
                RowGroup(group, sequence, first_row, tokens, draft, len(proposed) - len(draft), wanted)
            )
            first_row += len(tokens)
        return groups

    def _usable(self, proposed: Seq[int], limit: int) -> tuple[int, ...]:
        """The drafts before the first that is no token, at most `limit`."""
        draft = tuple(proposed[:limit])
        for i, token in enumerate(draft):
            if not 0 <= token < self._num_valid:
                return draft[:i]
        return draft

    def _batch(self, groups: Seq[RowGroup], num_generated: int) -> Batch:
        specs = [RowSpec(g.plan.slot, g.plan.start, g.token_ids, g.sequence.pages) for g in groups]
        wanted = [g.first_row + row for g in groups for row in g.wanted]
        return build_batch(specs[:num_generated], specs[num_generated:], wanted, self._pool)


def _verdict(group: RowGroup, picks: Seq[Pick]) -> Verdict:
    """Accept, then cut at the earliest end."""
    key, num_rows = group.plan.key, len(group.token_ids)
    if not picks:  # the chunk ends inside the prompt
        return Verdict(key=key, num_rows=num_rows, text=group.sequence.text)
    num_accepted = accept(group.draft, [pick.token_id for pick in picks])
    emitted = picks[: num_accepted + 1]
    sequence = group.sequence
    view = FinishView(
        sequence.max_tokens - sequence.num_emitted,
        sequence.eos_token_ids,
        sequence.stop_token_ids,
        sequence.text,
    )
    cut = scan([pick.token_id for pick in emitted], view)
    kept = emitted[: cut.num_kept]
    return Verdict(
        key=key,
        num_rows=num_rows if group.plan.is_prompt else len(kept),
        token_ids=tuple(pick.token_id for pick in kept),
        logprobs=tuple(pick.logprobs for pick in kept),
        num_drafts=len(group.draft),
        num_accepted=min(num_accepted, len(kept)),
        num_trimmed=group.num_trimmed,
        finish_reason=cut.finish_reason,
        stop_reason=cut.stop_reason,
        new_text=cut.new_text,
        text=cut.text,
    )
