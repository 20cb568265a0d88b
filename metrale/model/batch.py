"""Batch: the rows of one forward pass, as tensors."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from metrale.kernels.groups import Groups


@dataclass(frozen=True)
class Batch:
    """The rows of one step: generated rows first, then prompt rows, the groups of each class in slot order.

    | field | shape, dtype | meaning |
    | --- | --- | --- |
    | token_ids | [T] int64 | token fed in each row |
    | positions | [T] int64 | absolute position of each row |
    | kv_index | [T] int64 | where each row's key and value go: page * P + offset |
    | num_generated | int | leading rows that are generated rows |
    | generated | Groups | row groups of rows [0, num_generated) |
    | prompt | Groups | row groups of rows [num_generated, T) |
    | logit_rows | [M] int64 | rows whose logits are wanted |
    """

    token_ids: Tensor
    positions: Tensor
    kv_index: Tensor
    num_generated: int
    generated: Groups
    prompt: Groups
    logit_rows: Tensor

    @property
    def num_rows(self) -> int:
        return self.token_ids.shape[0]
