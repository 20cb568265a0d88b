"""Options of the suite, and one thread for every test that asks for no more."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--schedules", type=int, default=12, help="random schedules that the identity soak runs a backend"
    )
    parser.addoption("--soak-seed", type=int, default=0, help="seed of the identity soak")
    parser.addoption("--aot-table", metavar="PATH", help="where what kernels compile to is appended")
    parser.addoption("--traffic-table", metavar="PATH", help="where the traffic of the kernels is written")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny tensors gain nothing from threads, and lose much on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def num_schedules(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--schedules"))


@pytest.fixture
def soak_seed(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--soak-seed"))
