"""`masked_argmax`: one read of the logits whatever the pick is made of; beside torch's argmax."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.kernels.common import main, run_benchmark
from bench.kernels.inputs import Random
from bench.kernels.problem import Outputs, Problem, Target

EOS = 7
WORD_BITS = 32


class Inputs(NamedTuple):
    logits: Tensor
    bitmask: Tensor | None
    held_ids: Tensor | None
    temperatures: Tensor | None


class Pick(NamedTuple):
    """What a pick is made of besides logits."""

    bitmask: bool = False
    held: bool = False
    noise: bool = False
    logprobs: bool = False

    def __str__(self) -> str:
        words = [name for name, is_on in self._asdict().items() if is_on]
        return f", {' + '.join(words)}" if words else ""


def num_bytes(rows: int, vocab: int, pick: Pick) -> int:
    """Logits, mask words, held id and temperature in; token id and log-probability out."""
    row = 4 * vocab + 8
    row += 4 * -(-vocab // WORD_BITS) * pick.bitmask + 4 * pick.held + 4 * pick.noise + 4 * pick.logprobs
    return rows * row


def problem(rows: int, vocab: int, pick: Pick, targets: tuple[Target, ...] = ()) -> Problem:
    seeds = [(17, 0, row) for row in range(rows)] if pick.noise else None

    def make(device: torch.device) -> Inputs:
        random = Random(device, torch.float32)
        logits = random.normal(rows, vocab)
        logits[:, EOS] = 50.0  # the pick, unless it is held
        bitmask = held = temperatures = None
        if pick.bitmask:
            words = -(-vocab // WORD_BITS)
            bitmask = (2**32 * random.uniform(rows, words).double() - 2**31).to(torch.int32)
        if pick.held:
            held = torch.full((rows, 1), EOS, dtype=torch.int32, device=device)
        if pick.noise:
            temperatures = torch.ones(rows, device=device)
        return Inputs(logits, bitmask, held, temperatures)

    def run(ops: Any, i: Inputs) -> Outputs:
        picks = ops.masked_argmax(
            i.logits,
            vocab,
            bitmask=i.bitmask,
            held_ids=i.held_ids,
            temperatures=i.temperatures,
            noise=seeds,
            with_logprobs=pick.logprobs,
        )
        return (picks.token_ids, picks.logprobs) if pick.logprobs else (picks.token_ids,)

    def run_torch(ops: Any, i: Inputs) -> Outputs:
        logits = i.logits
        if i.held_ids is not None:
            logits = logits.index_fill(1, i.held_ids[0].long(), -torch.inf)
        return (logits.argmax(-1),)

    made = Problem(
        operator="masked_argmax",
        shape=f"[{rows}, {vocab}]{pick}",
        dtype=torch.float32,
        num_bytes=num_bytes(rows, vocab, pick),
        make=make,
        run=run,
        targets=targets,
    )
    if pick.bitmask or pick.noise or pick.logprobs:
        return made
    return made.with_baselines(made.baseline("torch", run_torch))


def problems(is_small: bool) -> list[Problem]:
    if is_small:
        picks = (Pick(), Pick(held=True), Pick(bitmask=True, held=True, noise=True, logprobs=True))
        return [problem(3, 5000, pick) for pick in picks]
    rows, vocab = 8, 248320
    return [
        problem(rows, vocab, Pick(held=True), targets=(Target(max_us=10.0),)),
        *(
            problem(rows, vocab, pick)
            for pick in (
                Pick(),
                Pick(bitmask=True, held=True),
                Pick(held=True, noise=True),
                Pick(held=True, logprobs=True),
            )
        ),
        problem(320, vocab, Pick(held=True, noise=True)),
    ]


def test_masked_argmax(benchmark: Any, problem: Problem) -> None:
    run_benchmark(benchmark, problem)


if __name__ == "__main__":
    main(problems)
