"""The refusals that launchers share: operator, argument, expected, got."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from metrale.kernels.groups import Groups


def new_rows(*size: int) -> Tensor:
    """An output that C code will fill: float32 in the CPU's memory, whatever torch's defaults are."""
    return torch.empty(size, dtype=torch.float32, device="cpu")


def refuse(operator: str, argument: str, expected: str, got: object) -> ValueError:
    return ValueError(f"{operator}: {argument}: expected {expected}, got {got}")


def refuse_tensors(operator: str, **tensors: Tensor) -> ValueError:
    """The refusal of the first tensor that is not contiguous float32, for launchers that found one to be wrong."""
    for name, tensor in tensors.items():
        if tensor.dtype is not torch.float32 or not tensor.is_contiguous():
            return refuse(operator, name, "contiguous float32", describe(tensor))
    return refuse(operator, ", ".join(tensors), "matching shapes", [tuple(t.shape) for t in tensors.values()])


def describe(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()}"


class GroupWords(NamedTuple):
    """The fields of `groups` in `src/groups.h`, and the number of rows."""

    num_groups: int
    slots: int
    starts: int
    cu_rows: int
    num_rows: int


_last: tuple[Groups | None, GroupWords] = (None, GroupWords(0, 0, 0, 0, 0))


def group_words(operator: str, groups: Groups, num_rows: int) -> GroupWords:
    """Addresses of the groups' tensors. Every layer of a step asks for the same ones: the last answer is kept.

    Raises ValueError where the groups do not hold `num_rows` rows.
    """
    global _last
    last, words = _last
    if groups is not last:
        words = _find_words(operator, groups)
        _last = (groups, words)
    if words.num_rows != num_rows:
        raise refuse(operator, "groups", f"{num_rows} rows as the other tensors have", words.num_rows)
    return words


def _find_words(operator: str, groups: Groups) -> GroupWords:
    num_groups = len(groups.host)
    for tensor, length in (
        (groups.slots, num_groups),
        (groups.starts, num_groups),
        (groups.cu_rows, num_groups + 1),
    ):
        if tensor.shape != (length,) or tensor.dtype is not torch.int32 or not tensor.is_contiguous():
            raise refuse(operator, "groups", f"contiguous int32 [{length}]", describe(tensor))
    return GroupWords(
        num_groups,
        groups.slots.data_ptr(),
        groups.starts.data_ptr(),
        groups.cu_rows.data_ptr(),
        groups.num_rows,
    )
