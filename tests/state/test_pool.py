"""The pool: what a commit, a rejection, a rollback and a fold leave behind, ownership, ring bounds."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from metrale.errors import CapacityError, ConfigError
from metrale.state.pool import PAGE_SIZE, Pool, ring_lengths
from tests.state.rows import OPS, STATE_TENSORS, Driver, assert_equal, make_pool, shape_of

FOLD_THRESHOLDS = (0, 3, 8)
NUM_PROMPT = 5


def prefix_only(num_generated: int, conv_width: int = 4, dtype: torch.dtype = torch.float32) -> Driver:
    """A sequence of which only the rows that count were ever run, one a step."""
    driver = Driver(make_pool(conv_width, max_rows=1, dtype=dtype))
    driver.prompt(NUM_PROMPT)
    driver.decode(num_generated)
    return driver


@pytest.mark.parametrize(
    ("fold_threshold", "conv_width", "dtype"),
    [
        *((fold_threshold, width, torch.float32) for fold_threshold in FOLD_THRESHOLDS for width in (3, 4)),
        (3, 4, torch.bfloat16),
    ],
)
def test_accepting_some_of_the_rows(fold_threshold: int, conv_width: int, dtype: torch.dtype) -> None:
    """State after j of n rows equals prefix-only decode, for every j and n, and so do the rows after it."""
    num_before = 2
    for num_kept in range(6):
        plain = prefix_only(num_before + num_kept, conv_width, dtype)
        expected_state = plain.state()
        expected_rows = plain.decode(2)
        for num_rows in range(num_kept, 6):
            driver = Driver(make_pool(conv_width, fold_threshold=fold_threshold, dtype=dtype))
            driver.prompt(NUM_PROMPT)
            driver.verify(num_before, num_wrong=2)
            driver.pool.commit(driver.slot, num_before)
            driver.verify(num_kept, num_wrong=num_rows - num_kept)
            driver.pool.commit(driver.slot, num_kept)
            assert_equal(driver.state(), expected_state)
            assert_equal(driver.decode(2), expected_rows)


@st.composite
def schedules(draw: st.DrawFn) -> list[tuple[str, int, int]]:
    """Steps: verify some right and some wrong rows and keep the right ones, retry, fold, roll back."""
    verify = st.tuples(st.just("verify"), st.integers(0, 6), st.integers(0, 6)).filter(
        lambda s: s[1] + s[2] <= 6
    )
    fold = st.tuples(st.just("fold"), st.just(0), st.just(0))
    rollback = st.tuples(st.just("rollback"), st.integers(0, 4), st.just(0))
    return draw(st.lists(verify | verify | verify | fold | rollback, min_size=1, max_size=12))


@settings(deadline=None, max_examples=25)
@given(schedules(), st.sampled_from(FOLD_THRESHOLDS), st.sampled_from((0, 1, 2, 64, 65)))
def test_any_schedule_ends_in_the_prefix_only_state(
    schedule: list[tuple[str, int, int]], fold_threshold: int, num_prompt: int
) -> None:
    driver = Driver(make_pool(fold_threshold=fold_threshold))
    driver.prompt(num_prompt)
    pool, slot = driver.pool, driver.slot
    for what, first, second in schedule:
        if what == "fold":
            pool.fold(slot, OPS)
        elif what == "rollback":
            pending = pool.num_committed[slot] - int(pool.num_folded[0][slot, 0, 0])
            pool.rollback(slot, min(first, pending))
        else:
            driver.verify(first, num_wrong=second)
            driver.verify(first, num_wrong=second)  # a step that raised late is run again
            pool.commit(slot, first)
    plain = Driver(make_pool(max_rows=1))
    plain.prompt(num_prompt)
    plain.decode(driver.length - num_prompt)
    assert_equal(driver.state(), plain.state())
    assert_equal(driver.decode(), plain.decode())


@pytest.mark.parametrize("num_back", range(6))
def test_rollback_equals_never_having_committed(num_back: int) -> None:
    driver = Driver(make_pool(fold_threshold=8))
    driver.prompt(NUM_PROMPT)
    driver.verify(5)
    driver.pool.commit(driver.slot, 5)
    driver.pool.rollback(driver.slot, num_back)
    plain = prefix_only(5 - num_back)
    assert_equal(driver.state(), plain.state())
    assert_equal(driver.decode(), plain.decode())


def test_rollback_stops_at_what_is_folded() -> None:
    driver = Driver(make_pool(fold_threshold=8))
    pool, slot = driver.pool, driver.slot
    driver.prompt(NUM_PROMPT)
    with pytest.raises(CapacityError, match=f"slot {slot} cannot go back 1 rows"):
        pool.rollback(slot, 1)
    driver.decode(3)
    for num_back in (-1, 4):
        with pytest.raises(CapacityError):
            pool.rollback(slot, num_back)
        assert pool.num_committed[slot] == NUM_PROMPT + 3
    pool.rollback(slot, 3)
    pool.rollback(slot, 0)
    assert pool.num_committed[slot] == NUM_PROMPT


def test_rollback_heeds_the_layer_that_folded_furthest() -> None:
    """A step that raised half-way may have folded some layers only; rows that any layer folded are past recall."""
    driver = Driver(make_pool(fold_threshold=8))
    pool, slot = driver.pool, driver.slot
    driver.prompt(NUM_PROMPT)
    driver.decode(4)
    whole = [layer.clone() for layer in pool.num_folded]
    pool.fold(slot, OPS)
    pool.num_folded[0].copy_(whole[0])
    with pytest.raises(CapacityError):
        pool.rollback(slot, 1)
    pool.num_folded[1].copy_(whole[1])
    pool.rollback(slot, 4)


def test_a_fold_of_nothing_reads_nothing() -> None:
    driver = Driver(make_pool())
    driver.pool.fold(driver.slot, OPS)
    assert all(layer.isnan().all() for layer in driver.pool.ssm)
    driver.prompt(NUM_PROMPT)
    before = [layer[driver.slot].clone() for layer in driver.pool.ssm]
    driver.pool.fold(driver.slot, OPS)
    assert all(torch.equal(a, b[driver.slot]) for a, b in zip(before, driver.pool.ssm, strict=True))


@pytest.mark.parametrize("fold_threshold", FOLD_THRESHOLDS)
@pytest.mark.parametrize("is_prompt", [True, False])
def test_position_zero_reads_nothing(is_prompt: bool, fold_threshold: int) -> None:
    """Neither a fresh pool full of NaN nor a previous owner's rows show: a slot needs no clearing."""
    fresh = Driver(make_pool(fold_threshold=fold_threshold))
    used = Driver(make_pool(fold_threshold=fold_threshold))
    used.prompt(70)
    used.decode(9)
    used.pool.release(used.slot, used.pages)
    used.slot, used.pages = used.pool.acquire(100)
    first, second = (d.prompt(6) if is_prompt else d.verify(6) for d in (fresh, used))
    assert_equal(second, first)
    if not is_prompt:
        for driver in (fresh, used):
            driver.pool.commit(driver.slot, 6)
    assert_equal(used.state(), fresh.state())
    assert_equal(used.decode(3), fresh.decode(3))


@pytest.mark.parametrize("max_rows", [1, 2, 3, 6, 17])
@pytest.mark.parametrize("fold_threshold", [0, 1, 3, 5, 6, 8, 40])
def test_ring_length_is_what_schedules_can_reach(fold_threshold: int, max_rows: int) -> None:
    """Walk over every reachable count of pending rows under the fold rule: the most that stand in the ring at once, pending
    and new, is its length."""
    reachable, grown = {0}, {0}
    while grown:
        after = set()
        for pending in grown:
            for num_rows in range(1, max_rows + 1):
                left = 0 if pending and pending + num_rows > fold_threshold else pending
                after |= {left + num_kept for num_kept in range(num_rows + 1)}
        grown = after - reachable
        reachable |= grown
    assert ring_lengths(4, max_rows, fold_threshold)[0] == max(reachable) + max_rows


@pytest.mark.parametrize("fold_threshold", FOLD_THRESHOLDS)
def test_pool_has_rings_of_that_length(fold_threshold: int) -> None:
    for conv_width in (3, 4):
        pool = make_pool(conv_width, max_rows=6, fold_threshold=fold_threshold)
        ring, conv_ring = ring_lengths(conv_width, 6, fold_threshold)
        assert {t.shape[1] for name in ("ring_k", "ring_u", "ring_g") for t in getattr(pool, name)} == {ring}
        assert {t.shape[1] for t in pool.ring_x} == {conv_ring}


def shortened(pool: Pool, *names: str) -> Pool:
    for name in names:
        setattr(pool, name, tuple(layer[:, :-1].contiguous() for layer in getattr(pool, name)))
    return pool


@pytest.mark.parametrize("conv_width", [3, 4])
def test_a_shorter_convolution_ring_is_refused(conv_width: int) -> None:
    """Six rows of which none is kept: the row that the convolution reads first must still be there."""
    expected = prefix_only(0, conv_width).decode(3)
    sound = Driver(make_pool(conv_width))
    sound.prompt(NUM_PROMPT)
    sound.verify(0, num_wrong=6)
    assert_equal(sound.decode(3), expected)
    short = Driver(shortened(make_pool(conv_width), "ring_x"))
    short.prompt(NUM_PROMPT)
    with pytest.raises(ValueError, match="6 rows do not fit rings of"):
        short.verify(0, num_wrong=6)
    short.verify(0, num_wrong=5)


@pytest.mark.parametrize("fold_threshold", FOLD_THRESHOLDS)
def test_a_shorter_recurrence_ring_corrupts(fold_threshold: int) -> None:
    """With the most rows pending, a step's first operator overwrites the oldest of them before it was replayed."""
    for is_short in (False, True):
        pool = make_pool(fold_threshold=fold_threshold)
        driver = Driver(shortened(pool, "ring_k", "ring_u", "ring_g") if is_short else pool)
        driver.prompt(NUM_PROMPT)
        most = max(fold_threshold, 6)
        driver.decode(most - 6)
        driver.verify(6)
        pool.commit(driver.slot, 6)
        folded = int(pool.num_folded[0][driver.slot, 0, 0])
        assert driver.length - folded == most
        oldest = folded % pool.ring_k[0].shape[1]
        before = pool.ring_k[0][driver.slot, oldest].clone()
        if is_short:
            with pytest.raises(ValueError, match="do not fit a ring"):
                driver.verify(6)
        else:
            driver.verify(6)
        assert torch.equal(before, pool.ring_k[0][driver.slot, oldest]) != is_short


def test_acquire_takes_a_slot_and_pages_or_nothing() -> None:
    pool = make_pool(num_slots=2, num_pages=5)
    slot, pages = pool.acquire(3 * PAGE_SIZE + 1)
    assert (slot, len(pages)) == (0, 4)
    assert pool.page_table[0, :4].tolist() == pages
    with pytest.raises(CapacityError, match="2 pages asked, 1 free"):
        pool.acquire(PAGE_SIZE + 1)
    assert (pool.slots.num_free, pool.pages.num_free) == (1, 1)
    second, more = pool.acquire(PAGE_SIZE)
    assert second == 1
    with pytest.raises(CapacityError, match="no free slot"):
        pool.acquire(0)
    pool.release(second, more)
    with pytest.raises(CapacityError):
        pool.release(second, [])
    assert pool.pages.num_free == 1


def test_ten_thousand_events() -> None:
    """Live sequences hold distinct slots and pages, the lowest slot first, and start at position 0 whatever was there."""
    rng = random.Random(0)
    pool = make_pool(num_slots=4, num_pages=30)
    live: dict[int, list[int]] = {}
    for _ in range(10_000):
        num_positions = rng.randint(1, 10 * PAGE_SIZE)
        fits = len(live) < 4 and pool.num_pages_for(num_positions) <= pool.pages.num_free
        if rng.random() < 0.5:
            if not fits:
                with pytest.raises(CapacityError):
                    pool.acquire(num_positions)
                continue
            expected = min(set(range(4)) - set(live))
            slot, pages = pool.acquire(num_positions)
            assert slot == expected
            assert len(pages) * PAGE_SIZE >= num_positions > (len(pages) - 1) * PAGE_SIZE
            assert pool.page_table[slot, : len(pages)].tolist() == pages
            assert pool.num_committed[slot] == 0
            assert all(int(layer[slot].max()) == 0 for layer in pool.num_folded)
            live[slot] = pages
            pool.commit(slot, 9)
            for layer in pool.num_folded:
                layer[slot] = 5
        elif live:
            slot = rng.choice(list(live))
            pool.release(slot, live.pop(slot))
        held = [page for pages in live.values() for page in pages]
        assert len(set(held)) == len(held) == 30 - pool.pages.num_free
        assert pool.slots.num_free == 4 - len(live)


@pytest.mark.parametrize("sizes", [(0, 1, 1, 0), (1, 0, 1, 0), (1, 1, 0, 0), (1, 1, 1, -1)])
def test_an_impossible_pool_is_refused(sizes: tuple[int, int, int, int]) -> None:
    num_slots, num_pages, max_rows, fold_threshold = sizes
    with pytest.raises(ConfigError):
        Pool(
            shape_of(), num_slots, num_pages, 1, max_rows, torch.float32, torch.device("cpu"), fold_threshold
        )


def test_layout() -> None:
    """Layers of a kind lie in one block, states in float32, rings of keys and inputs in the activation dtype, a null slot."""
    pool = make_pool(dtype=torch.bfloat16)
    dtypes = {name: getattr(pool, name)[0].dtype for name in STATE_TENSORS}
    narrow = {"ring_k", "ring_x", "k_cache", "v_cache"}
    assert dtypes == {n: torch.bfloat16 if n in narrow else torch.float32 for n in STATE_TENSORS}
    for name in ("ssm", "num_folded", "ring_k", "ring_u", "ring_g", "ring_x"):
        layers = getattr(pool, name)
        assert len(layers) == 2
        assert all(layer.shape[0] == pool.num_slots + 1 for layer in layers)
        assert len({layer.untyped_storage().data_ptr() for layer in layers}) == 1
