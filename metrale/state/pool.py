"""The state pool: recurrent states, rings and pages, addressed by slot and absolute position."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch

from metrale.errors import CapacityError, ConfigError
from metrale.kernels.groups import Groups
from metrale.kernels.ops import Ops
from metrale.state.slots import PageAllocator, SlotAllocator

PAGE_SIZE = 16


@dataclass(frozen=True)
class StateShape:
    """The dimensions of a model that its state depends on."""

    num_gdn_layers: int
    num_attention_layers: int  # drafter layers that keep keys and values included
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    num_kv_heads: int
    head_dim: int

    @property
    def num_channels(self) -> int:
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim


def ring_lengths(conv_width: int, max_rows: int, fold_threshold: int) -> tuple[int, int]:
    """Shortest safe (recurrence ring, convolution ring).

    After a step at most max(fold_threshold, max_rows) rows are pending, and the next one adds max_rows. The convolution
    reads conv_width - 1 rows before a group that may be retried or rejected to its first row.
    """
    return max(fold_threshold, max_rows) + max_rows, conv_width - 1 + max_rows


class Pool:
    """All state of all sequences. Rows become part of a sequence by `commit` alone; nothing is ever undone.

    Tensors are tuples over layers (Gated DeltaNet layers for `ssm`, `num_folded` and the rings, attention layers for
    the caches) of the shapes that the operators' contracts give; all layers of a kind lie in one block of memory.

    `num_tiles` is how many parts of a head's state the backend's operators fold on their own (`Ops.num_tiles`).

    Slot `num_slots` is the null slot, which padding rows may use. No tensor is initialised: position 0 means zero state, so
    that nothing is read before it was written.
    """

    def __init__(
        self,
        shape: StateShape,
        num_slots: int,
        num_pages: int,
        max_pages_per_slot: int,
        max_rows: int,
        dtype: torch.dtype,
        device: torch.device,
        fold_threshold: int = 0,
        page_order: Iterable[int] | None = None,
        num_tiles: int = 1,
    ) -> None:
        if num_slots < 1 or num_pages < 1 or max_rows < 1 or fold_threshold < 0:
            raise ConfigError(
                f"a state pool needs at least one slot, page and row: got {num_slots}, {num_pages}, {max_rows}"
            )
        s, layers = num_slots + 1, shape.num_gdn_layers
        ring, conv_ring = ring_lengths(shape.conv_width, max_rows, fold_threshold)
        hk, hv, dk, dv = shape.num_key_heads, shape.num_value_heads, shape.key_dim, shape.value_dim

        def empty(*size: int, of: torch.dtype) -> torch.Tensor:
            return torch.empty(size, dtype=of, device=device)

        self.shape = shape
        self.num_slots = num_slots
        self.max_rows = max_rows
        self.page_size = PAGE_SIZE
        self.fold_threshold = fold_threshold
        self.ssm = empty(layers, s, hv, dv, dk, of=torch.float32).unbind()
        self._num_folded = torch.zeros(layers, s, hv, num_tiles, dtype=torch.int32, device=device)
        self.num_folded = self._num_folded.unbind()
        self.ring_k = empty(layers, s, ring, hk, dk, of=dtype).unbind()
        self.ring_u = empty(layers, s, ring, hv, dv, of=torch.float32).unbind()
        self.ring_g = empty(layers, s, ring, hv, of=torch.float32).unbind()
        self.ring_x = empty(layers, s, conv_ring, shape.num_channels, of=dtype).unbind()
        cache = (shape.num_attention_layers, num_pages, PAGE_SIZE, shape.num_kv_heads, shape.head_dim)
        self.k_cache = empty(*cache, of=dtype).unbind()
        self.v_cache = empty(*cache, of=dtype).unbind()
        self.page_table = torch.zeros(s, max_pages_per_slot, dtype=torch.int32, device=device)
        self.num_committed = [0] * s
        self.slots = SlotAllocator(num_slots)
        self.pages = PageAllocator(num_pages, page_order)

    def num_pages_for(self, num_positions: int) -> int:
        return -(-num_positions // PAGE_SIZE)

    def acquire(self, num_positions: int) -> tuple[int, list[int]]:
        """A slot at position 0 and pages for `num_positions` rows. Raises CapacityError and takes nothing if short."""
        if not self.slots.num_free:
            raise CapacityError("no free slot")
        pages = self.pages.take(self.num_pages_for(num_positions))
        slot = self.slots.take()
        self.reset(slot)
        self.page_table[slot, : len(pages)] = torch.tensor(
            pages, dtype=torch.int32, device=self.page_table.device
        )
        return slot, pages

    def release(self, slot: int, pages: list[int]) -> None:
        """End an owner's hold. Raises CapacityError for what is not held."""
        self.reset(slot)
        self.slots.release(slot)
        self.pages.release(pages)

    def reclaim(self, owners: Collection[tuple[int, list[int]]]) -> None:
        """Free every slot and page but those of `owners`, whose (slot, pages) stay as they are."""
        self.slots.reclaim({slot for slot, _ in owners})
        self.pages.reclaim({page for _, pages in owners for page in pages})

    def reset(self, slot: int) -> None:
        """Back to position 0, for a new owner or a prompt that starts over."""
        self.num_committed[slot] = 0
        self._num_folded[:, slot] = 0

    def commit(self, slot: int, num_rows: int) -> None:
        """Advance a slot over the first `num_rows` rows that were written past its committed rows."""
        self.num_committed[slot] += num_rows

    def rollback(self, slot: int, num_rows: int) -> None:
        """Take back the last `num_rows` committed rows. Raises CapacityError past what is folded already."""
        num_folded = int(self._num_folded[:, slot].max()) if self.shape.num_gdn_layers else 0
        if not 0 <= num_rows <= self.num_committed[slot] - num_folded:
            raise CapacityError(f"slot {slot} cannot go back {num_rows} rows: they are folded into its state")
        self.num_committed[slot] -= num_rows

    def fold(self, slot: int, ops: Ops) -> None:
        """Fold every pending row of a slot into its state. Changes no later result by a bit."""
        shape = self.shape
        groups = Groups.of([(slot, self.num_committed[slot], 0)], self.page_table[slot : slot + 1])
        for layer in range(shape.num_gdn_layers):
            q = self.ring_k[layer].new_empty(0, shape.num_key_heads, shape.key_dim)
            v = self.ring_k[layer].new_empty(0, shape.num_value_heads, shape.value_dim)
            beta = self.ring_g[layer].new_empty(0, shape.num_value_heads)
            ops.gdn_verify(
                q,
                v,
                beta,
                self.ring_k[layer],
                self.ring_u[layer],
                self.ring_g[layer],
                self.ssm[layer],
                self.num_folded[layer],
                groups,
                fold_threshold=0,
            )
