"""The promise end to end on the kernels: a random model, drafters, chunks, folds and faults against solo runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from metrale.kernels.launch import IS_INTERPRETED
from metrale.sampling.params import SamplingParams
from tests.engine.schedules import Request, Schedule, assert_same, run, solo
from tests.model import checkpoints

BACKEND = "interpret" if IS_INTERPRETED else "triton"
REQUESTS = [
    Request((5, 9, 2), SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, logprobs=1)),
    Request(
        tuple(1 + i % 97 for i in range(66)),
        SamplingParams(temperature=0.8, seed=3, top_p=0.9, max_tokens=4, ignore_eos=True),
    ),
    Request((7,), SamplingParams(temperature=1.0, seed=5, max_tokens=3, ignore_eos=True)),
]
TOGETHER = Schedule("scripted", num_speculative_tokens=3, seed=1)
SCHEDULES = [
    TOGETHER,
    replace(TOGETHER, fold_threshold=8, max_num_batched_tokens=5, arrivals=(2, 0, 1), seed=2),
    Schedule("mtp", num_speculative_tokens=2, fold_threshold=40, max_num_seqs=2, fault_every=150, seed=3),
]


@pytest.mark.parametrize(
    ("model_type", "dtype", "requests", "schedules"),
    [
        ("qwen3_5_text", "float32", REQUESTS, SCHEDULES),
        ("qwen3_5_moe_text", "bfloat16", REQUESTS[::2], SCHEDULES[:1]),
    ],
    ids=["dense", "moe"],
)
def test_schedules_equal_solo_runs(
    model_type: str, dtype: str, requests: list[Request], schedules: list[Schedule], tmp_path: Path
) -> None:
    config = checkpoints.text_config(model_type, tie_word_embeddings=True)
    plain = checkpoints.save(checkpoints.build(config), tmp_path / "plain")
    model = checkpoints.copy_with_mtp(plain, tmp_path / "model")
    answers = solo(model, BACKEND, dtype, requests)
    for schedule in schedules:
        assert_same(answers, run(model, BACKEND, dtype, requests, schedule, answers))
