"""What interpreted kernels load and store, by tensor: active lanes, counted in the interpreter."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np
from torch import Tensor
from triton.runtime import interpreter


@dataclass
class Traffic:
    """Bytes of one tensor that kernels loaded and stored; `seen` marks the elements loaded so far."""

    name: str
    seen: np.ndarray
    item_bytes: int
    loaded: int = 0
    stored: int = 0

    @property
    def distinct(self) -> int:
        return int(self.seen.sum()) * self.item_bytes

    @property
    def times_read(self) -> float:
        return self.loaded / max(self.distinct, 1)


@dataclass
class Meter:
    """Traffic by tensor, in the order of first use; a tensor has the name of its first kernel's argument."""

    tensors: dict[int, Traffic] = field(default_factory=dict)  # by first address
    held: list[Tensor] = field(default_factory=list)  # no address may be used twice
    kernel: str = ""
    starts: np.ndarray = field(
        default_factory=lambda: np.empty(0, np.uint64)
    )  # of the launch's tensors, ascending
    ends: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint64))

    @property
    def moved(self) -> int:
        return sum(t.loaded + t.stored for t in self.tensors.values())

    def begin(self, kernel: str, arguments: dict[str, Any]) -> None:
        """A launch: its lanes may touch these tensors alone."""
        ends: dict[int, int] = {}
        for name, tensor in arguments.items():
            if isinstance(tensor, Tensor) and tensor.numel():
                size = 1 + sum(
                    (n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)
                )
                start = tensor.data_ptr()
                ends[start] = max(ends.get(start, 0), start + size * tensor.element_size())
                fresh = Traffic(name.removesuffix("_ptr"), np.zeros(size, bool), tensor.element_size())
                self.tensors.setdefault(start, fresh)
                self.held.append(tensor)
        self.kernel = kernel
        self.starts = np.array(sorted(ends), np.uint64)
        self.ends = np.array([ends[start] for start in sorted(ends)], np.uint64)

    def count(
        self, pointers: interpreter.TensorHandle, mask: interpreter.TensorHandle, is_store: bool
    ) -> None:
        """Active lanes x item size, to the tensors that they hit. AssertionError for a lane that hits none."""
        assert mask.data.dtype == np.bool_ and mask.data.size == pointers.data.size, f"{self.kernel}: no mask"
        at = pointers.data[mask.data.reshape(pointers.data.shape)].astype(np.uint64)
        if not at.size:
            return
        item = pointers.get_element_ty().primitive_bitwidth // 8
        hit = np.searchsorted(self.starts, at, side="right") - 1
        is_inside = (hit >= 0) & (at + np.uint64(item) <= self.ends[hit])
        assert is_inside.all(), f"{self.kernel}: {(~is_inside).sum()} active lanes outside its tensors"
        for i in np.unique(hit):
            tensor = self.tensors[int(self.starts[i])]
            ours = at[hit == i]
            if is_store:
                tensor.stored += ours.size * item
            else:
                tensor.loaded += ours.size * item
                tensor.seen[(ours - self.starts[i]) // item] = True


@contextmanager
def metered() -> Iterator[Meter]:
    """Count what interpreted kernels move. The builder's unmasked forms and descriptors end in the masked ones."""
    meter = Meter()
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    load, store, call = builder.create_masked_load, builder.create_masked_store, executor.__call__

    def masked_load(self: Any, pointers: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        meter.count(pointers, mask, is_store=False)
        return load(self, pointers, mask, *rest, **options)

    def masked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        meter.count(pointers, mask, is_store=True)
        return store(self, pointers, value, mask, *rest, **options)

    def grid(self: Any, *arguments: Any, **options: Any) -> Any:
        names = inspect.signature(self.fn).parameters
        meter.begin(self.fn.__name__, {**dict(zip(names, arguments, strict=False)), **options})
        return call(self, *arguments, **options)

    with (
        patch.object(builder, "create_masked_load", masked_load),
        patch.object(builder, "create_masked_store", masked_store),
        patch.object(executor, "__call__", grid),
    ):
        yield meter
