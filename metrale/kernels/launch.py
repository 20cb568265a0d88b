"""What every launcher shares: checks in O(1) on the host, and how a kernel is started."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

IS_INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether kernels run under Triton's interpreter; bound when triton is imported."""

ALIGNMENT_BYTES = 16

MAX_REGISTERS = 255
"""Of a thread on CUDA. Without a stated limit ptxas guesses an occupancy, and spills a few words for it."""


def is_hip() -> bool:
    """Whether kernels run on ROCm, where a program has 64 KiB of shared memory and 64 lanes a warp."""
    return torch.version.hip is not None


@triton.jit
def only_if(condition, mask):
    """`mask` where the scalar `condition` holds, else nothing: in the interpreter `mask & condition` is no mask."""
    return tl.where(condition, mask, mask & (mask == 0))


def next_power_of_2(size: int) -> int:
    """The smallest power of two that is at least `size`."""
    return 1 << max(size - 1, 0).bit_length()


def ceil_div(total: int, part: int) -> int:
    return -(-total // part)


def check(
    operator: str, name: str, tensor: Tensor, shape: tuple[int | None, ...], *dtypes: torch.dtype
) -> None:
    """Raise ValueError unless `tensor` is contiguous, of `shape` (None: any size) and one of `dtypes`, and 16-byte aligned
    where its rows are a multiple of 16 bytes: kernels are compiled for that, by the shape and not by the pointer.
    """
    is_right_shape = tensor.ndim == len(shape) and all(
        want is None or want == got for want, got in zip(shape, tensor.shape, strict=True)
    )
    is_aligned = tensor.data_ptr() % ALIGNMENT_BYTES == 0 or not is_aligned_shape(tensor)
    if is_right_shape and tensor.dtype in dtypes and tensor.is_contiguous() and is_aligned:
        return
    sizes = ", ".join("*" if size is None else str(size) for size in shape)
    kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    raise ValueError(
        f"{operator}: {name}: expected aligned contiguous {kinds} [{sizes}], got {describe(tensor)}"
    )


def shape_of(operator: str, name: str, tensor: Tensor, ndim: int) -> tuple[int, ...]:
    """The sizes of a tensor that must have `ndim` of them; ValueError where it has not."""
    if tensor.ndim != ndim:
        raise ValueError(f"{operator}: {name}: expected {ndim} dimensions, got {describe(tensor)}")
    return tuple(tensor.shape)


def describe(tensor: Tensor) -> str:
    """Dtype, shape and what may be wrong with the memory of a tensor, for error messages."""
    words = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
    if not tensor.is_contiguous():
        words += f" with strides {list(tensor.stride())}"
    if tensor.data_ptr() % ALIGNMENT_BYTES:
        words += " at an odd address"
    return words


class Kernel:
    """A Triton kernel in two forms: one for rows that stand at multiples of 16 bytes, one for rows of odd width.

    Triton compiles another binary for a pointer that is not 16-byte aligned, with other loads and other reduction trees.
    Here the shapes choose the form, never an address, so that a row keeps its bits wherever it stands. On ROCm a tensor of
    2 GiB or more still is another binary: its accesses differ, not what is computed of them.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        sizes: Sequence[str],
        indices: Sequence[str],
        scratch: Sequence[str],
    ) -> None:
        parameters = list(inspect.signature(function).parameters)
        pointers = [name for name in parameters if name.endswith("_ptr")]
        self.name = function.__name__.strip("_")
        self.parameters = parameters
        rows = [name for name in pointers if name not in scratch]
        self._data = tuple(i for i, p in enumerate(parameters) if p in rows and p not in indices)
        self.aligned, self.unaligned = (
            triton.jit(function, do_not_specialize=list(sizes), do_not_specialize_on_alignment=list(loose))
            for loose in (indices, rows)
        )

    def form(self, arguments: Sequence[Any], is_aligned: bool = True) -> Any:
        """The form that these launch arguments take; `is_aligned=False` where their shapes do not tell that rows are not."""
        is_aligned = is_aligned and all(is_aligned_shape(arguments[i]) for i in self._data)
        return self.aligned if is_aligned else self.unaligned


def kernel(
    sizes: Sequence[str] = (), indices: Sequence[str] = (), scratch: Sequence[str] = ()
) -> Callable[[Callable[..., Any]], Kernel]:
    """Decorator of a kernel that `launch` starts.

    `sizes` are integers that follow the batch, `indices` pointers to small tables that may be slices of larger ones: neither
    may choose a binary. `scratch` are pointers whose rows stand at multiples of 16 bytes whatever the shapes. Names of pointers
    end in `_ptr`.
    """
    return lambda function: Kernel(function, sizes, indices, scratch)


def launch(kernel: Kernel, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Start `kernel` unless the grid is empty.

    `is_aligned=False` among the options asks for the form that takes rows at any address, where shapes do not tell it.
    """
    is_aligned = options.pop("is_aligned", True)
    if not IS_INTERPRETED and not is_hip():
        options["maxnreg"] = MAX_REGISTERS
    if all(grid):
        kernel.form(arguments, is_aligned)[grid](*arguments, **options)


def is_aligned_shape(tensor: Tensor) -> bool:
    """Whether every row of a contiguous tensor starts at a multiple of 16 bytes if the first does; a vector is one row."""
    return math.prod(tensor.shape[1:]) * tensor.element_size() % ALIGNMENT_BYTES == 0 or tensor.ndim < 2
