"""The engine: seeds, slots and aborts, capacity, and patterns on a real hybrid."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import pytest
import torch

from metrale import LLM
from metrale.config import EngineConfig, SpeculativeConfig
from metrale.core import Sequence
from metrale.engine.engine import Engine
from metrale.errors import ConfigError, RequestError
from metrale.sampling.params import SamplingParams
from tests.compiler import needs_compiler
from tests.engine.schedules import poison
from tests.engine.scripted import (
    PROMPTS,
    VOCAB_SIZE,
    Target,
    always_right,
    cycle,
    drafting,
    emitted,
    finish,
    greedy,
    make_engine,
    run,
)


def sampled(seed: int | None = None, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=seed, max_tokens=12, ignore_eos=True, **options)


def tokens(sequences: Seq[Sequence]) -> list[list[int]]:
    return [emitted(sequence) for sequence in sequences]


# Seeds


def test_a_seeded_request_draws_the_same_in_any_company() -> None:
    """Alone, with others, in another order, seeded and unseeded, with drafts right and wrong."""
    mine = ((6, 7), sampled(42))
    alone = tokens(run(make_engine(Target()), [mine]))[0]
    others: list[tuple[Seq[int], SamplingParams]] = [
        ((5,), sampled(7)),
        ((6, 7), sampled()),
        (PROMPTS[2], greedy(max_tokens=30)),
        ((6, 7), sampled(43)),
    ]
    for place in range(5):
        requests = [*others[:place], mine, *others[place:]]
        assert tokens(run(make_engine(Target()), requests))[place] == alone
        target = Target()
        script = cycle((3, 2), (0, 0), (3, 3))
        drafter = drafting(target, script, lambda sequence: alone)
        engine = make_engine(target, depth=3, drafter=drafter, max_num_seqs=3, max_num_batched_tokens=70)
        got = run(engine, requests)[place]
        assert emitted(got) == alone
        assert got.stats.num_accepted_tokens > 0


def test_a_perfect_draft_of_a_sampled_request_is_accepted_whole() -> None:
    """The noise of a row is that of the position its token will stand at, in a verify as in plain decode."""
    request = ((6, 7), sampled(42))
    (alone,) = tokens(run(make_engine(Target()), [request]))
    target = Target()
    engine = make_engine(target, depth=4, drafter=drafting(target, always_right, lambda sequence: alone))
    (got,) = run(engine, [request])
    assert emitted(got) == alone
    assert got.stats.num_accepted_tokens == got.stats.num_draft_tokens > 0


def test_unseeded_requests_differ_and_follow_the_engine_s_seed() -> None:
    requests = [((6, 7), sampled()) for _ in range(6)]
    first, again = (tokens(run(make_engine(Target(), seed=5), requests)) for _ in range(2))
    assert first == again
    assert len({tuple(t) for t in first}) == 6
    other = tokens(run(make_engine(Target(), seed=6), requests))
    assert all(a != b for a, b in zip(first, other, strict=True))


def test_an_unseeded_request_keeps_its_draw_whatever_runs_beside_it() -> None:
    """Its seed comes from the engine's and its own ordinal, not from when it runs."""
    requests = [((6, 7), sampled()) for _ in range(5)]
    together = tokens(run(make_engine(Target(), max_num_seqs=5), requests))
    engine = make_engine(Target(), max_num_seqs=5)
    one_by_one = [tokens(run(engine, [request]))[0] for request in requests]
    assert one_by_one == together


def test_samples_of_a_request_differ_and_are_reproducible() -> None:
    def samples(n: int, seed: int | None) -> list[list[int]]:
        engine = make_engine(Target(), max_num_seqs=2)
        engine.add_request([6, 7], sampled(seed, n=n))
        ended: dict[int, Sequence] = {}
        while engine.has_work:
            ended |= {e.sequence.sample: e.sequence for e in engine.step() if e.finish_reason}
        return [emitted(ended[i]) for i in range(n)]

    four = samples(4, 9)
    assert len({tuple(t) for t in four}) == 4
    assert samples(2, 9) == four[:2]
    assert samples(4, None) == samples(4, None)
    assert samples(1, 9) == tokens(run(make_engine(Target()), [((6, 7), sampled(9))]))


# Slots, aborts


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("victim", [0, 1, 2, 3])
def test_abort_between_steps(victim: int, num_steps: int) -> None:
    """The others are not touched, the slot serves the next one at once, nothing of the old owner comes back."""
    requests = [(prompt, greedy(max_tokens=14)) for prompt in PROMPTS]
    expected = tokens(run(make_engine(Target()), requests))
    target = Target()
    script = cycle((3, 1), (3, 3), (0, 0))
    engine = make_engine(
        target, depth=3, drafter=drafting(target, script), max_num_seqs=3, max_num_batched_tokens=70
    )
    ids = [engine.add_request(prompt, params) for prompt, params in requests]
    seen: list[int] = []
    for _ in range(num_steps):
        seen += [e.sequence.request_id for e in engine.step() if e.finish_reason]
    engine.abort(ids[victim])
    ended = [event.sequence for event in engine.outbox]
    engine.outbox.clear()
    assert [(s.request_id, s.finish_reason) for s in ended] == ([] if victim in seen else [(victim, "abort")])
    late = engine.add_request((6, 7, 8), greedy(max_tokens=14))
    engine.abort(12345)
    rest = [i for i in ids if i != victim and i not in seen]
    got = finish(engine, [*rest, late])
    assert tokens(got) == [*(expected[i] for i in rest), expected[1]]
    assert all(emitted(s) == expected[victim][: len(emitted(s))] for s in ended)
    assert len({s.key for s in got}) == len(got)


def hybrid(model: Path, depth: int | None = None, drafter: Any = None, **options: Any) -> Engine:
    spec = (
        None
        if depth is None
        else SpeculativeConfig("ngram", num_speculative_tokens=depth, prompt_lookup_min=1)
    )
    options = {"max_num_seqs": 3, "skip_tokenizer_init": True, "backend": "torch"} | options
    engine = Engine(EngineConfig(str(model), spec, max_model_len=256, **options), drafter)
    poison(engine, random.Random(0))
    return engine


def some_requests(num: int, seed: int = 0) -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(seed)
    return [
        (
            [rng.randrange(1, 101) for _ in range(rng.choice((1, 5, 64, 70)))],
            greedy(max_tokens=6, ignore_eos=True),
        )
        for _ in range(num)
    ]


def test_a_slot_s_tenth_owner_is_served_like_the_first(random_model: Path) -> None:
    """On a fresh engine full of NaN and after nine others whose state was poisoned at their end."""
    requests = some_requests(10)
    used = hybrid(random_model, depth=3, max_num_seqs=2)
    together = tokens(run(used, requests))
    for request, expected in list(zip(requests, together, strict=True))[::3]:
        assert tokens(run(hybrid(random_model, depth=3), [request])) == [expected]
        assert tokens(run(used, [request])) == [expected]


def test_pattern_on_a_hybrid(random_model: Path) -> None:
    """K=4 accept 2, none, K=4 accept 4, none, for 180 tokens: as one row at a time. The soak compares states too."""
    request = ([3, 1, 4, 1, 5], greedy(max_tokens=180, ignore_eos=True))
    (expected,) = tokens(run(hybrid(random_model), [request]))
    assert len(set(expected)) > 20
    drafter = drafting(Target(), cycle((4, 2), (0, 0), (4, 4), (0, 0)), lambda sequence: expected)
    (got,) = run(hybrid(random_model, depth=4, drafter=drafter, fold_threshold=8), [request])
    assert emitted(got) == expected
    histogram = got.stats.acceptance_histogram
    assert histogram[2] >= 17
    assert histogram[4] >= 17
    assert sum(histogram) - histogram[2] - histogram[4] <= 1


# n-gram


@pytest.mark.parametrize("depth", [1, 3, 16])
@pytest.mark.parametrize("period", [1, 2, 5])
def test_ngram_drafts_follow_a_periodic_target_at_once(period: int, depth: int) -> None:
    """The history that is matched ends with the anchor: a target that goes round is foreseen whole, from the second lap on."""
    target = Target(lambda history: 10 + len(history) % period)
    engine = make_engine(target, depth=depth)
    (got,) = run(engine, [([10 + i % period for i in range(3 * period + 1)], greedy(max_tokens=40))])
    assert emitted(got) == [10 + (3 * period + 1 + i) % period for i in range(40)]
    assert got.stats.num_accepted_tokens == got.stats.num_draft_tokens
    # 39 tokens in rounds of depth + 1; a last round of one token needs no draft
    assert got.stats.num_drafts == -(-39 // (depth + 1)) - (39 % (depth + 1) == 1)


# Capacity


@pytest.mark.parametrize("depth", [None, 0, 4, 16])
@pytest.mark.parametrize("prompt_len", [1, 15, 28, 59, 60, 61, 62, 63])
def test_to_the_last_token_of_the_context(prompt_len: int, depth: int | None) -> None:
    """Context 64, wherever the prompt ends; the drafts never reach past it."""
    prompt = tuple(4 + i % 40 for i in range(prompt_len))
    target = Target()
    engine = make_engine(
        target,
        depth=depth,
        drafter=depth and drafting(target, always_right),
        max_model_len=64,
        max_num_seqs=1,
    )
    (got,) = run(engine, [(prompt, greedy(max_tokens=None))])
    assert len(got.token_ids) == 64
    assert got.finish_reason == "length"
    assert max(int(batch.positions.max()) for batch in target.batches) == 62, "the last token is never fed"
    (plain,) = run(make_engine(Target(), max_model_len=64), [(prompt, greedy(max_tokens=None))])
    assert emitted(got) == emitted(plain)


def test_a_prompt_that_leaves_no_room_is_refused() -> None:
    engine = make_engine(Target(), max_model_len=64)
    with pytest.raises(RequestError, match="64 tokens, which leaves no room in max_model_len 64"):
        engine.add_request([5] * 64, greedy())
    assert not engine.has_work


@pytest.mark.parametrize("depth", [3, 4, 16])
def test_eight_sequences_on_a_budget_of_32(depth: int) -> None:
    target = Target()
    engine = make_engine(
        target, depth=depth, drafter=drafting(target, always_right), max_num_seqs=8, max_num_batched_tokens=32
    )
    requests = [((5, n), greedy(max_tokens=40)) for n in range(4, 12)]
    assert tokens(run(engine, requests)) == tokens(run(make_engine(Target()), requests))
    assert max(batch.num_rows for batch in target.batches) <= 32
    assert any(batch.num_rows == 32 for batch in target.batches)


@pytest.mark.parametrize("num_seqs", [1, 4])
def test_advertised_concurrency_is_reached(num_seqs: int) -> None:
    """Memory for exactly that many full sequences: that many run at once, to the end of their context."""
    page_bytes = 16 * 2 * 2 * 4  # positions, keys and values, head_dim, float32
    target = Target()
    engine = make_engine(
        target,
        max_num_seqs=4,
        max_model_len=64,
        kv_cache_memory_bytes=num_seqs * 4 * page_bytes + page_bytes - 1,
    )
    got = run(engine, [((5, n), greedy(max_tokens=None)) for n in range(4, 12)])
    assert all(len(s.token_ids) == 64 for s in got)
    assert max(batch.num_generated for batch in target.batches) == num_seqs


def test_a_context_that_does_not_fit_fails_at_the_start() -> None:
    page_bytes = 16 * 2 * 2 * 4
    with pytest.raises(ConfigError) as raised:
        make_engine(Target(), max_model_len=64, kv_cache_memory_bytes=4 * page_bytes - 1)
    assert "kv_cache_memory_bytes" in str(raised.value)
    assert "\n" not in str(raised.value)
    with pytest.raises(
        ConfigError, match="max_model_len 513 is above the checkpoint's max_position_embeddings 512"
    ):
        make_engine(Target(), max_model_len=513)


def test_a_head_in_use_does_not_shorten_the_context(random_model: Path) -> None:
    """The longest sequence is part of the output, so it is the same with the head idle."""
    lengths = {
        Engine(
            EngineConfig(
                str(random_model),
                method and SpeculativeConfig(method),
                backend="torch",
                kv_cache_memory_bytes=200_000,
                skip_tokenizer_init=True,
            )
        ).max_model_len
        for method in (None, "ngram", "mtp")
    }
    assert len(lengths) == 1
    assert lengths.pop() < 512, "memory is the bound"


@pytest.mark.parametrize("backend", ["torch", pytest.param("cpu", marks=needs_compiler)])
def test_torch_s_default_dtype_changes_no_bit(backend: str) -> None:
    params = SamplingParams(temperature=0.8, seed=7, max_tokens=12, logprobs=1)
    outputs = []
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        torch.set_default_dtype(dtype)
        try:
            llm = LLM(backend=backend, speculative_config={"method": "mtp"})
            outputs.append(llm.generate("def fib(n):", params, use_tqdm=False)[0].outputs)
        finally:
            torch.set_default_dtype(torch.float32)
    assert outputs[0] == outputs[1] == outputs[2]
    assert outputs[0][0].error is None


def test_torch_s_modes_change_no_bit(random_model: Path) -> None:
    """Built or used under whatever the caller has switched on."""
    requests = some_requests(3)
    expected = tokens(run(hybrid(random_model), requests))
    with torch.inference_mode():
        engine = hybrid(random_model)
    assert tokens(run(engine, requests)) == expected
    for mode in (torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode(), torch.device("meta")):
        with mode:
            assert tokens(run(engine, requests)) == expected


def test_more_state_than_memory_is_a_clear_error(random_model: Path) -> None:
    with pytest.raises(
        ConfigError, match="no memory for the state of max_num_seqs 3 sequences at fold_threshold 1"
    ):
        hybrid(random_model, fold_threshold=10**12)
    with pytest.raises(ConfigError, match="max_num_seqs must be 1 to 65536"):
        make_engine(Target(), max_num_seqs=10**9)


def test_without_a_wish_the_context_is_what_fits() -> None:
    page_bytes = 16 * 2 * 2 * 4
    engine = make_engine(Target(), max_model_len=None, kv_cache_memory_bytes=5 * page_bytes)
    assert engine.max_model_len == 80
    (got,) = run(engine, [((5,), greedy(max_tokens=None))])
    assert len(got.token_ids) == 80
    assert make_engine(Target(), max_model_len=None).max_model_len == 512


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], greedy(), "the prompt is empty"),
        ([5, VOCAB_SIZE], greedy(), f"token id {VOCAB_SIZE} is outside the vocabulary of {VOCAB_SIZE} ids"),
        ([5, -1], greedy(), "token id -1 is outside"),
        ([True], greedy(), "token ids must be integers, got True"),
        (["a"], greedy(), "token ids must be integers, got 'a'"),
        ([5], greedy(stop="x"), "stop strings need a tokenizer"),
        ([5], greedy(stop_token_ids=[VOCAB_SIZE]), f"stop_token_ids: {VOCAB_SIZE} is outside the vocabulary"),
        ([5], sampled(n=70_000), "n must be at most"),
    ],
)
def test_what_can_never_be_served_is_refused_in_one_sentence(
    prompt: Any, params: SamplingParams, message: str
) -> None:
    engine = make_engine(Target())
    with pytest.raises(RequestError) as raised:
        engine.add_request(prompt, params)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not engine.has_work
    assert torch.tensor(engine.pool.num_committed).sum() == 0
