"""Counters of speculation, for one request or for all of an engine's."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from itertools import zip_longest
from typing import Any


@dataclass
class SpeculationStats:
    """Counts that only grow. A round is a verify of at least one draft.

    `num_draft_tokens` counts verified drafts; `num_trimmed_tokens` those that were proposed and dropped before the verify.
    `num_accepted_tokens_per_pos[i]` counts rounds that kept at least i + 1 drafts, `acceptance_histogram[i]` rounds
    that kept exactly i. Tokens cut off by a stop count as neither accepted nor emitted.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_trimmed_tokens: int = 0
    num_emitted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)
    acceptance_histogram: list[int] = field(default_factory=list)

    def record(self, num_drafts: int, num_accepted: int, num_emitted: int) -> None:
        """Count one verify of a sequence: drafts verified, drafts kept, tokens emitted."""
        if not 0 <= num_accepted <= num_drafts:
            raise ValueError(f"statistics: {num_accepted} accepted of {num_drafts} drafts")
        self.num_emitted_tokens += num_emitted
        if not num_drafts:
            return
        self.num_drafts += 1
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_accepted
        per_pos, histogram = self.num_accepted_tokens_per_pos, self.acceptance_histogram
        per_pos.extend([0] * (num_drafts - len(per_pos)))
        histogram.extend([0] * (num_drafts + 1 - len(histogram)))
        for position in range(num_accepted):
            per_pos[position] += 1
        histogram[num_accepted] += 1

    @staticmethod
    def sum(parts: Iterable[SpeculationStats]) -> SpeculationStats:
        """Counters of several sequences together."""
        total = SpeculationStats()
        for part in parts:
            for name in (counter.name for counter in fields(SpeculationStats)):
                ours, theirs = getattr(total, name), getattr(part, name)
                is_list = isinstance(ours, list)
                both = (
                    [a + b for a, b in zip_longest(ours, theirs, fillvalue=0)] if is_list else ours + theirs
                )
                setattr(total, name, both)
        return total

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted / rounds: tokens per verify, the bonus included; 1.0 before the first round."""
        return 1.0 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted / verified drafts; 0.0 before the first round."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Every counter, and the two figures derived from them, by name."""
        return asdict(self) | {
            "mean_acceptance_length": self.mean_acceptance_length,
            "draft_acceptance_rate": self.draft_acceptance_rate,
        }
