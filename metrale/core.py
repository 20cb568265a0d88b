"""The nouns of a step. Everyone imports this file; it imports nobody and needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from metrale.sampling.params import SamplingParams
    from metrale.telemetry.statistics import SpeculationStats

PROMPT_UNIT = 64
"""Prompt rows are scheduled in units of this many at absolute multiples of it; only a prompt's tail is shorter."""


class SequenceKey(NamedTuple):
    """Identity of a sequence across steps. A batch row is never an identity."""

    sequence_id: int
    generation: int


class Draft(NamedTuple):
    """Tokens that a drafter proposes to follow a sequence's anchor."""

    token_ids: tuple[int, ...] = ()


class GroupPlan(NamedTuple):
    """One sequence's share of a step: known rows, and how many drafts may follow them.

    A generated group has one known row, the anchor. A prompt group has the prompt's rows [start, start + num_known)
    and no drafts.
    """

    key: SequenceKey
    slot: int
    start: int
    num_known: int
    num_drafts: int
    is_prompt: bool


class StepPlan(NamedTuple):
    """Generated groups, then prompt groups, each in slot order."""

    generated: tuple[GroupPlan, ...]
    prompt: tuple[GroupPlan, ...]

    @property
    def groups(self) -> tuple[GroupPlan, ...]:
        return self.generated + self.prompt


class SequenceView(NamedTuple):
    """What the pure policies may know of a running sequence."""

    key: SequenceKey
    slot: int
    order: int  # admission order
    prompt_len: int
    num_committed: int
    num_remaining: int  # tokens that may still be emitted
    last_step: int  # step that last scheduled it; -1: none yet

    @property
    def is_prompting(self) -> bool:
        return self.num_committed < self.prompt_len


class Verdict(NamedTuple):
    """What a step decided for one sequence.

    `num_rows` rows become committed and `token_ids` are emitted. `num_accepted` of the `num_drafts` verified drafts
    were kept. A chunk that does not end its prompt emits nothing.
    """

    key: SequenceKey
    num_rows: int
    text: Any  # the sequence's text bookkeeping after the tokens
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[Any, ...] = ()
    num_drafts: int = 0
    num_accepted: int = 0
    num_trimmed: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    new_text: str = ""  # what the tokens add to the text shown


@dataclass(slots=True, eq=False)
class Sequence:
    """One sample of one request while it waits or runs. Only the scheduler and the step's commit change it."""

    key: SequenceKey
    request_id: int
    sample: int
    prompt_len: int
    token_ids: list[int]  # prompt, then everything emitted; the last one is the anchor
    params: SamplingParams
    seed: int
    max_tokens: int  # most tokens to emit
    stats: SpeculationStats
    eos_token_ids: frozenset[int] = frozenset()  # empty under ignore_eos
    stop_token_ids: frozenset[int] = frozenset()
    text: Any = None  # bookkeeping of stop strings; None without a tokenizer
    shown: list[str] = field(default_factory=list)
    order: int = 0
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    num_committed: int = 0
    last_step: int = -1
    logprobs: list[Any] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None

    @property
    def num_emitted(self) -> int:
        return len(self.token_ids) - self.prompt_len

    def view(self) -> SequenceView:
        return SequenceView(
            self.key,
            self.slot,
            self.order,
            self.prompt_len,
            self.num_committed,
            self.max_tokens - self.num_emitted,
            self.last_step,
        )
