"""The microbenchmarks run on a CPU, count bytes as their contracts do, and give no figure on a red gate."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.harness import GateError
from bench.kernels import (
    bench_attention,
    bench_conv_verify,
    bench_gated_rms_norm,
    bench_gdn_chunk,
    bench_gdn_verify,
    bench_linear,
    bench_masked_argmax,
    bench_moe,
    bench_rms_norm,
    bench_rotary_store,
    bench_state_copy,
    common,
)
from bench.kernels.__main__ import NAMES, Report, problems_of, run
from bench.kernels.inputs import AttentionDims, GdnDims
from bench.kernels.problem import OURS, Oracle, Outputs, Problem, Row, Target, checks, difference
from bench.kernels.timing import FixedTables, num_copies, num_launches
from metrale.kernels.groups import Groups

ROOT = Path(__file__).parents[2]
F32 = torch.float32
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="the kernels and their baselines need Triton"
)


class Wrong:
    """Operators whose norm is off by a hundredth."""

    def __getattr__(self, name: str) -> Any:
        right = getattr(Oracle(), name)
        return (lambda *arguments: 1.01 * right(*arguments)) if name == "rms_norm" else right


@pytest.mark.parametrize("name", NAMES)
def test_every_benchmark_runs_on_a_cpu(name: str) -> None:
    for problem in problems_of(name, is_small=True):
        rows = common.measure(problem, "torch", rounds=1)
        assert rows[0].variant == OURS
        assert all(row.us is not None and row.us > 0 and not row.note for row in rows), rows


@pytest.mark.parametrize("name", NAMES)
def test_sizes_for_a_gpu_are_stated_without_one(name: str) -> None:
    problems = problems_of(name, is_small=False)
    assert len({str(problem) + problem.operator for problem in problems}) == len(problems)
    assert all(problem.num_bytes > 0 for problem in problems)


def test_a_red_gate_gives_no_figure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(common, "operators", lambda backend: Wrong())
    with pytest.raises(GateError, match=r"rms_norm .metrale, .5, 256., float32.: output 0: an error of"):
        common.measure(bench_rms_norm.problems(is_small=True)[0], "torch", rounds=1)
    with pytest.raises(SystemExit, match="no figure is reported"):
        common.main(bench_rms_norm.problems, ["--rounds", "1"])
    assert capsys.readouterr().out == ""
    report = Report(None)
    run(["rms_norm", "accept"], "torch", is_small=True, rounds=1, report=report)
    assert [row.us for row in report.rows if row.operator == "rms_norm"] == [None, None]
    assert all(row.us for row in report.rows if row.operator == "accept")
    assert len(report.faults) == 2


def test_a_baseline_that_is_wrong_or_fails_holds_nobody_up() -> None:
    def is_wrong(ops: Any, inputs: Any) -> Outputs:
        return (torch.zeros(5, 256),)

    def fails(ops: Any, inputs: Any) -> Outputs:
        raise ValueError("not installed")

    ours = replace(bench_rms_norm.problem(5, 256, F32), beside=())
    problem = ours.with_baselines(ours.baseline("wrong", is_wrong), ours.baseline("fails", fails))
    good, *bad = common.measure(problem, "torch", rounds=1)
    assert good.us
    assert [row.us for row in bad] == [None, None]
    assert "an error of" in bad[0].note and bad[1].note == "ValueError: not installed"
    assert "an error of" in common.table([good, *bad], "heading")


def test_a_difference_is_relative_to_the_largest_element() -> None:
    want = torch.tensor([0.0, 100.0])
    assert difference(torch.tensor([9e-4, 100.0]), want, F32) is None
    assert difference(torch.tensor([2e-3, 100.0]), want, F32)
    assert difference(torch.tensor([1.9, 100.0]), want, torch.bfloat16) is None
    assert difference(torch.tensor([torch.nan, 100.0]), want, F32) == "NaN at other places"
    assert difference(torch.tensor([1]), torch.tensor([2]), F32) == "other integers"
    assert difference(want.double(), want, F32)
    assert difference(want[:1], want, F32)


def test_bytes_of_the_recurrence_by_hand() -> None:
    """1 key head, 2 value heads, dk 4, dv 8, width 3: 24 channels, 2 x 8 x 4 floats of state."""
    dims = GdnDims(1, 2, 4, 8, 3)
    assert (dims.state_bytes, dims.num_channels, dims.columns) == (256, 24, 44)
    replayed = 4 * 2 + 16 * 4 + 2 * 4  # k, u, g
    new = (4 + 4 + 16 + 16) * 2 + 16 * 4 + 2 * 8  # q, k, v, o in bfloat16; u; g and beta
    head = 2 * 4  # num_folded
    sizes = (dims, 3, 2, 5, 2)
    assert bench_gdn_verify.num_bytes(*sizes, folds=False) == 3 * (256 + head + 2 * replayed + 5 * new)
    assert bench_gdn_verify.num_bytes(*sizes, folds=True) == 3 * (512 + 2 * head + 2 * replayed + 5 * new)
    plain = 5 * ((4 + 4 + 16 + 16) * 2 + 16)
    assert bench_gdn_verify.num_bytes_of_rows(dims, 3, 5, 2, num_writes=5) == 3 * (6 * 256 + plain)
    chunk = 64 * ((4 + 4 + 16 + 16) * 2 + 16) + 512
    assert bench_gdn_chunk.num_bytes(dims, 3, 64, 2) == 3 * chunk
    conv = 15 * (24 + 4) * 2 + 3 * 2 * 24 * 2 + 4 * (24 * 3 + 4)  # rows, history, weights
    conv += 15 * (24 + 8 + 16) * 2 + 15 * 2 * 8  # ring_x, q and k, v; g and beta
    assert bench_conv_verify.num_bytes(dims, 3, 5, 2) == conv


def test_bytes_of_the_others_by_hand() -> None:
    assert bench_linear.num_bytes(4, 3, 5, 5, 2, norm=False) == (12 + 15 + 20) * 2
    assert bench_linear.num_bytes(4, 3, 10, 5, 4, norm=True) == (12 + 30 + 20) * 4 + 12
    assert bench_rms_norm.num_bytes(4, 6, 2) == 2 * 24 * 2 + 24
    assert bench_gated_rms_norm.num_bytes(4, 2, 3, 2) == 3 * 24 * 2 + 12
    dims = AttentionDims(4, 2, 8, 4)
    assert bench_attention.num_bytes(dims, 3, 10, 2, 2) == 3 * (2 * 10 * 16 + 3 * 2 * 32) * 2
    assert bench_attention.num_flops(dims, 10, 2) == 4 * (9 + 10) * 32
    assert bench_rotary_store.num_bytes(dims, 6, 2) == 2 * 6 * 8 * 8 * 2 + 64 + 6 * 16 + 6 * 16
    pick = bench_masked_argmax.Pick(bitmask=True, held=True, logprobs=True)
    assert bench_masked_argmax.num_bytes(3, 100, pick) == 3 * (400 + 8 + 16 + 4 + 4)
    moe = bench_moe.MoeDims(dim=4, experts=3, top_k=3, inner=5, shared_inner=2)
    assert bench_moe.num_bytes(moe, 2, 2) == (3 * 3 * 5 * 4 + 3 * 2 * 4 + 12 + 4 + 2 * 2 * 4) * 2
    assert bench_state_copy.num_bytes(GdnDims(1, 2, 4, 8), 3, 2) == 2 * 3 * 2 * 256


def test_targets_are_judged_by_their_own_rows() -> None:
    targets = (Target(max_us=10.0), Target(min_percent=80.0), Target(max_times=0.5, beside="theirs"))
    problem = replace(bench_rms_norm.problem(5, 256, F32), targets=targets)
    ours = Row.of(problem, us=9.0, percent=70.0)
    theirs = replace(ours, variant="theirs", us=8.0)
    other = replace(ours, shape="another", us=99.0)
    assert [check["is_met"] for check in checks(problem, [other, theirs, ours])] == [True, False, False]
    assert [check["is_met"] for check in checks(problem, [other])] == [None, None, None]
    assert [check["is_met"] for check in checks(problem, [ours])] == [True, False, None]


def test_copies_flush_the_cache_or_say_that_they_do_not() -> None:
    problem = bench_rms_norm.problem(5, 256, F32)

    def of(size: int, **changes: Any) -> tuple[int, bool]:
        sized: Problem = replace(problem, num_bytes=size, **changes)
        return num_copies(sized, l2_bytes=1000)

    assert of(9000) == (1, True)
    assert of(9000, reset=lambda inputs: None) == (4, True)
    assert of(1000) == (3, True)
    assert of(1) == (128, False)
    assert num_launches(10**9, 1) == 2
    assert num_launches(1000, 128) == 256
    assert num_launches(10**6, 7) % 7 == 0


def test_tables_are_made_once() -> None:
    page_table = torch.zeros(1, 0, dtype=torch.int32)
    plain = torch.tensor
    with FixedTables().installed():
        groups = [Groups.of([(0, 64, 5)], page_table) for _ in range(2)]
        assert groups[0].tiles(2).data_ptr() == groups[1].tiles(2).data_ptr()
        assert groups[0].tiles(2).data_ptr() != groups[1].tiles(3).data_ptr()
        assert torch.tensor([[1, 2]], dtype=torch.int64) is torch.tensor([[1, 2]], dtype=torch.int64)
        assert torch.tensor([1]) is not torch.tensor([1], dtype=torch.int32)
    assert torch.tensor is plain


@needs_triton
def test_every_sweep_finds_what_it_changes() -> None:
    tuning = run_path(str(ROOT / "tools" / "tune_kernels.py"))
    for sweep in tuning["sweeps"]():
        module = importlib.import_module(sweep.module)
        candidates = sweep.candidates(module)
        assert len(candidates) > 1
        before = dict(vars(module))
        with tuning["patched"](module, candidates[0].attributes):
            assert {name: vars(module)[name] for name in candidates[0].attributes} == candidates[0].attributes
        assert vars(module) == before


@needs_triton
def test_a_sweep_needs_a_gpu_and_a_wrong_candidate_cannot_win(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    tuning = run_path(str(ROOT / "tools" / "tune_kernels.py"))
    assert tuning["main"]([]) == 1
    assert "needs a GPU" in capsys.readouterr().err

    kernel = SimpleNamespace(factor=1.0)  # in the place of a kernel's module
    scaled = SimpleNamespace(rms_norm=lambda *arguments: kernel.factor * Oracle().rms_norm(*arguments))
    monkeypatch.setattr(common, "operators", lambda backend: scaled)
    problem = replace(bench_rms_norm.problem(5, 256, F32), beside=())
    results = [
        tuning["run_candidate"](kernel, [problem], candidate, "torch", 1)
        for candidate in (
            tuning["Candidate"]("as it is", {}),
            *tuning["constants"](factor=(1.0, 1.01))(kernel),
        )
    ]
    assert [bool(result.us) for result in results] == [True, True, False]
    assert "an error of" in results[2].note
    sweep = tuning["Sweep"]("metrale.kernels.rms_norm", "all", [problem], tuning["constants"]())
    assert "1 could not run, factor = 1.01: GateError" in tuning["report"](sweep, results)
    with pytest.raises(ValueError, match="has no nothing: the sweep is out of date"):
        tuning["constants"](nothing=(1,))(common)


@needs_triton
def test_the_baselines_of_gdn_verify_pass_the_gate_under_the_interpreter() -> None:
    script = (
        "from bench.kernels import bench_gdn_verify, common\n"
        "rows = common.measure(bench_gdn_verify.problems(is_small=True)[0], 'interpret', rounds=1)\n"
        "assert len(rows) >= 3 and all(row.us for row in rows), rows\n"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
