"""Slots and pages: one owner each, lowest slot first, all pages or none."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metrale.errors import CapacityError
from metrale.state.slots import PageAllocator, SlotAllocator

EVENTS = st.lists(st.tuples(st.booleans(), st.integers(0, 100)), max_size=80)


@settings(deadline=None)
@given(st.integers(1, 6), EVENTS)
def test_the_lowest_free_slot_comes_first(num_slots: int, events: list[tuple[bool, int]]) -> None:
    allocator = SlotAllocator(num_slots)
    free, used = set(range(num_slots)), list[int]()
    for is_take, number in events:
        if is_take and free:
            slot = allocator.take()
            assert slot == min(free)
            free.remove(slot)
            used.append(slot)
        elif is_take:
            with pytest.raises(CapacityError):
                allocator.take()
        elif used:
            slot = used.pop(number % len(used))
            allocator.release(slot)
            free.add(slot)
        assert allocator.num_free == len(free)


@pytest.mark.parametrize("slot", [-1, 1, 2])
def test_only_a_held_slot_can_be_released(slot: int) -> None:
    allocator = SlotAllocator(2)
    allocator.take()
    with pytest.raises(CapacityError, match=f"slot {slot} is not in use"):
        allocator.release(slot)
    assert (allocator.take(), allocator.num_free) == (1, 0), "the refusal changed nothing"


def test_a_slot_is_released_once() -> None:
    allocator = SlotAllocator(2)
    slot = allocator.take()
    allocator.release(slot)
    with pytest.raises(CapacityError):
        allocator.release(slot)
    assert [allocator.take(), allocator.take()] == [0, 1]
    with pytest.raises(CapacityError):
        allocator.take()


@settings(deadline=None)
@given(st.integers(1, 12), EVENTS)
def test_pages_have_one_owner_and_come_all_or_none(num_pages: int, events: list[tuple[bool, int]]) -> None:
    allocator = PageAllocator(num_pages)
    owners: list[list[int]] = []
    for is_take, number in events:
        held = sum(map(len, owners))
        if is_take:
            count = number % (num_pages + 2)
            if count > num_pages - held:
                with pytest.raises(CapacityError, match=f"{count} pages asked, {num_pages - held} free"):
                    allocator.take(count)
            else:
                owners.append(allocator.take(count))
                assert len(owners[-1]) == count
        elif owners:
            allocator.release(owners.pop(number % len(owners)))
        taken = [page for pages in owners for page in pages]
        assert len(set(taken)) == len(taken)
        assert set(taken) <= set(range(num_pages))
        assert allocator.num_free == num_pages - len(taken)


@pytest.mark.parametrize("order", [None, (3, 0, 2, 1)])
def test_fresh_pages_follow_the_order(order: Iterable[int] | None) -> None:
    expected = list(range(4) if order is None else order)
    allocator = PageAllocator(4, order)
    assert allocator.take(3) + allocator.take(1) == expected


def test_a_page_is_released_once() -> None:
    allocator = PageAllocator(3)
    pages = allocator.take(2)
    allocator.release(pages)
    with pytest.raises(CapacityError, match=f"page {pages[0]} is not in use"):
        allocator.release(pages)
    assert allocator.num_free == 3
    assert sorted(allocator.take(3)) == [0, 1, 2]


def test_ten_thousand_events() -> None:
    """Admissions and ends in any order: two live owners never share a slot or a page."""
    rng = random.Random(0)
    slots, pages = SlotAllocator(4), PageAllocator(40, rng.sample(range(40), 40))
    live: list[tuple[int, list[int]]] = []
    for _ in range(10_000):
        count = rng.randint(1, 15)
        if rng.random() < 0.55 and slots.num_free and count <= pages.num_free:
            live.append((slots.take(), pages.take(count)))
        elif live:
            slot, held = live.pop(rng.randrange(len(live)))
            slots.release(slot)
            pages.release(held)
        taken = [page for _, held in live for page in held]
        assert len({slot for slot, _ in live}) == len(live) == 4 - slots.num_free
        assert len(set(taken)) == len(taken) == 40 - pages.num_free
