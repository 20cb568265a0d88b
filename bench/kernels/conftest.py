"""`pytest bench/kernels/bench_*.py`: one test a problem, at the sizes that suit the device."""

from __future__ import annotations

import pytest

from bench.kernels.common import default_backend


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "problem" in metafunc.fixturenames:
        problems = metafunc.module.problems(is_small=default_backend() != "triton")
        metafunc.parametrize("problem", problems, ids=str)
