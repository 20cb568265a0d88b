"""`accept` and `state_copy`: exact integers, exact copies, and nothing beside them touched."""

from __future__ import annotations

import random

import pytest
import torch

from metrale.kernels.accept import accept
from metrale.kernels.state_copy import state_copy
from metrale.reference.accept import accept as accept_oracle
from metrale.reference.state_copy import state_copy as copy_oracle
from tests.kernels.suite.cases import DTYPES, randn
from tests.reference.oracles import groups_of


def test_accept_parity() -> None:
    """Rejections at every row of up to 16 drafts, drafts that are no token, rows without a pick."""
    rng = random.Random(0)
    fed, picks, triples = [], [], []
    for num_rows in (1, 2, 5, 17, 17, 3, 4, 4):
        drafts = [rng.randrange(3) for _ in range(num_rows)]
        said = [*drafts[1:], 7]
        if num_rows > 2:
            said[rng.randrange(num_rows)] = rng.choice((-1, 9))
        triples.append((len(triples), 5, num_rows))
        fed, picks = fed + drafts, picks + said
    fed[-2:] = picks[-3:-1] = [-1, -1]
    ids, said = torch.tensor(fed), torch.tensor(picks)
    groups = groups_of(triples)
    found = accept(ids, said, groups)
    assert torch.equal(found, accept_oracle(ids, said, groups))
    assert {tuple(v) for v in found.tolist()} >= {(0, 7), (1, 7)}
    for n, (group, verdict) in enumerate(zip(groups.host, found, strict=True)):
        rows = slice(group.first_row, group.first_row + group.num_rows)
        alone = accept(ids[rows], said[rows], groups_of([triples[n]]))
        assert torch.equal(alone[0], verdict)
    assert accept(ids[:0], said[:0], groups_of([])).shape == (0, 2)
    with pytest.raises(ValueError, match=r"accept: picks: expected int64 \[53\]"):
        accept(ids, said.float(), groups)
    with pytest.raises(ValueError, match="slot 0 has 0"):
        accept(ids[:0], said[:0], groups_of([(0, 5, 0)]))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int32], ids=str)
@pytest.mark.parametrize("size", [(3, 5), (4, 8), (5000,), (), (0, 3)], ids=str)
def test_state_copy_copies_bits_and_nothing_else(size: tuple[int, ...], dtype: torch.dtype) -> None:
    """NaN and all: within a tensor, to one of another slot count, in runs and scattered."""
    source = (randn(2, 6, *size) * 100).to(dtype)
    if dtype.is_floating_point:
        source[:, 2] = torch.nan
    for from_slots, to_slots in (((), ()), ((1,), (5,)), ((1, 2), (3, 4)), ((2, 0, 1), (5, 3, 4))):
        found, expected = source.clone(), source.clone()
        state_copy(found, found, from_slots, to_slots)
        copy_oracle(expected, expected, from_slots, to_slots)
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
        elsewhere = torch.zeros(2, 9, *size, dtype=dtype)
        state_copy(source, elsewhere, from_slots, to_slots)
        for i, j in zip(from_slots, to_slots, strict=True):
            assert torch.equal(
                elsewhere[:, j].contiguous().view(torch.uint8), source[:, i].contiguous().view(torch.uint8)
            )
        others = [slot for slot in range(9) if slot not in to_slots]
        assert not elsewhere[:, others].any()


@pytest.mark.parametrize("copy", [state_copy, copy_oracle])
def test_state_copy_refusals(copy: object) -> None:
    assert callable(copy)
    state = randn(2, 6, 4)
    for arguments, words in (
        ((state, state, [1], [1]), "overlap from_slots"),
        ((state, state, [1, 2], [3, 3]), "expected 2 distinct slots"),
        ((state, state, [1], [6]), "to_slots: expected slots below 6"),
        ((state, state, [-1], [2]), "from_slots: expected slots below 6"),
        ((state, randn(3, 6, 4), [1], [2]), "expected slots like torch.float32"),
        ((state[0, 0], state[0, 0], [1], [2]), "source: expected layers of slots"),
    ):
        with pytest.raises(ValueError, match=f"^state_copy: .*{words}"):
            copy(*arguments)
