"""Row groups and slots: what an operator must know of the sequences behind the rows that it is given."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

TYPE_CODES = {torch.int32: "i", torch.int64: "q"}


def index_tensors(
    numbers: Sequence[int], sizes: Sequence[int], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, ...]:
    """`numbers` as int32 or int64 tensors of `sizes`, one after the other, moved to the device in one transfer.

    By way of an array: a third of the time that torch takes for a short list, and a step makes many.
    """
    if not numbers:
        return torch.split_with_sizes(torch.empty(0, dtype=dtype, device=device), sizes)
    packed = torch.frombuffer(array(TYPE_CODES[dtype], numbers), dtype=dtype).to(device)
    return torch.split_with_sizes(packed, sizes)


class HostGroup(NamedTuple):
    """One sequence's rows, as integers on the host.

    `first_row` counts from the first row of the group's class (0 for the first group).
    """

    slot: int
    start: int
    first_row: int
    num_rows: int


@dataclass(frozen=True)
class Groups:
    """The row groups of one row class in one step, in slot order.

    | field | shape, dtype | meaning |
    | --- | --- | --- |
    | slots | [N] int32 | recurrent-state slot of each group |
    | starts | [N] int32 | absolute position of the group's first row = rows committed before the step |
    | cu_rows | [N + 1] int32 | running sum of rows, from 0 |
    | page_table | [N, max_pages] int32 | position p lies in page `page_table[n, p // P]` at offset `p % P` |
    | host | N tuples | slots, starts and row ranges again, for launchers and oracles |
    """

    slots: Tensor
    starts: Tensor
    cu_rows: Tensor
    page_table: Tensor
    host: tuple[HostGroup, ...]
    _tiles: dict[int, Tensor] = field(default_factory=dict, compare=False, repr=False)

    @property
    def num_groups(self) -> int:
        return len(self.host)

    @property
    def num_rows(self) -> int:
        return self.host[-1].first_row + self.host[-1].num_rows if self.host else 0

    @cached_property
    def most_rows(self) -> int:
        """Of one group."""
        return max((group.num_rows for group in self.host), default=0)

    @cached_property
    def num_positions(self) -> int:
        """Positions up to the last row of the longest sequence that has rows."""
        return max((group.start + group.num_rows for group in self.host if group.num_rows), default=0)

    def tiles(self, height: int) -> Tensor:
        """Every group cut into tiles of `height` rows: (group, tile) pairs, int32 [tiles, 2]; made once for all layers."""
        if height not in self._tiles:
            self._tiles[height] = self._cut(height)
        return self._tiles[height]

    def _cut(self, height: int) -> Tensor:
        pairs = [
            part
            for n, group in enumerate(self.host)
            for tile in range(-(-group.num_rows // height))
            for part in (n, tile)
        ]
        (packed,) = index_tensors(pairs, (len(pairs),), torch.int32, self.slots.device)
        return packed.view(-1, 2)

    @staticmethod
    def of(slots_starts_rows: Sequence[tuple[int, int, int]], page_table: Tensor) -> Groups:
        """Groups from (slot, start, num_rows) triples in slot order and their page table [N, max_pages] int32.

        Raises ValueError for a page table of another dtype or number of rows, or that is not contiguous.
        """
        is_table = page_table.ndim == 2 and page_table.shape[0] == len(slots_starts_rows)
        if not is_table or page_table.dtype is not torch.int32 or not page_table.is_contiguous():
            raise ValueError(
                f"groups: page_table: expected contiguous int32 [{len(slots_starts_rows)}, *], "
                f"got {page_table.dtype} {list(page_table.shape)}"
            )
        host = []
        cu = [0]
        for slot, start, num_rows in slots_starts_rows:
            host.append(HostGroup(slot, start, cu[-1], num_rows))
            cu.append(cu[-1] + num_rows)
        n = len(host)
        numbers = [g.slot for g in host] + [g.start for g in host] + cu
        slots, starts, cu_rows = index_tensors(numbers, (n, n, n + 1), torch.int32, page_table.device)
        return Groups(slots, starts, cu_rows, page_table, tuple(host))

    @staticmethod
    def build(
        slots_starts_rows: Sequence[tuple[int, int, int]],
        pages: Sequence[Sequence[int]],
        device: torch.device,
    ) -> Groups:
        """`of` with one page list a group instead of a table."""
        width = max((len(p) for p in pages), default=0)
        table = [[*p, *[0] * (width - len(p))] for p in pages]
        return Groups.of(
            slots_starts_rows,
            torch.tensor(table, dtype=torch.int32, device=device).reshape(len(table), width),
        )


def check_generated(operator: str, num_generated: int, num_rows: int) -> None:
    """Raise ValueError unless that many of the rows can be generated rows."""
    if not 0 <= num_generated <= num_rows:
        raise ValueError(f"{operator}: num_generated: expected 0 to {num_rows}, got {num_generated}")


def check_slots(
    source: Tensor, destination: Tensor, from_slots: Sequence[int], to_slots: Sequence[int]
) -> None:
    """Raise ValueError for what `state_copy` does not take."""
    if source.ndim < 2:
        raise ValueError(f"state_copy: source: expected layers of slots, got {list(source.shape)}")
    if source.dtype is not destination.dtype or (
        source.shape[:1] + source.shape[2:] != destination.shape[:1] + destination.shape[2:]
    ):
        raise ValueError(
            f"state_copy: destination: expected slots like {source.dtype} {list(source.shape)}, "
            f"got {destination.dtype} {list(destination.shape)}"
        )
    if len(from_slots) != len(to_slots) or len(set(to_slots)) != len(to_slots):
        raise ValueError(f"state_copy: to_slots: expected {len(from_slots)} distinct slots, got {to_slots}")
    for name, slots, tensor in (("from_slots", from_slots, source), ("to_slots", to_slots, destination)):
        if slots and not 0 <= min(slots) <= max(slots) < tensor.shape[1]:
            raise ValueError(f"state_copy: {name}: expected slots below {tensor.shape[1]}, got {slots}")
    is_same = source.numel() > 0 and source.data_ptr() == destination.data_ptr()
    if is_same and not set(from_slots).isdisjoint(to_slots):
        raise ValueError(f"state_copy: to_slots: {to_slots} overlap from_slots {from_slots}")
