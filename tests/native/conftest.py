"""The kernels against the reference: poisoned memory, no kernels without a compiler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.compiler import needs_compiler

_empty = torch.empty


def _poisoned_empty(*size: Any, **options: Any) -> Tensor:
    tensor = _empty(*size, **options)
    return tensor.fill_(torch.nan if tensor.is_floating_point() else -7)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(needs_compiler)


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs start as NaN, so that an element that nobody wrote shows."""
    monkeypatch.setattr(torch, "empty", _poisoned_empty)
