"""One signature an operator, whatever the backend."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch

from metrale import reference
from metrale.kernels.ops import Ops
from metrale.native import table

OPERATORS = [field.name for field in fields(Ops) if "Callable[...," in str(field.type)]
OUTSIDE_THE_TABLE = ["accept", "gumbel", "state_copy"]
KERNEL_MODULES = {"attention_prefill": "attention_verify"}


def parameters(operator: Callable[..., Any]) -> list[tuple[str, Any, Any, Any]]:
    signature = inspect.signature(operator)
    taken = [(p.name, p.kind, p.default, str(p.annotation)) for p in signature.parameters.values()]
    return [*taken, ("return", None, None, str(signature.return_annotation))]


def test_every_operator_is_looked_at() -> None:
    assert len(OPERATORS) == 13
    ops = reference.ops()
    assert all(getattr(ops, name) is getattr(reference, name) for name in OPERATORS)


@pytest.mark.parametrize("name", OPERATORS)
def test_native_and_reference_agree(name: str) -> None:
    """Names, order, kinds, defaults, annotations."""
    assert parameters(getattr(table, name)) == parameters(getattr(reference, name))


@pytest.mark.parametrize("name", [*OPERATORS, *OUTSIDE_THE_TABLE])
def test_kernels_and_reference_agree(name: str) -> None:
    module = importlib.import_module(f"metrale.kernels.{KERNEL_MODULES.get(name, name)}")
    assert parameters(getattr(module, name)) == parameters(getattr(reference, name))
    assert getattr(module, name).__doc__


def test_reference_computes_in_two_dtypes() -> None:
    assert reference.ops().activation_dtypes == (torch.float32, torch.bfloat16)
