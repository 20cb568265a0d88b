"""The MTP drafter's alignment: one row a committed position, made of what the trunk said, whatever was rejected."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from metrale import reference
from metrale.core import Sequence, SequenceKey
from metrale.drafters.base import Ask, Committed
from metrale.drafters.mtp import MtpDrafter
from metrale.model.batch import Batch
from metrale.model.build import RowSpec, build_batch
from metrale.model.loader import LoadedModel, load_model
from metrale.sampling.params import SamplingParams
from metrale.state.pool import PAGE_SIZE, Pool
from metrale.telemetry.statistics import SpeculationStats
from tests.engine.scripted import (
    Target,
    always_right,
    digest,
    drafting,
    emitted,
    greedy,
    make_engine,
    read,
    run,
)
from tests.model import checkpoints

VOCAB_SIZE = 101
DEPTH = 4
NUM_POSITIONS = 160
SAMPLED = SamplingParams(temperature=1.0, seed=3)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """A lively random hybrid with a head."""
    oracle = checkpoints.build(checkpoints.text_config("qwen3_5_text", tie_word_embeddings=True))
    directory: Path = checkpoints.save(oracle, tmp_path_factory.mktemp("plain"))
    directory = checkpoints.copy_with_mtp(directory, tmp_path_factory.mktemp("head") / "model")
    return load_model(directory, reference.ops(), with_mtp=True)


class Driver:
    """Sequences on a real trunk and head, told which drafts to take: the target's opinion does not matter here."""

    def __init__(self, loaded: LoadedModel, seed: int = 0) -> None:
        assert loaded.head is not None
        self.model = loaded.model
        num_pages = 4 * NUM_POSITIONS // PAGE_SIZE
        self.pool = Pool(
            self.model.config.state_shape(with_mtp=True),
            num_slots=4,
            num_pages=num_pages,
            max_pages_per_slot=num_pages // 4,
            max_rows=DEPTH + 1,
            dtype=torch.float32,
            device=torch.device("cpu"),
            page_order=random.Random(seed).sample(range(num_pages), num_pages),
        )
        for name in ("ssm", "ring_k", "ring_u", "ring_g", "ring_x", "k_cache", "v_cache"):
            for tensor in getattr(self.pool, name):
                tensor.fill_(torch.nan)
        self.drafter = MtpDrafter(loaded.head, self.pool, VOCAB_SIZE)
        self.sequences: list[Sequence] = []

    def add(self, prompt: Seq[int], params: SamplingParams = SAMPLED) -> Sequence:
        slot, pages = self.pool.acquire(NUM_POSITIONS)
        sequence = Sequence(
            SequenceKey(len(self.sequences), 0),
            0,
            0,
            len(prompt),
            list(prompt),
            params,
            3,
            99,
            SpeculationStats(),
        )
        sequence.slot, sequence.pages = slot, pages
        self.sequences.append(sequence)
        return sequence

    def prompt(self, sequence: Sequence, anchor: int, chunk: int = NUM_POSITIONS) -> None:
        """The whole prompt, `chunk` rows (a multiple of 64) a step; then its first token."""
        for start in range(0, sequence.prompt_len, chunk):
            rows = sequence.token_ids[start : min(start + chunk, sequence.prompt_len)]
            spec = RowSpec(sequence.slot, start, rows, sequence.pages)
            hidden = self.model.forward(build_batch((), (spec,), None, self.pool), self.pool)
            if start + len(rows) == sequence.prompt_len:
                sequence.token_ids.append(anchor)
            self._commit([Committed(sequence, start, 0, len(rows), True)], hidden)
            self.drafter.propose([])

    def step(self, plan: Seq[tuple[Sequence, int, int, int]]) -> list[tuple[int, ...]]:
        """(sequence, drafts to ask for, drafts to take, the token after them) each; the drafts."""
        drafts = [
            d.token_ids
            for d in self.drafter.propose([Ask(sequence, depth) for sequence, depth, _, _ in plan])
        ]
        specs, committed, first_row = [], [], 0
        for (sequence, _, num_taken, _), draft in zip(plan, drafts, strict=True):
            fed = (sequence.token_ids[-1], *draft)
            specs.append(RowSpec(sequence.slot, sequence.num_committed, fed, sequence.pages))
            committed.append(Committed(sequence, sequence.num_committed, first_row, 1 + num_taken, False))
            first_row += len(fed)
        hidden = self.model.forward(build_batch(specs, (), None, self.pool), self.pool)
        for (sequence, _, num_taken, following), draft in zip(plan, drafts, strict=True):
            assert len(draft) >= num_taken
            sequence.token_ids += [*draft[:num_taken], following]
        self._commit(committed, hidden)
        return drafts

    def _commit(self, committed: list[Committed], hidden: Tensor) -> None:
        for rows in committed:
            self.pool.commit(rows.sequence.slot, rows.num_rows)
            rows.sequence.num_committed += rows.num_rows
        self.drafter.commit(committed, hidden)

    def head_rows(self, sequence: Sequence) -> tuple[Tensor, Tensor]:
        """Keys and values of the head at positions 0 .. committed - 1."""
        at = torch.arange(sequence.num_committed)
        rows = torch.tensor(sequence.pages)[at // PAGE_SIZE] * PAGE_SIZE + at % PAGE_SIZE
        layer = self.model.config.num_attention_layers
        return self.pool.k_cache[layer].flatten(0, 1)[rows], self.pool.v_cache[layer].flatten(0, 1)[rows]

    def drafts_of(self, sequence: Sequence, depth: int = DEPTH) -> tuple[int, ...]:
        return self.drafter.propose([Ask(sequence, depth)])[0].token_ids


def fresh(
    loaded: LoadedModel, token_ids: Seq[int], prompt_len: int, params: SamplingParams = SAMPLED
) -> tuple[Driver, Sequence]:
    """The same sequence on an empty pool, where no draft was ever made."""
    driver = Driver(loaded, seed=9)
    sequence = driver.add(token_ids[:prompt_len], params)
    driver.prompt(sequence, token_ids[prompt_len])
    for following in token_ids[prompt_len + 1 :]:
        driver.step([(sequence, 0, 0, following)])
    return driver, sequence


def assert_like_fresh(loaded: LoadedModel, driver: Driver, sequence: Sequence) -> None:
    """The head's rows have no hole and are those of a fresh recompute, and so are the next drafts."""
    other, twin = fresh(loaded, sequence.token_ids, sequence.prompt_len, sequence.params)
    assert twin.num_committed == sequence.num_committed == len(sequence.token_ids) - 1
    drafts = driver.drafts_of(sequence)
    assert drafts == other.drafts_of(twin)
    assert len(drafts) == DEPTH
    for mine, theirs in zip(driver.head_rows(sequence), other.head_rows(twin), strict=True):
        assert not mine.isnan().any(), (
            f"a hole at {mine.isnan().flatten(1).any(1).nonzero().flatten().tolist()}"
        )
        assert torch.equal(mine, theirs)


def tokens(num: int, seed: int = 0) -> list[int]:
    return torch.randint(1, VOCAB_SIZE, (num,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("params", [greedy(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("pattern", [[0], [1], [2], [3], [4], [4, 0, 2, 1, 3]], ids=str)
def test_accepting_some_of_the_drafts(
    pattern: list[int], params: SamplingParams, loaded: LoadedModel
) -> None:
    driver = Driver(loaded)
    sequence = driver.add(tokens(20), params)
    driver.prompt(sequence, anchor=17)
    for number, num_taken in enumerate(pattern * (10 // len(pattern))):
        driver.step([(sequence, DEPTH, num_taken, 1 + 7 * number % 100)])
    assert_like_fresh(loaded, driver, sequence)


@pytest.mark.parametrize("chunk", [64, NUM_POSITIONS])
@pytest.mark.parametrize("prompt_len", [1, 63, 64, 65, 128, 130])
def test_prompts(prompt_len: int, chunk: int, loaded: LoadedModel) -> None:
    """At once or in chunks; the token after a chunk's last row is the next chunk's first."""
    driver = Driver(loaded)
    sequence = driver.add(tokens(prompt_len))
    driver.prompt(sequence, anchor=5, chunk=chunk)
    assert_like_fresh(loaded, driver, sequence)
    driver.step([(sequence, DEPTH, 2, 9)])
    assert_like_fresh(loaded, driver, sequence)


@pytest.mark.parametrize("num_steps", [1, 7, 30])
def test_many_steps_without_drafts(num_steps: int, loaded: LoadedModel) -> None:
    """Depth 0 leaves no gap and no drift: the first drafts afterwards are those of a fresh drafter."""
    driver = Driver(loaded)
    sequence = driver.add(tokens(10))
    driver.prompt(sequence, anchor=3)
    driver.step([(sequence, DEPTH, 4, 8)])
    for following in tokens(num_steps, seed=1):
        assert driver.step([(sequence, 0, 0, following)]) == [()]
    assert_like_fresh(loaded, driver, sequence)


def test_company_changes_no_draft(loaded: LoadedModel) -> None:
    """Four sequences with depths and accepts of their own: each drafts as it does alone."""
    rng = random.Random(0)
    driver = Driver(loaded)
    sequences = [driver.add(tokens(n, seed=n)) for n in (1, 30, 64, 5)]
    for sequence in sequences:
        driver.prompt(sequence, anchor=sequence.prompt_len)
    for _ in range(6):
        chosen = sorted(rng.sample(range(4), rng.randint(1, 4)))
        plan = []
        for n in chosen:
            depth = rng.randint(0, DEPTH)
            plan.append((sequences[n], depth, rng.randint(0, depth), rng.randrange(1, VOCAB_SIZE)))
        drafts = driver.step(plan)
        assert [len(draft) for draft in drafts] == [depth for _, depth, _, _ in plan]
    for sequence in sequences:
        assert_like_fresh(loaded, driver, sequence)


def test_a_shallower_ask_is_a_prefix_of_a_deeper_one(loaded: LoadedModel) -> None:
    driver = Driver(loaded)
    sequence = driver.add(tokens(12))
    driver.prompt(sequence, anchor=3)
    whole = driver.drafts_of(sequence)
    assert [driver.drafts_of(sequence, depth) for depth in (0, 1, 2, 3, 4)] == [whole[:n] for n in range(5)]
    assert driver.drafts_of(sequence) == whole, "proposing changed something"


def test_a_restart_forgets_the_prompt_and_learns_it_again(loaded: LoadedModel) -> None:
    """As after a chunk that raised: the sequence stands at position 0 and its prompt comes once more."""
    driver = Driver(loaded)
    sequence = driver.add(tokens(100))
    spec = RowSpec(sequence.slot, 0, sequence.token_ids[:64], sequence.pages)
    hidden = driver.model.forward(build_batch((), (spec,), None, driver.pool), driver.pool)
    driver._commit([Committed(sequence, 0, 0, 64, True)], hidden)
    driver.pool.reset(sequence.slot)
    sequence.num_committed = 0
    driver.drafter.restart(sequence.key)
    assert driver.drafts_of(sequence) == ()
    driver.prompt(sequence, anchor=5, chunk=64)
    assert_like_fresh(loaded, driver, sequence)


def test_a_released_sequence_leaves_nothing(loaded: LoadedModel) -> None:
    driver = Driver(loaded)
    sequence = driver.add(tokens(12))
    driver.prompt(sequence, anchor=3)
    driver.step([(sequence, DEPTH, 2, 9)])
    driver.drafter.release(sequence.key)
    assert (driver.drafter._backlog, driver.drafter._roots) == ({}, {})
    assert driver.drafts_of(sequence) == ()


@pytest.mark.parametrize("num_sound", [0, 1, 3])
def test_a_row_that_is_no_number_ends_the_chain(
    num_sound: int, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN or nothing but -inf at chain row 1 makes the draft one token long, and harms no neighbour."""
    for bad in (torch.nan, -torch.inf):
        driver = Driver(loaded)
        first, second = (driver.add(tokens(n, seed=n)) for n in (9, 12))
        for sequence in (first, second):
            driver.prompt(sequence, anchor=3)
        expected = [driver.drafts_of(first), driver.drafts_of(second)]
        sound, calls = driver.drafter._head.logits, 0

        def logits(hidden: Tensor, bad: float = bad, sound: Any = sound) -> Tensor:
            nonlocal calls
            rows: Tensor = sound(hidden).clone()
            if calls == num_sound:
                rows[0] = bad
            calls += 1
            return rows

        with monkeypatch.context() as patch:
            patch.setattr(driver.drafter._head, "logits", logits)
            got = driver.drafter.propose([Ask(first, DEPTH), Ask(second, DEPTH)])
        assert [d.token_ids for d in got] == [expected[0][:num_sound], expected[1]]


class KnowingHead:
    """A head that never errs as long as it is fed right: it reads the tokens back from its own cache.

    Row t keeps token t + 1, so the token after the next follows from token 0, rows 0 .. t and the rule. Its hidden input
    must have seen tokens 0 .. t and no other: the trunk's row t, or in a chain its own row t - 1.
    """

    def __init__(self, target: Target) -> None:
        self.model = target
        self.logits = target.logits

    def forward(self, token_ids: Tensor, hidden: Tensor, batch: Batch, pool: Pool) -> Tensor:
        cache = pool.k_cache[1]
        cache.flatten(0, 1)[batch.kv_index, 0, 0] = token_ids.float()
        out: list[tuple[float, float]] = []
        rows = iter(hidden[:, 1].tolist())
        for groups in (batch.generated, batch.prompt):
            for n, group in enumerate(groups.host):
                first = read(pool.k_cache[0], groups, n, 1)
                later = read(cache, groups, n, group.start + group.num_rows)
                for end in range(group.start + 1, group.start + group.num_rows + 1):
                    history = first + later[:end]
                    assert next(rows) == digest(history[:-1]), "the hidden row of another prefix"
                    following = self.model.rule(history)
                    assert following is not None
                    out.append((following, digest(history)))
        return torch.tensor(out)


def requests_with(params: SamplingParams) -> list[tuple[list[int], SamplingParams]]:
    return [([4 + i * n % 40 for i in range(n)], params) for n in (1, 2, 63, 64, 65, 130)]


@pytest.mark.parametrize(
    "params",
    [greedy(max_tokens=25), SamplingParams(temperature=1.0, max_tokens=25, ignore_eos=True)],
    ids=["greedy", "sampled"],
)
@pytest.mark.parametrize(("depth", "budget"), [(1, 2048), (4, 2048), (4, 70), (16, 100), (3, 5)])
def test_a_head_that_knows_is_always_right(depth: int, budget: int, params: SamplingParams) -> None:
    """Through a whole engine, several sequences and chunked prompts: every draft is accepted, so that positions, tokens,
    cache rows and noise of drafts and target stand where they belong; and as many are made as by a drafter that is told the
    answers."""
    requests = requests_with(params)
    plain = [emitted(s) for s in run(make_engine(Target(), max_num_seqs=8), requests)]
    answers = {tuple(prompt): tokens for (prompt, _), tokens in zip(requests, plain, strict=True)}
    options = {"depth": depth, "max_num_seqs": 4, "max_num_batched_tokens": budget}
    target = Target()
    engine = make_engine(target, method="mtp", head=KnowingHead(target), **options)
    assert [emitted(s) for s in run(engine, requests)] == plain
    told = drafting(target, always_right, lambda s: answers[tuple(s.token_ids[: s.prompt_len])])
    other = make_engine(Target(), drafter=told, **options)
    run(other, requests)
    assert engine.scheduler.stats == other.scheduler.stats
    assert other.scheduler.stats.draft_acceptance_rate == 1.0


class FaultyOnce(Target):
    """Raises in forward number `at`, after its work."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at

    def forward(self, batch: Batch, pool: Pool) -> Tensor:
        hidden = super().forward(batch, pool)
        if len(self.batches) == self.at:
            raise RuntimeError("injected fault")
        return hidden


@pytest.mark.parametrize("at", range(1, 9))
def test_a_fault_leaves_no_hole(at: int) -> None:
    """A prompt that starts over, a step that is run again without drafts: the head knows as much as before."""
    requests = requests_with(greedy(max_tokens=25))
    plain = [emitted(s) for s in run(make_engine(Target(), max_num_seqs=8), requests)]
    target = FaultyOnce(at)
    options = {"depth": 3, "max_num_seqs": 4, "max_num_batched_tokens": 70}
    engine = make_engine(target, method="mtp", head=KnowingHead(target), **options)
    assert [emitted(s) for s in run(engine, requests, may_fail=True)] == plain
    assert len(engine._warned) == 1, engine._warned
    assert engine.scheduler.stats.draft_acceptance_rate == 1.0
