"""`python -m bench.engine`: tokens/s of plain decode, n-gram and MTP drafts, beside transformers.

Every method runs at every dtype and thread count, all runs interleaved; a row shows a method at its own best.
Exits 1, and reports nothing, if one token of a drafter differs from plain decode at the same setting.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from bench.engine import prefill, report
from bench.engine.baseline import is_available
from bench.engine.cases import Engines, Setting, Workload, baseline_cases, own_cases
from bench.engine.prompts import PROMPTS
from bench.harness import GateError, interleave, machine, write_json
from metrale.engine.tokenizer import Tokenizer
from metrale.errors import ConfigError
from metrale.model.loader import resolve

BATCHES = (1, 8)
PIPE_WIDTH = 110  # columns where there is no terminal to ask: the table in one piece


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    cores = torch.get_num_threads()
    parser = argparse.ArgumentParser(prog="python -m bench.engine", description=__doc__)
    parser.add_argument(
        "--model", default="tiny", help="tiny, a directory, or a Hub repository (default: tiny)"
    )
    parser.add_argument("--backend", default="auto", help="auto, cpu or torch (default: auto)")
    parser.add_argument(
        "--dtypes", nargs="+", default=["float32", "bfloat16"], help="default: float32 bfloat16"
    )
    parser.add_argument(
        "--threads", nargs="+", type=int, default=sorted({1, cores}), help=f"default: 1 and {cores}"
    )
    parser.add_argument("--drafts", nargs="+", type=int, default=[1, 2, 3, 4], help="default: 1 2 3 4")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="tokens of each prompt (default: 128)")
    parser.add_argument("--new-tokens", type=int, default=128, help="tokens to add to each (default: 128)")
    parser.add_argument(
        "--prefill-tokens", type=int, default=512, help="tokens of the prefill prompt (default: 512)"
    )
    parser.add_argument("--solo-prompts", type=int, default=2, help="prompts of a batch-1 run (default: 2)")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds; the median counts (default: 5)")
    parser.add_argument(
        "--out", type=Path, default=Path("bench/out"), help="where to write (default: bench/out)"
    )
    return parser.parse_args(arguments)


def workload_of(directory: Path, options: argparse.Namespace) -> tuple[Workload, list[int]]:
    """The prompts cut to one length, so that no side pads; and one long prompt of all of them."""
    tokenizer = Tokenizer.from_directory(directory)
    encoded = [tokenizer.encode(prompt) for prompt in PROMPTS]
    short = min(len(ids) for ids in encoded)
    if options.prompt_tokens > short:
        sys.exit(f"--prompt-tokens {options.prompt_tokens}: the shortest prompt has {short} tokens")
    prompts = tuple(tuple(ids[: options.prompt_tokens]) for ids in encoded)
    long = [token for ids in encoded for token in ids][: options.prefill_tokens]
    return Workload(prompts, options.new_tokens, options.solo_prompts), long


def acceptance_of(engines: Engines) -> dict[str, dict[str, Any]]:
    """What each drafter at each depth got accepted, over all runs at all settings."""
    totals: dict[str, Counter[str]] = {}
    for method, _, stats in engines.stats():
        if stats["num_drafts"]:
            total = totals.setdefault(method.label, Counter())
            total.update(
                {name: stats[name] for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens")}
            )
            total.update({str(i): count for i, count in enumerate(stats["num_accepted_tokens_per_pos"])})
    return {
        label: {
            "mean_acceptance_length": 1 + total["num_accepted_tokens"] / total["num_drafts"],
            "draft_acceptance_rate": total["num_accepted_tokens"] / total["num_draft_tokens"],
            "acceptance_by_position": [
                total[str(i)] / total["num_drafts"] for i in range(int(label.split()[-1]))
            ],
        }
        for label, total in totals.items()
    }


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    console = Console()
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    try:
        measure(options, console)
    except (ConfigError, GateError) as error:
        sys.exit(f"bench: {error}")


def measure(options: argparse.Namespace, console: Console) -> None:
    """Times everything, then reports it. Raises GateError before any figure is shown."""
    directory = resolve(options.model)
    workload, long_prompt = workload_of(directory, options)
    engines = Engines(options.model, options.backend, max_num_seqs=max(BATCHES))
    settings = [Setting(*pair) for pair in product(engines.dtypes(options.dtypes), options.threads)]
    cases = own_cases(engines, workload, settings, BATCHES, options.drafts)
    if is_available():
        theirs = [Setting(*pair) for pair in product(options.dtypes, options.threads)]
        cases |= baseline_cases(directory, workload, theirs, BATCHES)
    else:
        console.print("transformers is not installed, so its figures are left out: pip install -e '.[bench]'")
    timings = dict(zip(cases, interleave(list(cases.values()), options.rounds, console), strict=True))
    long = prefill.time_prefill(engines, long_prompt, settings, options.rounds, console)
    measured = report.measured(timings, workload)
    acceptance = acceptance_of(engines)
    rows = report.best_rows(measured, acceptance)
    title = f"{options.model}: {options.prompt_tokens} prompt tokens, {options.new_tokens} new, greedy"
    console.print(report.table(rows, title))
    console.print(prefill.table(long))
    about = {
        "machine": machine(),
        "options": {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()},
    }
    write_json(options.out / "engine.json", report.as_json(rows, measured, acceptance, long, about))
    plotted = report.plot(rows, acceptance, options.out / "engine.png")
    console.print(f"written to {options.out}" + ("" if plotted else "; no plot without matplotlib"))


if __name__ == "__main__":
    main()
