"""Row lists on the host become a Batch on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from metrale.kernels.groups import Groups
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
    wanted = list(range(num_rows)) if logit_rows is None else list(logit_rows)
    packed = torch.tensor(token_ids + positions + kv_index + wanted, dtype=torch.int64, device=device)
    return Batch(
        token_ids=packed[:num_rows],
        positions=packed[num_rows : 2 * num_rows],
        kv_index=packed[2 * num_rows : 3 * num_rows],
        num_generated=sum(len(spec.token_ids) for spec in generated),
        generated=_groups(generated, pool),
        prompt=_groups(prompt, pool),
        logit_rows=packed[3 * num_rows :],
    )


def _groups(specs: Sequence[RowSpec], pool: Pool) -> Groups:
    rows = [(spec.slot, spec.start, len(spec.token_ids)) for spec in specs]
    return Groups.of(rows, _page_table([spec.slot for spec in specs], pool.page_table))


def _page_table(slots: Sequence[int], table: Tensor) -> Tensor:
    """The slots' rows of the table: a view where the slots are consecutive."""
    if not slots:
        return table[:0]
    first, last = slots[0], slots[-1]
    if last - first + 1 == len(slots):
        return table[first : last + 1]
    return table[list(slots)]
