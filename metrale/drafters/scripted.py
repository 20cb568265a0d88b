"""A drafter that follows a script: how many drafts to propose, and how many of them the target will accept."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from torch import Tensor

from metrale.core import Draft, Sequence, SequenceKey
from metrale.drafters.base import Ask, Committed

Script = Callable[[Sequence, int], tuple[int, int]]
"""(sequence, most drafts wanted) -> (drafts to propose, drafts to get right)."""


class ScriptedDrafter:
    """Drives any schedule of drafts and rejections without a trained model, for tests and for synthetic benchmarks.

    `answers` gives, for a request and sample, the tokens that the target emits; a draft meant to be wrong is another valid id.
    """

    needs_hidden = False

    def __init__(self, answers: Callable[[Sequence], Seq[int]], script: Script, num_valid: int) -> None:
        self._answers = answers
        self._script = script
        self._num_valid = num_valid

    def propose(self, asks: Seq[Ask]) -> list[Draft]:
        drafts = []
        for sequence, limit in asks:
            num_drafts, num_right = self._script(sequence, limit)
            num_drafts = min(num_drafts, limit)
            truth = list(self._answers(sequence)[sequence.num_emitted :][:num_drafts])
            truth += [0] * (num_drafts - len(truth))
            wrong = [(token + 1) % self._num_valid for token in truth[num_right:]]
            drafts.append(Draft((*truth[:num_right], *wrong)))
        return drafts

    def commit(self, committed: Seq[Committed], hidden: Tensor | None) -> None:
        pass

    def restart(self, key: SequenceKey) -> None:
        pass

    def release(self, key: SequenceKey) -> None:
        pass
