"""What the machine can do at best: `python -m bench.kernels.roofline` prints the GPU, its copy bandwidth and its matrix rate."""

from __future__ import annotations

import json
import statistics
from typing import Any

import torch

from bench.harness import machine
from bench.kernels.timing import copy_bandwidth

MATRIX_SIZE = 8192


def matrix_rate(size: int = MATRIX_SIZE, rounds: int = 10) -> float:
    """Floating-point operations a second of torch's own bfloat16 product."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    events = []
    for _ in range(rounds + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        a @ b
        end.record()
        events.append((start, end))
    torch.cuda.synchronize()
    ms: float = statistics.median(start.elapsed_time(end) for start, end in events[3:])
    return 2 * size**3 / (ms * 1e-3)


def gpu() -> dict[str, Any]:
    """The GPU's name, size and measured rates."""
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory,
        "l2_bytes": properties.L2_cache_size,
        "multiprocessors": properties.multi_processor_count,
        "runtime": torch.version.cuda or torch.version.hip,
        "copy_bytes_per_second": copy_bandwidth(),
        "matrix_flops_per_second": matrix_rate(),
    }


if __name__ == "__main__":
    print(json.dumps({**machine(), **gpu()}))
