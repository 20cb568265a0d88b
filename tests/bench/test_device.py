"""The device check: nothing to do without a GPU, stages that take no other down, a report after each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import device
from bench.device import (
    Run,
    kernels_stage,
    main,
    outcomes,
    pytest_stage,
    read_lines,
    run_stages,
    targets_stage,
)

ROOT = Path(__file__).parents[2]
ABSENT = "rich typer matplotlib safetensors tokenizers xgrammar huggingface_hub tqdm transformers".split()


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_without_a_gpu_it_says_so_in_one_sentence(tmp_path: Path) -> None:
    done = python("bench/device.py", "--out", str(tmp_path / "report"))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n") == 1 and "no GPU" in done.stdout
    assert not (tmp_path / "report").exists()


def test_it_needs_no_more_than_torch_triton_numpy_and_pytest(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        f"sys.modules.update(dict.fromkeys({[*ABSENT, 'pytest', 'pytest_benchmark']!r}))\n"
        "from bench import device\n"
        "from bench.kernels import __main__ as kernels, roofline\n"
        "for name in kernels.NAMES: kernels.problems_of(name, is_small=False)\n"
        "kernels.main(['accept', '--rounds', '1'])\n"
    )
    done = python("-c", script, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "accept" in done.stdout


def test_a_stage_that_fails_takes_no_other_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(run: Run, limit_s: float) -> dict[str, Any]:
        raise RuntimeError("lost")

    def works(run: Run, limit_s: float) -> dict[str, Any]:
        saved = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
        assert saved["stages"]["machine"]["status"] == "failed"
        return {"status": "done"}

    monkeypatch.setattr(device, "STAGES", {"machine": ("m", fails), "identity": ("i", works)})
    run = Run(tmp_path)
    assert not run_stages(run, ["machine", "identity"], budget_s=10.0)
    assert run.report["stages"]["identity"]["status"] == "done"
    assert "RuntimeError: lost" in (tmp_path / "report.txt").read_text(encoding="utf-8")
    late = Run(tmp_path)
    assert run_stages(late, ["identity"], budget_s=0.0)
    assert late.report["stages"]["identity"] == {"status": "no time left"}


def test_a_child_is_ended_at_its_limit(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert run.child(["-c", "print('begun'); import time; time.sleep(60)"], "log", limit_s=1.0) is None
    assert run.log("log") == "begun\n"


def test_outcomes_of_tests_that_were_cut_short() -> None:
    log = (
        "tests/a.py::test_a[x] PASSED  [ 25%]\n"
        "[gw1] [ 50%] FAILED tests/a.py::test_b \n"
        "tests/a.py::test_c SKIPPED (no) [ 75%]\n"
        "FAILED tests/a.py::test_b - assert 0\n"
        "tests/a.py::test_d "
    )
    counts, failed = outcomes(log)
    assert counts == {"passed": 1, "failed": 1, "skipped": 1}
    assert failed == ["[gw1] tests/a.py::test_b"]


def test_tests_of_a_gpu_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_has_module", lambda name: False)
    test = tmp_path / "test_x.py"
    test.write_text(
        "import pytest\n@pytest.mark.gpu\ndef test_a(): pass\n"
        "@pytest.mark.gpu\ndef test_b(): assert 0\ndef test_c(): pass\n",
        encoding="utf-8",
    )
    found = pytest_stage(Run(tmp_path), [str(test)], "tests.log", limit_s=60.0)
    assert (found["status"], found["counts"]) == ("failed", {"passed": 1, "failed": 1})
    assert found["failed"][0].endswith("test_b")
    test.write_text("import nobody_has_this\n", encoding="utf-8")
    found = pytest_stage(Run(tmp_path), [str(test)], "none.log", limit_s=60.0)
    assert (found["status"], found["note"]) == ("not run", "No module named 'nobody_has_this'")


def test_benchmarks_and_targets_are_reported(tmp_path: Path) -> None:
    run = Run(tmp_path)
    options = ("--backend", "torch", "--rounds", "1")
    found = kernels_stage(run, 60.0, ("accept", "gated_rms_norm"), options)
    assert found["status"] == "done" and not found["not_reached"] and not found["faults"]
    assert {row["operator"] for row in found["rows"]} == {"accept", "gated_rms_norm"}
    run.report["stages"]["kernels"] = found
    targets = targets_stage(run, 10.0)["targets"]
    assert {"masked_argmax", "gdn layer", "linear", "gdn_verify"} == {t["operator"] for t in targets}
    assert all(t["is_met"] is None for t in targets)
    assert any("no figure  gdn layer" in line for line in run.text)


def test_a_lost_device_costs_one_operator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = []

    def child(self: Run, command: list[str], log: str, limit_s: float) -> int:
        commands.append(command)
        with (tmp_path / "kernels.jsonl").open("a", encoding="utf-8") as file:
            if len(commands) == 1:
                file.write('{"done": "linear"}\n{"fault": "moe: lost"}\n{"done": "moe"}\n')
            elif len(commands) == 3:
                file.write('{"done": "gumbel"}\n{"row": {"cut sho')
        return 0 if len(commands) == 3 else 3

    monkeypatch.setattr(Run, "child", child)
    found = kernels_stage(Run(tmp_path), 60.0, ("linear", "moe", "accept", "gumbel"))
    assert [command[2:-2] for command in commands] == [
        ["linear", "moe", "accept", "gumbel"],
        ["accept", "gumbel"],
        ["gumbel"],
    ]
    assert found["status"] == "failed" and found["faults"] == ["moe: lost"]
    assert len(read_lines(tmp_path / "kernels.jsonl")) == 4


def test_the_command_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(device, "has_gpu", lambda: True)
    monkeypatch.setattr(device, "STAGES", {"machine": ("m", lambda run, limit_s: {"status": "done"})})
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    assert main(["--stages", "machine", "--wheels", str(tmp_path), "--limits", "machine=7"]) == 0
    text = (tmp_path / "out" / "report.txt").read_text(encoding="utf-8")
    assert f"no wheel in {tmp_path}" in text
    assert "0 s of 7" in text
    with pytest.raises(SystemExit):
        main(["--limits", "nothing=7"])


def test_the_workflow_runs_the_readme_s_command() -> None:
    after = (ROOT / "README.md").read_text(encoding="utf-8").partition("<!-- tests -->")[2]
    command = after.partition("```sh\n")[2].partition("\n```")[0]
    assert command and command in (ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8")
