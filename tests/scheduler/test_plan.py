"""The planner as properties: budget, order, units, progress at any budget."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from metrale.core import PROMPT_UNIT, SequenceKey, SequenceView, StepPlan
from metrale.scheduler.plan import plan_step

BUDGETS = st.sampled_from((1, 2, 3, 7, 63, 64, 65, 100, 128, 129, 200, 2048))


@st.composite
def running(draw: st.DrawFn, max_size: int = 9) -> list[SequenceView]:
    """Sequences in distinct slots, admitted in any order, some inside their prompt and some past it."""
    slots = draw(st.lists(st.integers(0, 11), unique=True, max_size=max_size))
    orders = draw(st.permutations(range(len(slots))))
    views = []
    for slot, order in zip(slots, orders, strict=True):
        prompt_len = draw(st.sampled_from((1, 2, 63, 64, 65, 127, 128, 129, 300)))
        units = range(0, prompt_len, PROMPT_UNIT)
        committed = draw(st.sampled_from((*units, prompt_len, prompt_len + 5)))
        remaining, last_step = draw(st.integers(1, 20)), draw(st.integers(-1, 6))
        views.append(
            SequenceView(SequenceKey(100 + slot, 0), slot, order, prompt_len, committed, remaining, last_step)
        )
    return views


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[SequenceView], dict[SequenceKey, int], int]:
    """Views, wanted depth of each, budget."""
    views = draw(running())
    wanted = {v.key: draw(st.integers(0, 16)) for v in views}
    return views, wanted, draw(BUDGETS)


def plan(views: Sequence[SequenceView], wanted: dict[SequenceKey, int], max_rows: int) -> StepPlan:
    return plan_step(views, lambda view: wanted[view.key], max_rows)


def num_rows(step: StepPlan) -> int:
    return sum(g.num_known + g.num_drafts for g in step.groups)


@settings(deadline=None)
@given(cases())
def test_budget(case: tuple[list[SequenceView], dict[SequenceKey, int], int]) -> None:
    """Kept, but for the first prompt unit, which then is the only prompt group, in a step without drafts."""
    views, wanted, max_rows = case
    step = plan(views, wanted, max_rows)
    over = num_rows(step) - max_rows
    if over > 0:
        (group,) = step.prompt
        assert group.num_known <= PROMPT_UNIT
        assert over <= group.num_known
        assert all(g.num_drafts == 0 for g in step.generated)


@settings(deadline=None)
@given(cases())
def test_nobody_is_left_out_without_cause(
    case: tuple[list[SequenceView], dict[SequenceKey, int], int],
) -> None:
    views, wanted, max_rows = case
    step = plan(views, wanted, max_rows)
    generating = {v.key for v in views if not v.is_prompting}
    prompting = sorted((v for v in views if v.is_prompting), key=lambda v: v.order)
    assert len(step.generated) == min(len(generating), max_rows)
    served = {g.key: g for g in step.prompt}
    assert set(served) == {v.key for v in prompting[: len(served)]}, "prompts are served in admission order"
    assert bool(prompting) == bool(served), "a step with waiting prompts holds one"
    known = sum(g.num_known for g in step.groups)
    for view in prompting:
        rows = served[view.key].num_known if view.key in served else 0
        missing = view.prompt_len - view.num_committed - rows
        if missing:
            assert min(missing, PROMPT_UNIT) > max_rows - known, "a unit that fits was left out"
            break
    if any(g.num_drafts < wanted[g.key] for g in step.generated):
        assert num_rows(step) >= max_rows, "drafts were cut with room left"


@settings(deadline=None)
@given(cases())
def test_who_waited_longest_goes_first(case: tuple[list[SequenceView], dict[SequenceKey, int], int]) -> None:
    views, wanted, max_rows = case
    chosen = {g.key for g in plan(views, wanted, max_rows).generated}
    waits = [(v.last_step, v.slot, v.key) for v in views if not v.is_prompting]
    assert chosen == {key for _, _, key in sorted(waits)[: max(1, max_rows)]}


@settings(deadline=None)
@given(cases())
def test_groups(case: tuple[list[SequenceView], dict[SequenceKey, int], int]) -> None:
    """One group a sequence, of its class, in slot order, at its first uncommitted row; prompts in whole units or to their end."""
    views, wanted, max_rows = case
    step = plan(views, wanted, max_rows)
    by_key = {v.key: v for v in views}
    assert len({g.key for g in step.groups}) == len(step.groups)
    for groups in (step.generated, step.prompt):
        assert [g.slot for g in groups] == sorted(g.slot for g in groups)
    for group in step.groups:
        view = by_key[group.key]
        assert (group.slot, group.start, group.is_prompt) == (
            view.slot,
            view.num_committed,
            view.is_prompting,
        )
    for group in step.generated:
        assert group.num_known == 1
        assert 0 <= group.num_drafts <= wanted[group.key]
    for group in step.prompt:
        end = group.start + group.num_known
        assert group.num_known > 0
        assert group.num_drafts == 0
        assert group.start % PROMPT_UNIT == 0
        assert end == by_key[group.key].prompt_len or (
            end % PROMPT_UNIT == 0 and end < by_key[group.key].prompt_len
        )


@settings(deadline=None)
@given(cases(), st.integers(0, 1 << 30))
def test_a_plan_is_a_function_of_the_set_of_views(
    case: tuple[list[SequenceView], dict[SequenceKey, int], int], seed: int
) -> None:
    views, wanted, max_rows = case
    expected = plan(views, wanted, max_rows)
    shuffled = views.copy()
    random.Random(seed).shuffle(shuffled)
    assert plan(shuffled, wanted, max_rows) == expected
    assert plan(views, wanted, max_rows) == expected


@settings(deadline=None)
@given(running(), st.integers(0, 16), BUDGETS)
def test_a_negative_or_zero_depth_gives_no_drafts(
    views: list[SequenceView], depth: int, max_rows: int
) -> None:
    assert all(g.num_drafts == 0 for g in plan_step(views, lambda view: -depth, max_rows).groups)


@settings(deadline=None)
@given(running(), st.integers(0, 5), BUDGETS, st.integers(0, 1 << 30))
def test_everyone_gets_on(views: list[SequenceView], depth: int, max_rows: int, seed: int) -> None:
    """Run to the end: a generating sequence is served at least once in as many steps as there are sequences, a prompt
    once the units ahead of it are done."""
    rng = random.Random(seed)
    live = {v.key: v for v in views}
    waits = dict.fromkeys(live, 0)
    number = max((v.last_step for v in views), default=0)
    while live:
        number += 1
        prompts = [v for v in live.values() if v.is_prompting]
        step = plan_step(list(live.values()), lambda view: min(depth, view.num_remaining - 1), max_rows)
        served = {g.key: g for g in step.groups}
        for key, view in list(live.items()):
            if key not in served:
                waits[key] += 1
                if view.is_prompting:
                    assert any(v.order < view.order for v in prompts), "a prompt waits for earlier ones alone"
                else:
                    assert waits[key] < len(views)
                continue
            waits[key] = 0
            group = served[key]
            if view.is_prompting:
                emitted = int(group.start + group.num_known == view.prompt_len)
                rows = group.num_known
            else:
                emitted = rows = 1 + rng.randint(0, group.num_drafts)
            assert emitted <= view.num_remaining
            if emitted == view.num_remaining:
                del live[key]
            else:
                live[key] = view._replace(
                    num_committed=view.num_committed + rows,
                    num_remaining=view.num_remaining - emitted,
                    last_step=number,
                )


def test_by_hand() -> None:
    """Two anchors, one unit of the older prompt, then drafts in slot order until the budget of 70 is spent."""
    views = [
        SequenceView(SequenceKey(1, 0), 3, 0, 10, 12, 9, 4),
        SequenceView(SequenceKey(2, 0), 1, 1, 10, 30, 9, 4),
        SequenceView(SequenceKey(3, 0), 2, 3, 200, 64, 9, 4),
        SequenceView(SequenceKey(4, 0), 0, 2, 200, 64, 9, 4),
    ]
    step = plan_step(views, lambda view: 3, 70)
    assert [(g.key.sequence_id, g.slot, g.start, g.num_known, g.num_drafts) for g in step.groups] == [
        (2, 1, 30, 1, 3),
        (1, 3, 12, 1, 1),
        (4, 0, 64, 64, 0),
    ]
