"""Which rows the next step holds. Pure: imports core alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from metrale.core import PROMPT_UNIT, GroupPlan, SequenceView, StepPlan

DepthPolicy = Callable[[SequenceView], int]


def plan_step(views: Sequence[SequenceView], depth: DepthPolicy, max_rows: int) -> StepPlan:
    """Rows for one step within a budget of `max_rows`.

    Known tokens come first: one anchor row for each generating sequence, those that waited longest first, then prompt units in
    admission order; drafts take what is left, in slot order. A step with waiting prompts holds at least one prompt unit,
    over the budget if need be, and a step with generating sequences at least one anchor, so that everyone gets
    on at any budget. `depth` gives the drafts wanted for a sequence.
    """
    generating = sorted((v for v in views if not v.is_prompting), key=lambda v: (v.last_step, v.slot))
    prompting = sorted((v for v in views if v.is_prompting), key=lambda v: v.order)
    anchors = generating[: max(1, max_rows)]
    left = max_rows - len(anchors)
    prompt: list[GroupPlan] = []
    for view in prompting:
        num_rows = _chunk_rows(view, left)
        if not num_rows and not prompt:
            num_rows = min(PROMPT_UNIT, view.prompt_len - view.num_committed)
        if not num_rows:
            break
        prompt.append(
            GroupPlan(view.key, view.slot, view.num_committed, num_rows, num_drafts=0, is_prompt=True)
        )
        left -= num_rows
    generated: list[GroupPlan] = []
    for view in sorted(anchors, key=lambda v: v.slot):
        num_drafts = max(0, min(depth(view), left))
        generated.append(
            GroupPlan(
                view.key, view.slot, view.num_committed, num_known=1, num_drafts=num_drafts, is_prompt=False
            )
        )
        left -= num_drafts
    return StepPlan(tuple(generated), tuple(sorted(prompt, key=lambda g: g.slot)))


def _chunk_rows(view: SequenceView, left: int) -> int:
    """Prompt rows that fit: all that remain, or whole units."""
    remaining = view.prompt_len - view.num_committed
    return remaining if remaining <= left else max(0, left) // PROMPT_UNIT * PROMPT_UNIT
