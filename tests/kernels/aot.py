"""Kernels compiled ahead of time: what the launchers would start, and the binaries that a device would get of it.

No GPU is asked: a stand-in driver names the target, the launchers run on memory that nobody touches, and the JIT itself says
what a launch is specialised to and compiles it.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from metrale.kernels.launch import Kernel

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SHARED_BYTES = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}
"""Most shared memory of a program."""

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
PRODUCTS = re.compile(r"\b(mma\.sync|wgmma|tcgen05\.mma|v_mfma_f32_\w+?_(?:bf16|f16|f32))\b|(v_mfma\w+)")
WIDE = {
    "cuda": re.compile(r"\b(?:LDG|STG|LDGSTS)\.E\S*\.128\b|\bUTMA(?:LDG|STG)\b"),
    "hip": re.compile(r"\b(?:global|buffer)_(?:load|store)_dwordx4\b"),
}


class Launch(NamedTuple):
    """One start of a kernel, not carried out."""

    kernel: str
    form: Any  # the JIT function
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    options: dict[str, Any]


class Binary(NamedTuple):
    """What a target's program of one launch takes. `spilled` is in bytes a thread, `wide` counts 16-byte accesses of memory."""

    kernel: str
    registers: int
    spilled: int
    shared: int
    wide: int
    products: str  # matrix instructions, "" where there are none


def launches_of(call: Callable[[], object]) -> list[Launch]:
    """What `call` would launch."""
    found: list[Launch] = []
    form = Kernel.form

    class Recorder:
        def __init__(self, kernel: Kernel, form: Any) -> None:
            self.kernel, self.form = kernel, form

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *arguments, **options: found.append(
                Launch(self.kernel.name, self.form, grid, arguments, options)
            )

    with patch.object(Kernel, "form", lambda self, *args: Recorder(self, form(self, *args))):
        call()
    return found


class _Driver:
    """As much of a device as the JIT asks for before it loads a binary."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> str:
        return str(self.target.arch)  # the JIT keeps binaries apart by device

    def get_current_stream(self, device: str) -> int:
        return 0


@contextmanager
def device(target: str, cache: str | None = None) -> Iterator[None]:
    """The JIT compiles for `target` into the folder `cache`; without one it finds nothing that another process compiled."""
    with ExitStack() as stack:
        folder = cache or stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(triton.knobs.cache.scope())
        stack.enter_context(patch.object(driver, "_active", _Driver(TARGETS[target])))
        # launchers take their tiles for the target's backend
        hip = "as named" if TARGETS[target].backend == "hip" else None
        stack.enter_context(patch.object(torch.version, "hip", hip))
        triton.knobs.cache.dir = folder
        yield


def key_of(launch: Launch) -> str:
    """What the JIT tells binaries apart by: the form, types, specialisations, constants and options."""
    keys: list[str] = []

    def hook(**words: Any) -> bool:
        keys.append(words["key"])
        return True  # no need to compile

    with triton.knobs.runtime.scope():
        triton.knobs.runtime.jit_cache_hook = hook
        launch.form.device_caches.clear()
        program_of(launch)
    return f"{launch.kernel} {id(launch.form)} {keys[0]}"


def program_of(launch: Launch) -> Any:
    """What the JIT compiles, or finds in its cache, for a launch on the device in use."""
    return launch.form.run(*launch.arguments, grid=launch.grid, warmup=True, **launch.options)


def compiled(launch: Launch) -> Binary:
    """What a launch takes of the device in use."""
    program = program_of(launch)
    is_cuda = "cubin" in program.asm
    text = program.asm["ptx"] if is_cuda else program.asm["amdgcn"]
    products = ", ".join(sorted({"".join(match) for match in PRODUCTS.findall(text)}))
    registers, spilled, code = _read_cuda(program.asm["cubin"]) if is_cuda else _read_hip(text)
    wide = len(WIDE["cuda" if is_cuda else "hip"].findall(code))
    return Binary(launch.kernel, registers, spilled, program.metadata.shared, wide, products)


TITLES = ("operator", "shape", "kernel", "target", "registers", "spilled", "shared", "wide", "products")
WIDTHS = (17, 42, 18, 7, 9, 7, 7, 5, 0)


def row_titles() -> str:
    return "  ".join(f"{title:{width}}" for title, width in zip(TITLES, WIDTHS, strict=True)).rstrip()


def row(operator: str, shape: str, target: str, binary: Binary) -> str:
    """A line of the table."""
    kernel = binary.kernel.removesuffix("_kernel")
    cells = (operator, shape, kernel, target, *binary[1:])
    return "  ".join(f"{cell!s:{width}}" for cell, width in zip(cells, WIDTHS, strict=True)).rstrip()


def _read_cuda(cubin: bytes) -> tuple[int, int, str]:
    """(registers, bytes of stack and local memory, machine code) of a cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, code = (
            subprocess.run(
                [str(TOOLS / name), option, file.name], capture_output=True, text=True, check=True
            ).stdout
            for name, option in (("cuobjdump", "-res-usage"), ("nvdisasm", "-c"))
        )
    found = {name: int(size) for name, size in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    return found["REG"], found["STACK"] + found["LOCAL"], code


def _read_hip(text: str) -> tuple[int, int, str]:
    """(vector registers, bytes of memory a lane, machine code) of a program's assembly.

    Scalars kept in lanes of a vector register are no spill: they take no memory, and the register is counted.
    """
    found = {name: int(size) for name, size in re.findall(r"\.(\w+):\s+(\d+)\n", text)}
    spilled = max(4 * found["vgpr_spill_count"], found["private_segment_fixed_size"])
    return found["vgpr_count"], spilled, text
