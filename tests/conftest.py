"""Options of the suite."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--schedules", type=int, default=12, help="random schedules that the identity soak runs a backend"
    )
    parser.addoption("--soak-seed", type=int, default=0, help="seed of the identity soak")


@pytest.fixture
def num_schedules(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--schedules"))


@pytest.fixture
def soak_seed(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--soak-seed"))
