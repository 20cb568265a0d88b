"""Every kernel moves at most so many bytes for each that its contract must move, and none outside its tensors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_kernels_stay_within_their_traffic_bounds(request: pytest.FixtureRequest) -> None:
    command = [sys.executable, "-m", "tests.kernels.traffic"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    print("\n" + done.stdout)
    path = request.config.getoption("--traffic-table")
    if path is not None:
        Path(path).write_text(done.stdout)
    assert done.returncode == 0, done.stderr[-6000:]
