"""What all kernels share: rows that keep their bits in any company, and pools of more than 2^31 elements."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from metrale.kernels.attention_verify import attention_prefill, attention_verify
from metrale.kernels.conv_prefill import conv_prefill
from metrale.kernels.conv_verify import conv_verify
from metrale.kernels.gated_rms_norm import gated_rms_norm
from metrale.kernels.gdn_chunk import gdn_chunk
from metrale.kernels.gdn_verify import gdn_verify, num_tiles
from metrale.kernels.rms_norm import rms_norm
from metrale.kernels.rotary_store import rotary_store
from metrale.kernels.state_copy import state_copy
from tests.kernels.suite.cases import DTYPES, GdnShape, Layer, permutation, randn
from tests.reference.oracles import groups_of

EPS = 1e-6
MANY = 2**31
PAGE_SIZE = 16


def norms(x: Tensor) -> Tensor:
    """[T, 120]: a norm of the whole row and of its heads."""
    heads = x.unflatten(1, (6, 20))
    gated = gated_rms_norm(heads.contiguous(), heads.contiguous(), randn(20), EPS)
    return rms_norm(x, randn(120), EPS) + gated.flatten(1)


def rotary(x: Tensor) -> Tensor:
    """[T, 120]: queries of 2 heads of 20, and what was stored of 1 key head. All rows stand at position 3."""
    num_rows = x.shape[0]
    k_cache, v_cache = (torch.full((3, PAGE_SIZE, 1, 20), torch.nan, dtype=x.dtype) for _ in range(2))
    positions, index = torch.full((num_rows,), 3), torch.arange(num_rows) + 5
    tables = (randn(4, 8), randn(4, 8, seed=1))
    q = rotary_store(x, randn(20), randn(20, seed=1), *tables, positions, index, k_cache, v_cache, EPS)
    stored = [cache.flatten(0, 1)[5 : 5 + num_rows, 0] for cache in (k_cache, v_cache)]
    assert k_cache.flatten(0, 1)[:5].isnan().all()
    assert k_cache.flatten(0, 1)[5 + num_rows :].isnan().all()
    return torch.cat([q.flatten(1), *stored], dim=1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("operator", [norms, rotary])
def test_rows_keep_their_bits(operator: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    """Permuted, added, removed, and beside a row of NaN."""
    x = randn(21, 120, dtype=dtype)
    whole = operator(x)
    order = permutation(21)
    assert torch.equal(operator(x[order].contiguous()), whole[order])
    for first, last in ((0, 1), (4, 9), (20, 21), (0, 0)):
        assert torch.equal(operator(x[first:last].clone()), whole[first:last])
    x[7] = torch.nan
    others = torch.arange(21) != 7
    assert torch.equal(operator(x)[others], whole[others])


def empty_pool(shape: GdnShape, num_slots: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Memory that nobody wrote, so that a large pool costs only what is used of it."""
    heads, rows = shape.value_heads, 16
    tiles = num_tiles(shape.key_dim, shape.value_dim)
    sizes = {
        "ring_x": (num_slots, 8, shape.num_channels),
        "ring_k": (num_slots, rows, shape.key_heads, shape.key_dim),
        "ring_u": (num_slots, rows, heads, shape.value_dim),
        "ring_g": (num_slots, rows, heads),
        "ssm": (num_slots, heads, shape.value_dim, shape.key_dim),
    }
    kinds = {"ring_x": dtype, "ring_k": dtype}
    try:
        pool = {name: torch.empty(size, dtype=kinds.get(name, torch.float32)) for name, size in sizes.items()}
    except RuntimeError as error:
        if "memory" not in str(error):
            raise
        pytest.skip("this machine lends no memory for a pool of more than 2^31 elements")
    return {**pool, "num_folded": torch.zeros(num_slots, heads, tiles, dtype=torch.int32)}


def test_a_slot_past_2_to_the_31_elements_is_like_slot_0() -> None:
    """A prompt, then a verify with a fold, in the last slot of a large pool."""
    shape = GdnShape(4, 1, 16, 16, 4)
    layer = Layer(shape, 12, torch.bfloat16)
    num_slots = MANY // (16 * shape.key_heads * shape.key_dim) + 2
    results = []
    for total, slot in ((2, 0), (num_slots, num_slots - 1)):
        pool = empty_pool(shape, total, torch.bfloat16)
        assert total == 2 or all(pool[n].numel() > MANY for n in ("ring_x", "ring_k", "ring_u", "ssm"))
        rings = (pool["ring_x"], pool["ring_k"], pool["ring_g"])
        state = (pool["ssm"], pool["num_folded"])
        found = []
        for first, last, fold in ((0, 5, 0), (5, 8, 9), (8, 12, 0)):
            rows = layer.projected[first:last].contiguous()
            groups = groups_of([(slot, first, last - first)])
            if first == 0:
                parts = conv_prefill(rows, *layer.weights, *rings, groups)
                found.append(gdn_chunk(*parts, *state, groups))
            else:
                q, v, beta = conv_verify(rows, *layer.weights, *rings, groups)
                rows_of_slot = (pool["ring_k"], pool["ring_u"], pool["ring_g"])
                found.append(gdn_verify(q, v, beta, *rows_of_slot, *state, groups, fold))
        results.append((torch.cat(found), pool["ssm"][slot].clone(), pool["num_folded"][slot].clone()))
        del pool
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert (results[1][2] == 8).all()


def test_a_page_past_2_to_the_31_elements_is_like_page_0() -> None:
    dim, heads, num_rows = 128, 2, 3
    num_pages = MANY // (PAGE_SIZE * dim) + 2
    x = randn(num_rows, 2 * dim * (heads + 1), dtype=torch.bfloat16)
    tables = (randn(4, 8), randn(4, 8, seed=1))
    results = []
    for total, page in ((2, 0), (num_pages, num_pages - 1)):
        caches = [torch.empty(total, PAGE_SIZE, 1, dim, dtype=torch.bfloat16) for _ in range(2)]
        positions = torch.arange(num_rows)
        index = positions + page * PAGE_SIZE
        q = rotary_store(x, randn(dim), randn(dim, seed=1), *tables, positions, index, *caches, EPS)
        groups = groups_of([(0, 0, num_rows)], [[page]])
        results.append((q, *(f(q, x, *caches, groups) for f in (attention_verify, attention_prefill))))
        del caches
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_state_copy_past_2_to_the_31_elements() -> None:
    size = 1 << 20
    state = torch.empty(2, MANY // size + 3, size, dtype=torch.bfloat16)
    last = state.shape[1] - 1
    state[:, last] = randn(2, size, dtype=torch.bfloat16)
    state_copy(state, state, [last, last], [0, 2])
    for layer, slot in itertools.product(range(2), (0, 2)):
        assert torch.equal(state[layer, slot], state[layer, last])
