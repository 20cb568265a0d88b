"""`rotary_store` and attention over shuffled pages: parity, splits, and rows that do not see one another."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from metrale import reference
from metrale.kernels import attention_verify as module
from metrale.kernels.attention_verify import attention_prefill, attention_verify
from metrale.kernels.products import NUM_PARTS
from metrale.kernels.rotary_store import rotary_store
from tests.kernels.suite.cases import DTYPES, assert_near, randn
from tests.reference.oracles import groups_of

ORACLE = reference.ops()
PAGE_SIZE, NUM_PAGES, EPS = 16, 24, 1e-6
PAGES = [[3, 1, 0, 5, 2, 7, 8, 9, 20], [4, 6, 10, 11, 12, 13, 14, 15, 21]]
SHAPES = [(6, 2, 40, 16), (2, 2, 16, 16), (4, 1, 64, 24)]  # query heads, key heads, dim, turning dims


class Heads:
    def __init__(self, shape: tuple[int, int, int, int], num_rows: int, dtype: torch.dtype) -> None:
        heads, kv_heads, dim, turning = shape
        self.projected = randn(num_rows, 2 * dim * (heads + kv_heads), dtype=dtype)
        self.norms = (randn(dim).abs() + 0.5, randn(dim, seed=1).abs() + 0.5)
        self.tables = (randn(160, turning // 2), randn(160, turning // 2, seed=1))
        self.k, self.v = (
            torch.full((NUM_PAGES, PAGE_SIZE, kv_heads, dim), torch.nan, dtype=dtype) for _ in range(2)
        )
        self.q = randn(num_rows, heads, dim, seed=4, dtype=dtype)

    def fill(self, pages: list[int], num_positions: int) -> None:
        """Random keys and values at the first positions of a sequence."""
        at = torch.arange(num_positions)
        rows = torch.tensor(pages)[at // PAGE_SIZE] * PAGE_SIZE + at % PAGE_SIZE
        for cache, seed in ((self.k, 8), (self.v, 9)):
            cache.flatten(0, 1)[rows] = randn(num_positions, *cache.shape[2:], seed=seed, dtype=cache.dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rotary_store_parity(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    heads = Heads(shape, 5, dtype)
    positions = torch.tensor([0, 1, 70, 71, 130])
    index = torch.tensor([PAGES[0][p // PAGE_SIZE] * PAGE_SIZE + p % PAGE_SIZE for p in positions.tolist()])
    k, v = heads.k.clone(), heads.v.clone()
    q = rotary_store(heads.projected, *heads.norms, *heads.tables, positions, index, heads.k, heads.v, EPS)
    expected = ORACLE.rotary_store(heads.projected, *heads.norms, *heads.tables, positions, index, k, v, EPS)
    assert_near(q, expected, dtype)
    assert_near(heads.k, k, dtype)
    assert torch.equal(heads.v.nan_to_num(), v.nan_to_num())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_parity(
    shape: tuple[int, int, int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ragged groups that end inside and at the edge of a block, with one split and with several."""
    heads = Heads(shape, 8, dtype)
    groups = groups_of([(0, 0, 3), (1, 124, 5)], PAGES)
    heads.fill(PAGES[0], 3)
    heads.fill(PAGES[1], 129)
    expected = ORACLE.attention_verify(heads.q, heads.projected, heads.k, heads.v, groups)
    inputs = (heads.q, heads.projected, heads.k, heads.v, groups)
    assert_near(attention_prefill(*inputs), expected, dtype)
    for blocks in (16, 1, 2):
        monkeypatch.setattr(module, "SPLIT_BLOCKS", blocks)
        assert_near(attention_verify(*inputs), expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("operator", [attention_verify, attention_prefill])
def test_attention_parity_with_operands_in_parts(
    operator: object, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products as a device makes them of float32 operands."""
    assert callable(operator)
    monkeypatch.setattr(module, "num_parts", NUM_PARTS.__getitem__)
    heads, groups = Heads(SHAPES[0], 8, dtype), groups_of([(1, 124, 8)], PAGES[1:])
    heads.fill(PAGES[1], 132)
    inputs = (heads.q, heads.projected, heads.k, heads.v, groups)
    assert_near(operator(*inputs), ORACLE.attention_verify(*inputs), dtype)


@pytest.mark.parametrize("operator", [attention_verify, attention_prefill])
def test_rows_do_not_see_one_another(operator: object) -> None:
    """Alone, one by one, beside another group, and with NaN in the rows after them."""
    assert callable(operator)
    heads = Heads(SHAPES[0], 6, torch.float32)
    heads.fill(PAGES[1], 70)
    whole = operator(heads.q, heads.projected, heads.k, heads.v, groups_of([(1, 64, 6)], PAGES[1:]))
    for i in range(6):
        alone = operator(
            heads.q[i : i + 1].clone(),
            heads.projected[i : i + 1].clone(),
            heads.k,
            heads.v,
            groups_of([(1, 64 + i, 1)], PAGES[1:]),
        )
        assert torch.equal(alone, whole[i : i + 1])
    _set_rows(heads.v, PAGES[1], [68, 69], torch.nan)
    _set_rows(heads.k, PAGES[1], [68, 69], torch.nan)
    broken = operator(heads.q, heads.projected, heads.k, heads.v, groups_of([(1, 64, 6)], PAGES[1:]))
    assert torch.equal(broken[:4], whole[:4])
    assert broken[4:].isnan().any(-1).all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("operator", [attention_verify, attention_prefill])
def test_a_bad_element_makes_its_dimension_nan(operator: object, value: float) -> None:
    """In the rows that see it, and the bits are the same alone (a block that is seen whole) and in company (an edge)."""
    assert callable(operator)
    heads = Heads(SHAPES[1], 6, torch.float32)
    heads.fill(PAGES[1], 66)
    for p, dim in ((50, 3), (62, 5)):
        heads.v[PAGES[1][p // PAGE_SIZE], p % PAGE_SIZE, 0, dim] = value
    whole = operator(heads.q, heads.projected, heads.k, heads.v, groups_of([(1, 60, 6)], PAGES[1:]))
    bad = whole.isnan().nonzero().tolist()
    assert bad == [[row, dim] for row in range(6) for dim in ((3, 5) if row >= 2 else (3,))]
    for i in range(6):
        rows = (heads.q[i : i + 1].clone(), heads.projected[i : i + 1].clone())
        alone = operator(*rows, heads.k, heads.v, groups_of([(1, 60 + i, 1)], PAGES[1:]))
        assert torch.equal(alone.view(torch.int32), whole[i : i + 1].view(torch.int32))


@pytest.mark.parametrize("operator", [attention_verify, attention_prefill])
def test_attention_refusals(operator: object) -> None:
    assert callable(operator)
    heads = Heads(SHAPES[1], 3, torch.float32)
    inputs = (heads.q, heads.projected, heads.k, heads.v)
    with pytest.raises(ValueError, match=r"groups: expected 3 pages for 33 positions, got 2$"):
        operator(*inputs, groups_of([(0, 30, 3)], [[3, 1]]))
    with pytest.raises(ValueError, match="q: expected 2 rows of"):
        operator(*inputs, groups_of([(0, 30, 2)], [[3, 1]]))
    with pytest.raises(ValueError, match="q: expected 3 dimensions"):
        operator(heads.projected, *inputs[1:], groups_of([(0, 0, 3)], [[3, 1]]))
    thirds = [cache[:, :3].contiguous() for cache in (heads.k, heads.v)]
    with pytest.raises(ValueError, match=r"k_cache: expected pages of 1, 2, 4, .. 64 positions, got 3"):
        operator(*inputs[:2], *thirds, groups_of([(0, 0, 3)], [[3, 1]]))
    heads.fill(PAGES[0], 3)
    # a group without rows reads no pages
    ends = groups_of([(0, 0, 3), (1, 640, 0)], [[3], []])
    assert torch.equal(operator(*inputs, ends), operator(*inputs, groups_of([(0, 0, 3)], [[3]])))


def _set_rows(cache: Tensor, pages: list[int], positions: list[int], value: float) -> None:
    for p in positions:
        cache[pages[p // PAGE_SIZE], p % PAGE_SIZE] = value
