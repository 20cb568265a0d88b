"""All checks that need a GPU, in one run of under five minutes: `python bench/device.py --out DIR`.

Needs this checkout, torch, triton, numpy and pytest; installs nothing and asks no network. Stages run in processes of their
own with a time limit each, so that none takes another down, and `report.json` is written after every one. Exits 1 where a
test failed or a gate is red; a target that is not met is a finding, not a failure. Without a GPU it says so and exits 0.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

BUDGET_S = 285.0
LIMITS_S = {"machine": 40.0, "kernel_tests": 90.0, "identity": 60.0, "kernels": 150.0, "targets": 20.0}
TEST_PROCESSES = 6
"""Where pytest-xdist is there: most of a kernel test's time is its compilation."""
OUTCOME = re.compile(r"\[ *\d+%\]")
WORDS = re.compile(r"\b(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b")
MISSING = re.compile(r"ModuleNotFoundError: (No module named '[\w.]+')")


@dataclass
class Run:
    """The report so far, and where its stages work."""

    out: Path
    wheels: Path | None = None  # a folder of unpacked wheels
    report: dict[str, Any] = field(default_factory=lambda: {"stages": {}})
    text: list[str] = field(default_factory=list)

    def say(self, text: str) -> None:
        print(text, flush=True)
        self.text.append(text)

    def save(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / "report.json").write_text(json.dumps(self.report, indent=2) + "\n", encoding="utf-8")
        (self.out / "report.txt").write_text("\n".join(self.text) + "\n", encoding="utf-8")

    def environment(self) -> dict[str, str]:
        """Of a child: the checkout and the wheels on its path, kernels compiled and not interpreted."""
        dropped = ("TRITON_INTERPRET", "PYTEST_ADDOPTS")
        found = {k: v for k, v in os.environ.items() if k not in dropped}
        paths = [str(ROOT), *([str(self.wheels)] if self.wheels else []), found.get("PYTHONPATH", "")]
        return {**found, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}

    def child(self, command: Sequence[str], log: str, limit_s: float) -> int | None:
        """Runs a command in the checkout with its output appended to a log. None: it was ended at its limit."""
        with (self.out / log).open("a", encoding="utf-8") as output:
            process = subprocess.Popen(
                [sys.executable, *command],
                cwd=ROOT,
                env=self.environment(),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                return process.wait(max(limit_s, 1.0))
            except subprocess.TimeoutExpired:
                return None
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()

    def log(self, name: str) -> str:
        path = self.out / name
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def machine_stage(run: Run, limit_s: float) -> dict[str, Any]:
    """The machine and what it can do at best."""
    code = run.child(["-m", "bench.kernels.roofline"], "machine.log", limit_s)
    lines = run.log("machine.log").strip().splitlines()
    if code != 0:
        note = lines[-1] if lines and code is not None else "time ran out"
        run.say(f"  {note}")
        return {"status": "failed", "note": note}
    (run.out / "machine.log").unlink()
    found: dict[str, Any] = json.loads(lines[-1])
    run.say(
        f"{found['gpu']}, {found['memory_bytes'] / 2**30:.0f} GiB, L2 {found['l2_bytes'] / 2**20:.0f} MiB, "
        f"copy {found['copy_bytes_per_second'] * 1e-12:.2f} TB/s, "
        f"bf16 products {found['matrix_flops_per_second'] * 1e-12:.0f} TFLOP/s\n{found['versions']}"
    )
    return {"status": "done", **found}


def outcomes(log: str) -> tuple[Counter[str], list[str]]:
    """How many tests came out how, and the names of those that failed, from what `pytest -v` printed so far."""
    counts: Counter[str] = Counter()
    failed = []
    for line in log.splitlines():
        word = WORDS.search(line) if OUTCOME.search(line) else None
        if word:
            counts[word[1].lower()] += 1
            if word[1] in ("FAILED", "ERROR"):
                failed.append(" ".join(OUTCOME.sub("", line.replace(word[1], "")).split()))
    return counts, failed


def pytest_stage(run: Run, paths: Sequence[str], log: str, limit_s: float) -> dict[str, Any]:
    """The gpu-marked tests under `paths`; what came out before a limit counts."""
    command = ["-m", "pytest", "-m", "gpu", "-v", "--no-header", "--tb=short", "-p", "no:cacheprovider"]
    if _has_module("xdist"):
        command += ["-n", str(TEST_PROCESSES)]
    absent = [path for path in paths if not (ROOT / path).exists()]
    if absent:
        return {"status": "failed", "note": f"no {', '.join(absent)}"}
    code = run.child([*command, *paths], log, limit_s)
    counts, failed = outcomes(run.log(log))
    missing = MISSING.search(run.log(log))
    found: dict[str, Any] = {"counts": dict(counts), "failed": failed}
    if code is None:
        found |= {"status": "time ran out"}
    elif code == 5 or (missing and not counts):
        found |= {"status": "not run", "note": missing[1] if missing else "no test is marked gpu"}
    else:
        found |= {"status": "done" if code == 0 else "failed", "exit": code}
    words = ", ".join(f"{n} {word}" for word, n in sorted(counts.items())) or "no test ran"
    run.say(f"{found['status']}: {words}" + (f" ({found['note']})" if found.get("note") else ""))
    for name in failed[:20]:
        run.say(f"  failed: {name}")
    return found


def kernels_stage(
    run: Run, limit_s: float, names: Sequence[str] = (), options: Sequence[str] = ()
) -> dict[str, Any]:
    """The microbenchmarks; after a lost device a fresh process goes on with the operators that are left."""
    from bench.kernels.__main__ import NAMES
    from bench.kernels.common import table
    from bench.kernels.problem import Row

    end = time.monotonic() + limit_s
    wanted = list(names or NAMES)
    path = run.out / "kernels.jsonl"
    path.unlink(missing_ok=True)
    status, left = "done", wanted
    while left:
        command = ["-m", "bench.kernels", *left, "--lines", str(path), *options]
        code = run.child(command, "kernels.log", end - time.monotonic())
        done = [entry["done"] for entry in read_lines(path) if "done" in entry]
        before, left = left, [name for name in wanted if name not in done]
        if code is None:
            status = "time ran out"
            break
        if left == before:  # ended without a word: the first one is to blame
            status = "failed"
            left = left[1:]
            wanted.remove(before[0])
    lines = read_lines(path)
    rows = [Row(**entry["row"]) for entry in lines if "row" in entry]
    faults = [entry["fault"] for entry in lines if "fault" in entry]
    if rows:
        run.say(table(rows, "Triton kernels, cold L2, graph replay; x: times ours"))
    for fault in faults:
        run.say(f"  fault: {fault}")
    if left:
        run.say(f"  not reached: {', '.join(left)}")
    return {
        "status": "failed" if faults and status == "done" else status,
        "rows": [entry["row"] for entry in lines if "row" in entry],
        "checks": [entry["check"] for entry in lines if "check" in entry],
        "faults": faults,
        "not_reached": left,
    }


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file of JSON objects; a line that a kill cut short is left out."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def targets_stage(run: Run, limit_s: float) -> dict[str, Any]:
    """Every stated target: met or not, or without a figure."""
    from bench.kernels.__main__ import NAMES, problems_of
    from bench.kernels.problem import checks

    judged = run.report["stages"].get("kernels", {}).get("checks", [])
    known = {(c["operator"], c["shape"], c["unit"]) for c in judged}
    for name in NAMES:
        try:
            stated = [check for problem in problems_of(name, is_small=False) for check in checks(problem, [])]
        except ImportError as error:
            run.say(f"  {name}: {error}")
            continue
        judged += [c for c in stated if (c["operator"], c["shape"], c["unit"]) not in known]
    for check in judged:
        word = {True: "met", False: "NOT MET", None: "no figure"}[check["is_met"]]
        figures = [f"{x:.2f}" if x is not None else "-" for x in (check["figure"], check["limit"])]
        run.say(
            f"  {word:9}  {check['operator']}, {check['shape']}: {figures[0]} {check['unit']} {figures[1]}"
        )
    plot(run)
    return {"status": "done", "targets": judged}


def plot(run: Run) -> bool:
    """Bars of the share of the copy bandwidth, ours alone. False: no figures, or no matplotlib."""
    rows = run.report["stages"].get("kernels", {}).get("rows", [])
    rows = [row for row in rows if row["percent"] is not None and row["variant"] == "metrale"]
    if not rows or not _has_module("matplotlib"):
        return False
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(11, 1 + 0.28 * len(rows)), layout="constrained")
    names = [f"{row['operator']}, {row['shape']}" for row in rows]
    bars = axis.barh(range(len(rows)), [row["percent"] for row in rows])
    axis.bar_label(bars, [f" {row['us']:.1f} us" for row in rows], fontsize=7)
    axis.set_yticks(range(len(rows)), names, fontsize=7)
    axis.invert_yaxis()
    axis.set(xlabel="% of the measured copy bandwidth", xlim=(0, 110))
    figure.savefig(run.out / "report.png", dpi=120)
    plt.close(figure)
    return True


STAGES: Mapping[str, tuple[str, Callable[[Run, float], dict[str, Any]]]] = {
    "machine": ("the machine", machine_stage),
    "kernel_tests": (
        "kernel tests",
        lambda run, limit_s: pytest_stage(run, ["tests/kernels"], "kernel_tests.log", limit_s),
    ),
    "identity": (
        "identity of the engine",
        lambda run, limit_s: pytest_stage(run, ["tests/engine/test_identity.py"], "identity.log", limit_s),
    ),
    "kernels": ("kernel benchmarks", kernels_stage),
    "targets": ("targets", targets_stage),
}


def run_stages(
    run: Run, names: Sequence[str], budget_s: float, limits_s: Mapping[str, float] = LIMITS_S
) -> bool:
    """Runs the stages in order within the budget, saving after each. Whether nothing that ran has failed."""
    began = time.monotonic()
    for name in names:
        words, stage = STAGES[name]
        limit_s = min(limits_s[name], began + budget_s - time.monotonic())
        if limit_s <= 0 and name != "targets":
            run.say(f"== {words}: no time is left")
            run.report["stages"][name] = {"status": "no time left"}
            continue
        run.say(f"== {words}")
        start = time.monotonic()
        try:
            found = stage(run, limit_s)
        except Exception as error:
            run.say(f"  {type(error).__name__}: {error}")
            found = {"status": "failed", "note": f"{type(error).__name__}: {error}"}
        seconds = time.monotonic() - start
        run.say(f"   {seconds:.0f} s of {limit_s:.0f}")
        run.report["stages"][name] = {**found, "seconds": round(seconds, 1)}
        run.save()
    return all(stage["status"] != "failed" for stage in run.report["stages"].values())


def install(wheels: Path, goal: Path) -> str:
    """Unpacks every wheel of a folder, without what they need. An empty string, or what pip said."""
    found = sorted(str(path) for path in wheels.glob("*.whl"))
    if not found:
        return f"no wheel in {wheels}"
    options = ["install", "-q", "--no-index", "--no-deps", "--no-compile", "--target", str(goal)]
    done = subprocess.run(
        [sys.executable, "-m", "pip", *options, *found], capture_output=True, text=True, timeout=60
    )
    return "" if done.returncode == 0 else (done.stderr.strip() or f"pip: exit {done.returncode}")


def _has_module(name: str) -> bool:
    from importlib.util import find_spec

    return find_spec(name) is not None


def has_gpu() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = Path(os.environ.get("OUT") or "device-report")
    parser.add_argument("--out", type=Path, default=default, help="default: $OUT, else ./device-report")
    parser.add_argument("--wheels", type=Path, help="folder of wheels to use, flash-linear-attention's say")
    parser.add_argument(
        "--stages", nargs="+", choices=list(STAGES), default=list(STAGES), help="default: all"
    )
    parser.add_argument("--budget", type=float, default=BUDGET_S, help=f"seconds (default: {BUDGET_S:.0f})")
    parser.add_argument(
        "--limits",
        nargs="+",
        default=[],
        type=_limit,
        metavar="STAGE=SECONDS",
        help=f"default: {' '.join(f'{name}={seconds:.0f}' for name, seconds in LIMITS_S.items())}",
    )
    return parser.parse_args(arguments)


def _limit(text: str) -> tuple[str, float]:
    name, _, seconds = text.partition("=")
    if name not in LIMITS_S:
        raise argparse.ArgumentTypeError(f"no stage {name!r}, only {', '.join(LIMITS_S)}")
    return name, float(seconds)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if not has_gpu():
        print("bench/device.py found no GPU that torch can use, so nothing was run.")
        return 0
    run = Run(options.out.resolve())
    run.out.mkdir(parents=True, exist_ok=True)
    for name in ("machine", "kernel_tests", "identity", "kernels"):
        (run.out / f"{name}.log").unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as unpacked:
        if options.wheels:
            fault = install(options.wheels, Path(unpacked))
            if fault:
                run.say(f"wheels: {fault}")
            run.wheels = Path(unpacked)
            sys.path.append(unpacked)
        is_green = run_stages(run, options.stages, options.budget, {**LIMITS_S, **dict(options.limits)})
    run.save()
    run.say(f"written to {run.out}")
    return 0 if is_green else 1


if __name__ == "__main__":
    sys.exit(main())
