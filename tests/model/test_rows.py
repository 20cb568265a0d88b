"""A row's bits depend on its sequence alone: not on how rows are cut into steps, nor on what was rejected."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from metrale.kernels.ops import Ops
from metrale.model.build import build_batch
from metrale.model.decoder import HybridModel
from metrale.model.loader import load_model
from tests.model.conftest import Saved
from tests.model.drive import Solo


@pytest.fixture(params=["qwen3_5_text", "qwen3_next"])
def model(request: pytest.FixtureRequest, saved: Callable[..., Saved], backend: Ops) -> HybridModel:
    return load_model(saved(request.param).directory, backend).model


def tokens(num: int, seed: int = 0) -> list[int]:
    return torch.randint(101, (num,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("chunk", [64, 128])
def test_prompt_chunks(model: HybridModel, chunk: int) -> None:
    prompt = tokens(170)
    assert torch.equal(Solo(model).prefill(prompt), Solo(model, seed=1).prefill(prompt, chunk=chunk))


@pytest.mark.parametrize("fold_threshold", [0, 6])
def test_rejected_rows_leave_no_trace(model: HybridModel, fold_threshold: int) -> None:
    """Verify 1 + K rows whose last ones are wrong, keep some, go on: the same rows as one-by-one decode."""
    prompt, kept = tokens(70), tokens(40, seed=1)
    plain, speculative = Solo(model), Solo(model, seed=2, fold_threshold=fold_threshold)
    plain.prefill(prompt)
    expected = torch.cat([plain.decode(token) for token in kept])
    speculative.prefill(prompt)
    rows = []
    for num_kept, num_wrong in [(1, 0), (1, 4), (5, 0), (3, 2), (2, 3)] * 4:
        at = len(rows)
        group = kept[at : at + num_kept] + [100 - t for t in tokens(num_wrong, seed=at)]
        if at + num_kept > len(kept):
            break
        rows += list(speculative.verify(group)[:num_kept])
        speculative.commit(num_kept)
    assert len(rows) > 30
    assert torch.equal(torch.stack(rows), expected[: len(rows)])


def test_empty_batch(model: HybridModel) -> None:
    solo = Solo(model)
    hidden = model.forward(build_batch((), (), None, solo.pool), solo.pool)
    assert hidden.shape == (0, model.config.hidden_size)
    assert model.logits(hidden).shape == (0, model.config.vocab_size)
