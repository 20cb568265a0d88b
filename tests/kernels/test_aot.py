"""Every kernel compiles for every target without a GPU: nothing spills, accesses are wide, products run on the right units.

One (kernel, shape class) is one binary, whatever the batch.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from metrale.kernels.launch import IS_INTERPRETED
from tests.kernels import aot
from tests.kernels.aot_cases import BATCHES, CASES, OPERATORS, Batch, Case

pytestmark = pytest.mark.skipif(IS_INTERPRETED, reason="a process that interprets cannot compile")

REGISTERS = {"merge": 64, "rms_norm": 128, "gated_rms_norm": 128, "gdn_verify": 224, "conv_verify": 96}
"""Most registers of a thread on CUDA, by kernel; others may use all 255."""

SPILLS = {("gdn_chunk", "f32 odd", "sm_80"): 8}
"""Bytes that may spill, by kernel, rows and target: what was measured. Everything else spills nothing.

A predicate of the state's mask, kept from before the walk to its end.
"""

NARROW = ("accept", "group", "route", "row_argmax", "gumbel", "conv_verify", "combine", "solve")
"""Kernels that move a few words a row, that have 8 bytes a lane, or whose mask follows an integer that is not specialised."""

UNITS = {
    "sm_80": {"mma.sync"},
    "sm_90": {"mma.sync", "wgmma"},
    "sm_100": {"mma.sync", "tcgen05.mma"},
    "gfx942": {"v_mfma_f32_16x16x16_bf16", "v_mfma_f32_32x32x8_bf16"},
}
"""Matrix instructions for bf16 operands and for the bf16 parts of float32 ones."""
FLOAT_UNITS = {"gfx942": {"v_mfma_f32_16x16x4_f32", "v_mfma_f32_32x32x2_f32"}}
"""Matrix instructions for float32 products that are not split; on CUDA there is none."""


def units_of(kernel: str, shape: str, target: str) -> set[str]:
    """The matrix instructions of which a kernel must use one or more, and no other."""
    if kernel in ("linear", "experts"):
        return UNITS[target] if "bf16" in shape else FLOAT_UNITS.get(target, set())
    return UNITS[target] if kernel in ("gdn_chunk", "solve", "attention") else set()


def check(case: Case, target: str, binary: aot.Binary) -> list[str]:
    """What is wrong with a binary."""
    kernel, is_cuda = binary.kernel.removesuffix("_kernel"), target.startswith("sm_")
    rows = ("bf16" if "bf16" in case.shape else "f32") + ("" if case.is_wide else " odd")
    found = []
    allowed = SPILLS.get((kernel, rows, target), 0)
    if binary.spilled > allowed:
        found.append(f"spills {binary.spilled} bytes, {allowed} allowed")
    if is_cuda and binary.registers > REGISTERS.get(kernel, 255):
        found.append(f"takes {binary.registers} registers, {REGISTERS[kernel]} allowed")
    if binary.shared > aot.SHARED_BYTES[target]:
        found.append(f"takes {binary.shared} bytes of shared memory")
    if case.is_wide and kernel not in NARROW and not binary.wide:
        found.append("has no 16-byte access")
    units, wanted = set(binary.products.split(", ")) - {""}, units_of(kernel, case.shape, target)
    if not units <= wanted or (wanted and not units):
        found.append(f"multiplies by {units or 'no matrix instruction'}, expected {wanted or 'none'}")
    return [f"{kernel} ({case.operator} {case.shape}): {words}" for words in found]


def compile_all(cases: list[Case], target: str, path: str | None) -> None:
    seen: set[str] = set()
    wrong, lines = [], []
    with aot.device(target):
        for case in cases:
            for launch in aot.launches_of(lambda case=case: case.call(Batch())):  # type: ignore[misc]
                key = aot.key_of(launch)
                if key not in seen:
                    seen.add(key)
                    binary = aot.compiled(launch)
                    lines.append(aot.row(case.operator, case.shape, target, binary))
                    wrong += check(case, target, binary)
    print("\n" + "\n".join((aot.row_titles(), *lines)))
    if path is not None:
        with Path(path).open("a") as file:
            file.writelines(line + "\n" for line in lines)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("target", aot.TARGETS)
@pytest.mark.parametrize("operator", OPERATORS)
def test_main_shapes_compile(operator: str, target: str, request: pytest.FixtureRequest) -> None:
    cases = [case for case in CASES if case.operator == operator and case.is_main]
    compile_all(cases, target, request.config.getoption("--aot-table"))


@pytest.mark.slow
@pytest.mark.parametrize("target", aot.TARGETS)
@pytest.mark.parametrize("operator", dict.fromkeys(case.operator for case in CASES if not case.is_main))
def test_all_shapes_compile(operator: str, target: str, request: pytest.FixtureRequest) -> None:
    cases = [case for case in CASES if case.operator == operator and not case.is_main]
    compile_all(cases, target, request.config.getoption("--aot-table"))


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_a_shape_class_is_one_binary(operator: str, target: str) -> None:
    """Rows, slots, ring rows, and the place of a slice choose grids alone."""
    with aot.device(target):
        for case in CASES:
            if case.operator == operator:
                keys = [
                    {aot.key_of(launch) for launch in aot.launches_of(lambda c=case, b=batch: c.call(b))}  # type: ignore[misc]
                    for batch in (Batch(), *BATCHES)
                ]
                for batch, found in zip(BATCHES, keys[1:], strict=True):
                    assert found <= keys[0], f"{case.shape}, {batch}: {found - keys[0]}"


def test_a_specialised_integer_would_be_seen() -> None:
    """The test above sees what the JIT sees: a row width that the kernel is compiled for is another binary."""
    with aot.device("sm_90"):
        narrow, wide = (
            case for case in CASES if case.operator == "rms_norm" and case.shape in ("2048 bf16", "5120 bf16")
        )
        keys = [
            {aot.key_of(launch) for launch in aot.launches_of(lambda c=c: c.call(Batch()))}
            for c in (narrow, wide)
        ]  # type: ignore[misc]
        assert keys[0].isdisjoint(keys[1])
