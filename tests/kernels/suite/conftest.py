"""One suite, two machines: under Triton's interpreter on a CPU, and (marker `gpu`) compiled on a device.

Every result is allocated full of NaN or of an impossible integer. Under the interpreter every active lane must hit a tensor
of its launch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from metrale.kernels.launch import IS_INTERPRETED
from tests.kernels.meter import metered

GARBAGE = -77_777


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not IS_INTERPRETED:
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.gpu)


@pytest.fixture(autouse=True)
def _poisoned_results() -> Iterator[None]:
    new_empty, empty_like = Tensor.new_empty, torch.empty_like
    with (
        patch.object(Tensor, "new_empty", lambda *args, **kwargs: poisoned(new_empty(*args, **kwargs))),
        patch.object(torch, "empty_like", lambda *args, **kwargs: poisoned(empty_like(*args, **kwargs))),
    ):
        yield


def poisoned(tensor: Tensor) -> Tensor:
    return tensor.fill_(torch.nan if tensor.is_floating_point() else GARBAGE)


@pytest.fixture(autouse=True)
def _on_the_device() -> Iterator[None]:
    """Tensors are made where the kernels run."""
    with nullcontext() if IS_INTERPRETED else torch.device("cuda"):
        yield


@pytest.fixture(autouse=True)
def _no_stray_lanes(request: pytest.FixtureRequest) -> Iterator[None]:
    """But for the meter's own tests, and the engine's, which call the same kernels for minutes."""
    is_watched = IS_INTERPRETED and request.path.name not in ("test_traffic.py", "test_engine.py")
    with metered() if is_watched else nullcontext():
        yield
