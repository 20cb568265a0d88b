"""Sweep the tiles, warps and stages of the kernels on a GPU and print the tables to keep beside them.

python tools/tune_kernels.py                       every kernel that has candidates
python tools/tune_kernels.py linear gdn_verify     those named

Every candidate runs on scratch tensors, passes the oracle's gate first, and is timed as the microbenchmarks are. One that does
not compile or fails its gate is listed with the reason and cannot win. Exits 1 without a GPU: there is nothing to choose by.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from bench.kernels import (
    bench_attention,
    bench_conv_verify,
    bench_gated_rms_norm,
    bench_gdn_chunk,
    bench_gdn_verify,
    bench_gumbel,
    bench_linear,
    bench_masked_argmax,
    bench_rms_norm,
    bench_rotary_store,
    bench_thresholds,
)
from bench.kernels.common import is_device_lost, measure, one_line
from bench.kernels.inputs import AttentionDims, GdnDims
from bench.kernels.problem import Problem
from metrale.kernels.picks import Truncation

BF16 = torch.bfloat16


class Candidate(NamedTuple):
    """What replaces which attributes of the kernel's module, and the words for it."""

    words: str
    attributes: Mapping[str, Any]


@dataclass(frozen=True)
class Sweep:
    """Candidates of one kernel for one entry of its table, judged by the sum of their times over `problems`."""

    module: str
    entry: str
    problems: Sequence[Problem]
    candidates: Callable[[Any], Sequence[Candidate]]  # of the module

    @property
    def name(self) -> str:
        return self.module.removeprefix("metrale.kernels.")


class Result(NamedTuple):
    """Microseconds of each problem, or why there are none."""

    words: str
    us: tuple[float, ...]
    note: str

    @property
    def total(self) -> float:
        return sum(self.us) if self.us else float("inf")


def constants(**choices: Sequence[Any]) -> Callable[[Any], list[Candidate]]:
    """Every combination of values of module constants."""

    def build(module: Any) -> list[Candidate]:
        absent = [name for name in choices if not hasattr(module, name)]
        if absent:
            raise ValueError(f"{module.__name__} has no {', '.join(absent)}: the sweep is out of date")
        found = []
        for values in itertools.product(*choices.values()):
            attributes = dict(zip(choices, values, strict=True))
            found.append(
                Candidate(", ".join(f"{name} = {value}" for name, value in attributes.items()), attributes)
            )
        return found

    return build


def tiles(*sizes: Sequence[int], **choices: Sequence[Any]) -> Callable[[Any], list[Candidate]]:
    """Every tile of these sizes, one sequence a field, in the place of the module's `tile_of`, beside its constants."""

    def build(module: Any) -> list[Candidate]:
        found = []
        for values in itertools.product(*sizes):
            tile = module.Tile(*values)
            for other in constants(**choices)(module):
                words = ", ".join(filter(None, (str(tile), other.words)))
                attributes = {**other.attributes, "tile_of": lambda *shape, tile=tile: tile}
                found.append(Candidate(words, attributes))
        return found

    return build


def gdn_configs(key_dim: int) -> Callable[[Any], list[Candidate]]:
    """(value rows, warps) in the place of `gdn_verify.CONFIGS[key_dim]`."""

    def build(module: Any) -> list[Candidate]:
        return [
            Candidate(f"CONFIGS[{key_dim}] = {config}", {"CONFIGS": {**module.CONFIGS, key_dim: config}})
            for config in ((8, 1), (16, 1), (16, 2), (32, 2), (32, 4), (64, 4), (64, 8), (128, 8))
        ]

    return build


def sweeps() -> list[Sweep]:
    """One for each entry that the published shapes use."""
    gdn, attention = GdnDims(), AttentionDims()
    linear = bench_linear.problem
    verify = [bench_gdn_verify.problem(gdn, n, BF16, folds) for n in (1, 64) for folds in (False, True)]
    generated = tiles((16,), (32, 64, 128), (64, 128, 256), (4, 8), (3, 4, 5))
    widest, narrow = linear(4, 4096, 12288, BF16), linear(4, 4096, 2048, BF16)
    long = bench_attention.problem
    kernels = "metrale.kernels."
    return [
        Sweep(f"{kernels}linear", "generated rows, 8192 outputs or more", [_alone(widest)], generated),
        Sweep(f"{kernels}linear", "generated rows, fewer outputs", [_alone(narrow)], generated),
        Sweep(
            f"{kernels}linear",
            "prompt rows",
            [_alone(linear(2048, 4096, 12288, BF16, is_prompt=True))],
            tiles((64, 128), (128, 256), (32, 64), (4, 8), (3, 4)),
        ),
        Sweep(f"{kernels}gdn_verify", "key dimension 128", verify, gdn_configs(128)),
        Sweep(
            f"{kernels}gdn_chunk",
            "all",
            [bench_gdn_chunk.problem(gdn, 1, 2048, BF16)],
            constants(BLOCK_DV=(16, 32, 64), NUM_WARPS=(2, 4, 8)),
        ),
        Sweep(
            f"{kernels}conv_verify",
            "all",
            [bench_conv_verify.problem(gdn, n, 5, BF16) for n in (1, 64)],
            constants(NUM_WARPS=(1, 2, 4)),
        ),
        Sweep(
            f"{kernels}gated_rms_norm",
            "all",
            [bench_gated_rms_norm.problem(rows, gdn, BF16) for rows in (5, 2048)],
            constants(BLOCK_HEADS=(1, 2, 4, 8, 16), NUM_WARPS=(1, 2, 4)),
        ),
        Sweep(
            f"{kernels}rms_norm",
            "all",
            [_alone(bench_rms_norm.problem(rows, 4096, BF16)) for rows in (5, 2048)],
            constants(TILE=(4096, 8192, 16384), NUM_WARPS=(4, 8)),
        ),
        Sweep(
            f"{kernels}rotary_store",
            "all",
            [bench_rotary_store.problem(attention, n, 4096, 5, BF16) for n in (1, 64)],
            constants(NUM_WARPS=(1, 2, 4)),
        ),
        Sweep(
            f"{kernels}attention_verify",
            "generated rows",
            [long("attention_verify", attention, n, 4096, 5, BF16) for n in (1, 64)],
            tiles((32, 64, 128), (32, 64), (128, 256), (4, 8), (1, 2), SPLIT_BLOCKS=(4, 8, 16, 32)),
        ),
        Sweep(
            f"{kernels}masked_argmax",
            "all",
            [bench_masked_argmax.problem(8, 248320, bench_masked_argmax.Pick(held=True))],
            constants(BLOCK_IDS=(2048, 4096, 8192, 16384), NUM_WARPS=(4, 8)),
        ),
        Sweep(
            f"{kernels}thresholds",
            "all",
            [bench_thresholds.problem(8, 248320, Truncation(20, 0.95, 0.0))],
            constants(BLOCK_IDS=(1024, 2048, 4096, 8192), NUM_WARPS=(4, 8, 16)),
        ),
        Sweep(
            f"{kernels}gumbel",
            "all",
            [bench_gumbel.problem(8, 248320)],
            constants(BLOCK_IDS=(512, 1024, 2048), NUM_WARPS=(2, 4, 8)),
        ),
    ]


def _alone(problem: Problem) -> Problem:
    """Without its baselines: only candidates are compared."""
    return problem.baseline(problem.variant, problem.run)


@contextmanager
def patched(module: Any, attributes: Mapping[str, Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for name, value in attributes.items():
            stack.enter_context(patch.object(module, name, value))
        yield


def run_candidate(
    module: Any, problems: Sequence[Problem], candidate: Candidate, backend: str, rounds: int | None
) -> Result:
    """Gates and times one candidate. A lost device ends the sweep, for nothing after it would be true."""
    us = []
    try:
        with patched(module, candidate.attributes):
            for problem in problems:
                (row,) = measure(problem, backend, rounds)
                us.append(row.us or float("inf"))
    except Exception as error:
        if is_device_lost():
            raise
        return Result(candidate.words, (), one_line(error))
    return Result(candidate.words, tuple(us), "")


def run_sweep(sweep: Sweep, backend: str, rounds: int | None = None) -> list[Result]:
    """All candidates and, first, the kernel as it is."""
    module = import_module(sweep.module)
    candidates = [Candidate("as it is", {}), *sweep.candidates(module)]
    return [run_candidate(module, sweep.problems, c, backend, rounds) for c in candidates]


def report(sweep: Sweep, results: Sequence[Result], most: int = 8) -> str:
    """The kernel as it is, the fastest candidates, how many could not run, and the line to paste."""
    as_is, ranked = results[0], sorted(results[1:], key=lambda result: result.total)
    lines = [f"== {sweep.name}: {sweep.entry}", *(f"   {problem}" for problem in sweep.problems)]
    for result in (as_is, *[r for r in ranked if r.us][:most]):
        times = "  ".join(f"{x:9.2f}" for x in result.us) or result.note
        lines.append(f"   {times}  {result.words}")
    failed = [result for result in ranked if not result.us]
    lines += [f"   {len(failed)} could not run, {failed[0].words}: {failed[0].note}"] if failed else []
    best = min((as_is, *ranked), key=lambda result: result.total)
    gain = f" ({as_is.total / best.total:.2f} x faster)" if as_is.us and best is not as_is else ""
    lines.append(f"   keep: {best.words if best.us else 'nothing, none ran'}{gain}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="KERNEL", help="default: all")
    parser.add_argument("--rounds", type=int, default=9, help="timed rounds of a candidate (default: 9)")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("tune_kernels needs a GPU: tiles are chosen by their time on one.", file=sys.stderr)
        return 1
    found = sweeps()
    unknown = set(options.names) - {sweep.name for sweep in found}
    if unknown:
        parser.error(f"unknown kernel {', '.join(sorted(unknown))}")
    for sweep in found:
        if not options.names or sweep.name in options.names:
            print(report(sweep, run_sweep(sweep, "triton", options.rounds)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
