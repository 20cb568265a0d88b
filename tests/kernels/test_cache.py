"""Several processes compile into one empty cache: all get the same binaries."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from metrale.kernels.launch import IS_INTERPRETED

pytestmark = pytest.mark.skipif(IS_INTERPRETED, reason="a process that interprets cannot compile")

ROOT = Path(__file__).parents[2]
SCRIPT = """
import hashlib, json, sys
from tests.kernels import aot
from tests.kernels.aot_cases import CASES, Batch

found = {}
with aot.device("sm_90", sys.argv[1]):
    for case in CASES:
        if case.operator in ("rms_norm", "conv_verify", "state_copy") and case.is_main:
            for n, launch in enumerate(aot.launches_of(lambda: case.call(Batch()))):
                binary = aot.program_of(launch).asm["cubin"]
                found[f"{case.operator} {case.shape} {n}"] = hashlib.sha256(binary).hexdigest()
print(json.dumps(found))
"""


def start(cache: Path) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "TRITON_CACHE_DIR": str(cache),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(cache)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def binaries_of(process: subprocess.Popen[str]) -> dict[str, str]:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    found = json.loads(out)
    assert len(found) > 4
    return found


def test_processes_share_an_empty_cache(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    first, *others = (binaries_of(process) for process in [start(shared) for _ in range(4)])
    assert len(list(shared.rglob("*.cubin"))) >= len(set(first.values()))
    assert all(other == first for other in others)
    assert binaries_of(start(tmp_path / "another")) == first
