"""The promise: whatever the drafter, depth, batch, budget, faults and folds, not one bit differs from the solo run."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import pytest
import torch

from metrale import LLM, SamplingParams
from tests.compiler import needs_compiler
from tests.engine.schedules import Request, Result, assert_same, random_request, random_schedule, run, solo

VOCAB_SIZE = 101
NUM_REQUESTS = 6
BACKENDS = [
    pytest.param("torch", "float32", id="torch-float32"),
    pytest.param("torch", "bfloat16", id="torch-bfloat16"),
    pytest.param("cpu", "float32", id="cpu", marks=needs_compiler),
    pytest.param("triton", "bfloat16", id="triton-bfloat16", marks=pytest.mark.gpu),
    pytest.param("triton", "float32", id="triton-float32", marks=pytest.mark.gpu),
]
METHODS = ("scripted", "scripted", "ngram", "mtp", None)


@cache
def solo_runs(
    model: Path, backend: str, dtype: str, seed: int
) -> tuple[list[Request], list[Result], list[Result]]:
    """Random requests, and their solo results without a drafter and with an MTP head that never drafts."""
    rng = random.Random(seed)
    requests = [random_request(rng, VOCAB_SIZE) for _ in range(NUM_REQUESTS)]
    plain = solo(model, backend, dtype, requests)
    with_head = solo(model, backend, dtype, requests, method="mtp")
    assert_same(plain, with_head)
    return requests, plain, with_head


@pytest.mark.parametrize(("backend", "dtype"), BACKENDS)
def test_random_schedules_equal_solo_runs(
    random_model: Path, backend: str, dtype: str, num_schedules: int, soak_seed: int
) -> None:
    for number in range(num_schedules if backend == "cpu" else max(1, num_schedules // 3)):
        seed = soak_seed * 100_000 + number
        requests, plain, with_head = solo_runs(random_model, backend, dtype, seed // 10)
        schedule = random_schedule(random.Random(seed), len(requests), METHODS)
        got = run(random_model, backend, dtype, requests, schedule, plain)
        try:
            assert_same(
                with_head if schedule.method == "mtp" else plain, got, with_head=schedule.method == "mtp"
            )
        except AssertionError as error:
            raise AssertionError(
                f"--soak-seed {soak_seed}, schedule {number}: {schedule}: {error}"
            ) from error


@pytest.mark.parametrize("num_threads", [2, 3])
@needs_compiler
def test_threads_change_no_bit_of_the_embedded_model(num_threads: int) -> None:
    """Its products are large enough to be shared out, unlike those of the random model."""
    prompts = ["def read_config(path):", "import os\n" * 40]
    sampling = SamplingParams(temperature=0.7, seed=3, max_tokens=40, logprobs=2)
    plain = LLM("tiny", backend="cpu").generate(prompts, sampling, use_tqdm=False)
    torch.set_num_threads(num_threads)
    drafted = LLM("tiny", backend="cpu", speculative_config={"method": "mtp"})
    got = drafted.generate(prompts, sampling, use_tqdm=False)
    assert [out.outputs for out in got] == [out.outputs for out in plain]
