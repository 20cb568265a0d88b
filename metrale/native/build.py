"""Compiles the C kernels with the machine's own compiler, keeps the result, and calls into it."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache, cached_property
from pathlib import Path

from metrale.config import c_compiler, cache_dir
from metrale.errors import ConfigError

SOURCE_DIR = Path(__file__).parent / "src"
COMPILERS = ("cc", "gcc", "clang")
FLAGS = (
    "-std=gnu11",
    "-O3",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fPIC",
    "-shared",
    "-pthread",
    "-Wno-psabi",
)
MACHINE_FLAGS = (("-march=native",), ("-mcpu=native",), ())
"""The first that the compiler takes: the kernels are built for this very processor."""
LIBRARIES = ("-lm",)
HINT = "choose backend='torch', or install a C compiler (gcc or clang) or name one in CC"
NO_MEMORY = -1
FAILURES = {
    NO_MEMORY: "no memory for scratch",
    -2: "groups: a slot is out of range",
    -3: "groups: pending and new rows do not fit the ring",
    -4: "page table or kv_index: a page is missing or out of range",
    -5: "positions: a position is outside the rotary table",
    -6: "groups: a prompt group starts off the 64-row grid or with rows pending",
    -7: "groups: a start is below 0",
}
"""What the kernels say before they write anything, by status (`src/vec.h`)."""


def find_compiler() -> list[str] | None:
    """The command of the C compiler: CC, else the first of cc, gcc and clang on the path; None without any."""
    asked = c_compiler()
    if asked is not None:
        command = shlex.split(asked)
        return command if command and shutil.which(command[0]) else None
    return next(([name] for name in COMPILERS if shutil.which(name)), None)


@cache
def is_available() -> bool:
    """Whether the kernels can be built here: a C compiler, 64-bit pointers, little-endian words."""
    return struct.calcsize("P") == 8 and struct.pack("=H", 1) == b"\x01\x00" and find_compiler() is not None


@cache
def library() -> ctypes.CDLL:
    """The compiled kernels, from the cache or built now. Raises ConfigError with the compiler's own words."""
    compiler = find_compiler()
    if compiler is None:
        named = c_compiler()
        what = f"CC names no compiler: {named!r}" if named else "no C compiler found"
        raise ConfigError(f"backend 'cpu': {what}; {HINT}")
    sources = sorted(SOURCE_DIR.glob("*.c"))
    machine_flags, target = _probe(compiler)
    flags = (*FLAGS, *machine_flags)
    key = _key(sources, (*flags, *LIBRARIES), target)
    directory = cache_dir()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        return ctypes.CDLL(
            str(_cached(directory, key) or _build(directory, key, [*compiler, *flags], sources))
        )
    except OSError as error:
        raise ConfigError(
            f"backend 'cpu': cannot keep or load compiled kernels in {directory} ({error}); "
            "set METRALE_CACHE_DIR to a directory that can be written and run from"
        ) from error


def _probe(compiler: list[str]) -> tuple[tuple[str, ...], str]:
    """The machine flags that the compiler takes, and its predefined macros: version, instruction set, tuning."""
    message = ""
    for machine_flags in MACHINE_FLAGS:
        done = _run([*compiler, *machine_flags, "-dM", "-E", "-x", "c", os.devnull])
        if done.returncode == 0:
            return machine_flags, done.stdout
        message = message or done.stderr
    raise ConfigError(
        f"backend 'cpu': {compiler[0]} does not work: {message.strip() or 'it says nothing'}; {HINT}"
    )


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise ConfigError(f"backend 'cpu': cannot run {command[0]} ({error}); {HINT}") from error


def _key(sources: list[Path], flags: tuple[str, ...], target: str) -> str:
    digest = hashlib.sha256()
    for part in (*flags, target, _cpu_model(), platform.machine()):
        digest.update(part.encode() + b"\0")
    for path in sorted([*sources, *SOURCE_DIR.glob("*.h")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:24]


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("model name", "CPU part"))), "")


def _cached(directory: Path, key: str) -> Path | None:
    """A whole library of this key: its name holds the hash of its bytes, so that a truncated file is never loaded."""
    for path in directory.glob(f"kernels-{key}-*.so"):
        if path.name == _name(key, path.read_bytes()):
            return path
    return None


def _name(key: str, content: bytes) -> str:
    return f"kernels-{key}-{hashlib.sha256(content).hexdigest()[:24]}.so"


def _build(directory: Path, key: str, command: list[str], sources: list[Path]) -> Path:
    """Compile in a directory of our own and rename into place: processes may build at once and never see a part."""
    with tempfile.TemporaryDirectory(prefix="build-", dir=directory) as work:
        built = Path(work) / "kernels.so"
        done = _run([*command, "-o", str(built), *map(str, sources), *LIBRARIES])
        if done.returncode != 0:
            raise ConfigError(
                f"backend 'cpu': {command[0]} could not compile the kernels:\n{done.stderr}\n{HINT}"
            )
        path = directory / _name(key, built.read_bytes())
        built.replace(path)
    return path


class Kernel:
    """One entry point of the library, bound at its first use.

    A C function takes one pointer to a struct of 64-bit fields. `kernel.run(kernel.pack(...))` passes it: packing all
    fields at once takes a quarter of the time that ctypes needs to convert them one by one.

    Args:
        name: the function, without its prefix `metrale_`.
        fields: the struct's fields in the letters of `struct`: "q" an integer or an address (0 for none), "d" a float.
    """

    def __init__(self, name: str, fields: str) -> None:
        self.name = name
        self.pack: Callable[..., bytes] = struct.Struct("=" + fields).pack

    @cached_property
    def run(self) -> Callable[[bytes], int]:
        entry = library()[f"metrale_{self.name}"]
        entry.argtypes, entry.restype = [ctypes.c_char_p], ctypes.c_int
        return entry

    def fail(self, status: int, operator: str | None = None) -> Exception:
        """The exception for a status that is not zero, in the name of `operator` where the kernel has another."""
        kind = MemoryError if status == NO_MEMORY else ValueError
        return kind(f"{operator or self.name}: {FAILURES.get(status, f'unknown status {status}')}")
