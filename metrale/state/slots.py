"""Slots of recurrent state and pages of keys and values: who owns which."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable

from metrale.errors import CapacityError


class SlotAllocator:
    """Hands out slots 0 .. num_slots - 1, the lowest free one first."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self.reclaim(())

    @property
    def num_free(self) -> int:
        return len(self._free)

    def reclaim(self, used: Collection[int]) -> None:
        """Free every slot but those in `used`."""
        self._used = set(used)
        self._free = [slot for slot in range(self._num_slots) if slot not in self._used]

    def take(self) -> int:
        """A slot nobody holds. Raises CapacityError when there is none."""
        if not self._free:
            raise CapacityError("no free slot")
        slot = heapq.heappop(self._free)
        self._used.add(slot)
        return slot

    def release(self, slot: int) -> None:
        """End a slot's ownership. Raises CapacityError for a slot that is not held."""
        if slot not in self._used:
            raise CapacityError(f"slot {slot} is not in use")
        self._used.remove(slot)
        heapq.heappush(self._free, slot)


class PageAllocator:
    """Hands out pages; a page has one owner until it is released.

    `order` is the order in which fresh pages are handed out (default: ascending); released pages are reused last in,
    first out.
    """

    def __init__(self, num_pages: int, order: Iterable[int] | None = None) -> None:
        self._order = tuple(range(num_pages) if order is None else order)
        self.reclaim(())

    @property
    def num_free(self) -> int:
        return len(self._free)

    def reclaim(self, used: Collection[int]) -> None:
        """Free every page but those in `used`."""
        self._used = set(used)
        self._free = [page for page in reversed(self._order) if page not in self._used]

    def take(self, count: int) -> list[int]:
        """`count` pages, all or none. Raises CapacityError when fewer are free."""
        if count > len(self._free):
            raise CapacityError(f"{count} pages asked, {len(self._free)} free")
        pages = [self._free.pop() for _ in range(count)]
        self._used.update(pages)
        return pages

    def release(self, pages: list[int]) -> None:
        """Give pages back, all or none. Raises CapacityError for a page that is not in use."""
        for page in pages:
            if page not in self._used:
                raise CapacityError(f"page {page} is not in use")
        self._used.difference_update(pages)
        self._free.extend(pages)
