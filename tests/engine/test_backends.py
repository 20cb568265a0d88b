"""Which backend a name and a device give, and what a backend that cannot run here says."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from metrale import native
from metrale.engine.backends import backend_ops
from metrale.errors import ConfigError

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@needs_no_gpu
def test_auto_is_a_cpu_backend_without_a_gpu() -> None:
    best = "cpu" if native.is_available() else "torch"
    assert backend_ops("auto").name == backend_ops("auto", "cpu").name == best
    assert backend_ops("torch", "cpu").device_type == "cpu"


@needs_no_gpu
@pytest.mark.parametrize(
    ("name", "device", "words"),
    [
        ("triton", "auto", "backend 'triton' found no GPU; use 'cpu' or 'torch'"),
        ("auto", "cuda", "backend 'triton' found no GPU; use 'cpu' or 'torch'"),
        ("torch", "cuda", "backend 'torch' runs on device 'cpu', not on 'cuda'"),
        ("interpret", "auto", "backend 'interpret' needs TRITON_INTERPRET=1 in the environment"),
        ("none", "auto", "unknown backend 'none'"),
    ],
)
def test_what_cannot_run_says_why(name: str, device: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"^{words}"):
        backend_ops(name, device)


def test_a_cpu_backend_does_not_load_triton() -> None:
    code = "import sys; from metrale.engine.backends import backend_ops as b; b('torch'); assert 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
