"""Row lists on the host become a Batch on the device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from metrale.kernels.groups import Groups, index_tensors
from metrale.model.batch import Batch
from metrale.state.pool import Pool


class RowSpec(NamedTuple):
    """One sequence's rows: tokens fed at `start`, `start` + 1, ..."""

    slot: int
    start: int
    token_ids: Sequence[int]
    pages: Sequence[int]


def build_batch(
    generated: Sequence[RowSpec], prompt: Sequence[RowSpec], logit_rows: Sequence[int] | None, pool: Pool
) -> Batch:
    """A batch of generated row groups, then prompt row groups, each in slot order.

    `logit_rows` are the rows whose logits are wanted; None: every row.
    """
    device = pool.page_table.device
    page_size = pool.page_size
    token_ids: list[int] = []
    positions: list[int] = []
    kv_index: list[int] = []
    for spec in (*generated, *prompt):
        end = spec.start + len(spec.token_ids)
        token_ids += spec.token_ids
        positions += range(spec.start, end)
        kv_index += [spec.pages[p // page_size] * page_size + p % page_size for p in range(spec.start, end)]
    num_rows = len(token_ids)
    wanted = range(num_rows) if logit_rows is None else logit_rows
    numbers = [*token_ids, *positions, *kv_index, *wanted]
    columns = index_tensors(numbers, (num_rows, num_rows, num_rows, len(wanted)), torch.int64, device)
    return Batch(
        token_ids=columns[0],
        positions=columns[1],
        kv_index=columns[2],
        num_generated=sum(len(spec.token_ids) for spec in generated),
        generated=_groups(generated, pool),
        prompt=_groups(prompt, pool),
        logit_rows=columns[3],
    )


def _groups(specs: Sequence[RowSpec], pool: Pool) -> Groups:
    if not specs:
        return _no_groups(pool.page_table.device, pool.page_table.shape[1])
    rows = [(spec.slot, spec.start, len(spec.token_ids)) for spec in specs]
    return Groups.of(rows, _page_table([spec.slot for spec in specs], pool.page_table))


@lru_cache(maxsize=8)
def _no_groups(device: torch.device, max_pages: int) -> Groups:
    """The groups of a class that has no rows, shared by all steps."""
    return Groups.of((), torch.empty(0, max_pages, dtype=torch.int32, device=device))


def _page_table(slots: Sequence[int], table: Tensor) -> Tensor:
    """The slots' rows of the table: a view where the slots are consecutive."""
    first, last = slots[0], slots[-1]
    if last - first + 1 == len(slots):
        return table[first : last + 1]
    return table[list(slots)]
