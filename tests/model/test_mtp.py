"""The MTP head against a plain implementation that is written from the published layout, not from ours."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from metrale.kernels.ops import Ops
from metrale.model.loader import LoadedModel, load_model
from metrale.model.mtp import MtpHead
from tests.model import checkpoints
from tests.model.conftest import Saved
from tests.model.drive import Solo
from tests.model.plain_mtp import PlainMtp

TOLERANCE = 1e-4
NUM_DRAFTS = 4


class Case:
    """A loaded model with its head, the oracle of the trunk and the plain head."""

    def __init__(self, directory: Path, oracle: Any, backend: Ops) -> None:
        self.loaded: LoadedModel = load_model(directory, backend, with_mtp=True)
        self.oracle = oracle
        tensors = load_file(directory / "model.safetensors")
        self.embed = tensors["model.embed_tokens.weight"]
        self.lm_head = tensors.get("lm_head.weight", self.embed)
        self.mtp = {name: tensor for name, tensor in tensors.items() if name.startswith("mtp.")}
        self.raw = json.loads((directory / "config.json").read_text())

    def plain(self) -> PlainMtp:
        return PlainMtp(self.mtp, self.raw, self.embed)

    @property
    def head(self) -> MtpHead:
        assert self.loaded.head is not None
        return self.loaded.head

    def hidden(self, token_ids: list[int]) -> Tensor:
        """The oracle's hidden rows after its final norm, [T, D]."""
        with torch.inference_mode():
            rows: Tensor = self.oracle.model(torch.tensor([token_ids])).last_hidden_state[0]
        return rows


@pytest.fixture(params=["qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"])
def case(request: pytest.FixtureRequest, saved: Callable[..., Saved], tmp_path: Path, backend: Ops) -> Case:
    source = saved(request.param)
    return Case(checkpoints.copy_with_mtp(source.directory, tmp_path / "mtp"), source.oracle, backend)


def chain_of_plain(
    case: Case, plain: PlainMtp, hidden: Tensor, shifted: list[int]
) -> tuple[list[int], Tensor]:
    """Draft ids and logits [NUM_DRAFTS, V] after rows that pair `hidden` with `shifted` from position 0."""
    for position, (row, token_id) in enumerate(zip(hidden, shifted, strict=True)):
        out = plain.step(token_id, row, position)
    drafts: list[int] = []
    logits = []
    for step in range(NUM_DRAFTS):
        logits.append(case.lm_head @ out)
        drafts.append(int(logits[-1].argmax()))
        out = plain.step(drafts[-1], out, len(shifted) + step)
    return drafts, torch.stack(logits)


def chain_of_ours(case: Case, solo: Solo, root: Tensor, position: int) -> tuple[list[int], Tensor]:
    """The same from the head's output `root` [1, D] of the newest row; `position` is the chain's first."""
    drafts: list[int] = []
    logits = []
    for step in range(NUM_DRAFTS):
        logits.append(case.head.logits(root))
        drafts.append(int(logits[-1].argmax()))
        root = solo.head_rows(case.head, position + step, drafts[-1:], root, prompt=False)
    return drafts, torch.cat(logits)


def test_prompt_and_chain(case: Case) -> None:
    prompt = torch.randint(101, (67,), generator=torch.Generator().manual_seed(0)).tolist()
    solo = Solo(case.loaded.model, with_mtp=True)
    hidden = solo.prefill(prompt)
    anchor = int(case.loaded.model.logits(hidden[-1:]).argmax())
    rows = solo.head_rows(case.head, 0, [*prompt[1:], anchor], hidden, prompt=True)
    drafts, logits = chain_of_ours(case, solo, rows[-1:], position=len(prompt))

    expected_drafts, expected = chain_of_plain(case, case.plain(), case.hidden(prompt), [*prompt[1:], anchor])
    error = checkpoints.relative_error(logits, expected)
    print(
        f"\n{case.loaded.model.ops.name} {case.loaded.model.config.family} head: relative error {error:.1e}"
    )
    assert drafts == expected_drafts
    assert error < TOLERANCE


@pytest.mark.parametrize("num_accepted", range(NUM_DRAFTS + 1))
def test_chain_rows_are_overwritten(num_accepted: int, case: Case) -> None:
    """After a verify the accepted positions get rows from the trunk: the next chain is that of a fresh cache."""
    prompt = torch.randint(101, (20,), generator=torch.Generator().manual_seed(1)).tolist()
    solo = Solo(case.loaded.model, with_mtp=True)
    hidden = solo.prefill(prompt)
    anchor = int(case.loaded.model.logits(hidden[-1:]).argmax())
    rows = solo.head_rows(case.head, 0, [*prompt[1:], anchor], hidden, prompt=True)
    chain_of_ours(case, solo, rows[-1:], position=len(prompt))

    # What the target says is made up here: `num_accepted` drafts stand, then another token.
    fed = [anchor, *torch.randint(101, (num_accepted,), generator=torch.Generator().manual_seed(2)).tolist()]
    kept = solo.verify(fed + [0] * (NUM_DRAFTS - num_accepted))[: len(fed)]
    start = solo.length
    solo.commit(len(fed))
    following = 55
    rows = solo.head_rows(case.head, start, [*fed[1:], following], kept, prompt=False)
    drafts, logits = chain_of_ours(case, solo, rows[-1:], position=solo.length)

    committed = prompt + fed
    shifted = [*committed[1:], following]
    expected_drafts, expected = chain_of_plain(case, case.plain(), case.hidden(committed), shifted)
    assert drafts == expected_drafts
    assert checkpoints.relative_error(logits, expected) < TOLERANCE


def test_head_leaves_the_trunk_alone(case: Case) -> None:
    """The head writes its own key-value layer and nothing else."""
    solo = Solo(case.loaded.model, with_mtp=True)
    hidden = solo.prefill(list(range(30)))
    before = [t.clone() for name in ("ssm", "ring_x", "k_cache", "v_cache") for t in getattr(solo.pool, name)]
    solo.head_rows(case.head, 0, list(range(1, 31)), hidden, prompt=True)
    after = [t for name in ("ssm", "ring_x", "k_cache", "v_cache") for t in getattr(solo.pool, name)]
    changed = [
        i
        for i, (a, b) in enumerate(zip(before, after, strict=True))
        if not torch.equal(a.nan_to_num(), b.nan_to_num())
    ]
    num_gdn, num_attention = len(solo.pool.ssm), len(solo.pool.k_cache)
    assert changed == [2 * num_gdn + num_attention - 1, 2 * num_gdn + 2 * num_attention - 1]
