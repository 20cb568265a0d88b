"""LLM on a scripted target: results in order, refusals with their position, streams that do not take from each other."""

from __future__ import annotations

from pathlib import Path
from threading import Thread
from typing import Any
from unittest import mock

import pytest

from metrale.engine import engine as engine_module
from metrale.engine.llm import LLM
from metrale.engine.outputs import StreamChunk
from metrale.errors import ConfigError, RequestError
from metrale.model.loader import LoadedModel
from metrale.sampling.params import SamplingParams
from tests.engine.scripted import (
    VOCAB_SIZE,
    Target,
    always_right,
    drafting,
    emitted,
    greedy,
    make_engine,
    run,
)

PROMPTS: list[list[int]] = [[5], [6, 7, 8], list(range(4, 44)) * 2, [9, 9]]


def make_llm(target: Target | None = None, **options: Any) -> LLM:
    target = target or Target()
    options = {
        "max_model_len": 128,
        "max_num_seqs": 3,
        "skip_tokenizer_init": True,
        "backend": "torch",
    } | options
    loaded = LoadedModel(target, None, has_mtp_tensors=False)  # type: ignore[arg-type]
    with (
        mock.patch.object(engine_module, "resolve", return_value=Path("/nowhere")),
        mock.patch.object(engine_module, "load_model", return_value=loaded),
    ):
        return LLM("scripted", **options)


def expected(max_tokens: int = 12) -> list[tuple[int, ...]]:
    requests = [(prompt, greedy(max_tokens=max_tokens)) for prompt in PROMPTS]
    return [tuple(emitted(s)) for s in run(make_engine(Target()), requests)]


def impatient(llm: LLM) -> LLM:
    """A step of an engine without work is an error here: a caller would wait for ever."""
    advance = llm.engine.advance

    def checked() -> None:
        assert llm.engine.has_work, "stepping an engine that has nothing to do"
        advance()

    llm.engine.advance = checked  # type: ignore[method-assign]
    return llm


def joined(chunks: list[StreamChunk]) -> tuple[int, ...]:
    return tuple(token for chunk in chunks for token in chunk.token_ids)


@pytest.mark.parametrize("depth", [None, 3])
def test_results_come_in_order(depth: int | None) -> None:
    """More requests than slots, ends in another order than starts."""
    target = Target()
    options: dict[str, Any] = {}
    if depth:
        options["speculative_config"] = {"method": "ngram", "num_speculative_tokens": depth}
        options["drafter"] = drafting(target, always_right)
    llm = make_llm(target, **options)
    lengths = [12, 3, 9, 1]
    outs = llm.generate(PROMPTS, [greedy(max_tokens=n) for n in lengths], use_tqdm=False)
    assert [out.outputs[0].token_ids for out in outs] == [
        e[:n] for e, n in zip(expected(), lengths, strict=True)
    ]
    assert [list(out.prompt_token_ids) for out in outs] == PROMPTS
    assert [out.outputs[0].finish_reason for out in outs] == ["length"] * 4
    stats = llm.stats()
    assert stats["num_emitted_tokens"] == sum(lengths)
    per_request = [out.metrics.speculative_decoding for out in outs]
    assert stats["num_accepted_tokens"] == sum(m["num_accepted_tokens"] for m in per_request)
    assert (stats["num_drafts"] > 0) == bool(depth)
    again = llm.generate(PROMPTS, greedy(max_tokens=12), use_tqdm=False)
    assert [out.outputs[0].token_ids for out in again] == expected()


def test_samples_come_in_order() -> None:
    params = SamplingParams(n=5, temperature=1.0, seed=3, max_tokens=6)
    (out,) = make_llm().generate([6, 7], params, use_tqdm=False)
    assert [o.index for o in out.outputs] == list(range(5))
    assert len({o.token_ids for o in out.outputs}) == 5
    assert out.metrics.speculative_decoding["num_emitted_tokens"] == 30


def test_no_prompts() -> None:
    assert make_llm().generate([], use_tqdm=False) == []


@pytest.mark.parametrize(
    ("prompts", "params", "words"),
    [
        ([[5], []], None, ["prompt 1", "empty"]),
        ([[5], [6], [VOCAB_SIZE]], None, ["prompt 2", "outside the vocabulary"]),
        (["text"], None, ["prompt 0", "no tokenizer"]),
        ([[5], [6]], [greedy(), greedy(stop="x")], ["prompt 1", "stop strings"]),
        ([[5], [6]], [greedy()], ["1 SamplingParams for 2 prompts"]),
        ([[5]], [{"temperature": 0}], ["prompt 0", "SamplingParams", "dict"]),
        (3, None, ["int"]),
    ],
)
def test_a_bad_call_raises_before_any_work(prompts: Any, params: Any, words: list[str]) -> None:
    llm = make_llm()
    with pytest.raises(RequestError) as raised:
        llm.generate(prompts, params, use_tqdm=False)
    assert all(word in str(raised.value) for word in words)
    assert not llm.engine.has_work
    with pytest.raises(RequestError):
        llm.stream([])


def test_a_call_that_is_broken_off_leaves_nothing_behind() -> None:
    class Stop(Exception):
        pass

    llm = make_llm()
    advance = llm.engine.advance
    count = 0

    def interrupted() -> None:
        nonlocal count
        count += 1
        if count == 3:
            raise Stop
        advance()

    with mock.patch.object(llm.engine, "advance", interrupted), pytest.raises(Stop):
        llm.generate(PROMPTS, greedy(max_tokens=12), use_tqdm=False)
    assert not llm.engine.has_work
    assert llm.engine.pool.slots.num_free == 3
    outs = llm.generate(PROMPTS, greedy(max_tokens=12), use_tqdm=False)
    assert [out.outputs[0].token_ids for out in outs] == expected()


def test_a_stream_is_the_generated_output_in_pieces() -> None:
    chunks = list(impatient(make_llm()).stream(PROMPTS[2], greedy(max_tokens=12)))
    assert joined(chunks) == expected()[2]
    assert [c.finish_reason for c in chunks] == [None] * (len(chunks) - 1) + ["length"]


def test_a_stream_carries_the_logprobs() -> None:
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=12, logprobs=2)
    (output,) = make_llm().generate(PROMPTS[1], params, use_tqdm=False)
    chunks = list(make_llm().stream(PROMPTS[1], params))
    assert all(len(chunk.logprobs or ()) == len(chunk.token_ids) for chunk in chunks)
    assert tuple(entry for chunk in chunks for entry in chunk.logprobs or ()) == output.outputs[0].logprobs
    assert all(chunk.logprobs is None for chunk in make_llm().stream(PROMPTS[1], greedy(max_tokens=2)))


def test_a_stream_left_early_is_aborted() -> None:
    llm = make_llm()
    stream = llm.stream([5], greedy(max_tokens=12))
    next(stream)
    assert llm.engine.has_work
    stream.close()  # type: ignore[attr-defined]
    assert not llm.engine.has_work
    assert llm.engine.pool.slots.num_free == 3


@pytest.mark.parametrize("max_tokens", [(12, 12), (12, 3), (3, 12)])
def test_streams_side_by_side(max_tokens: tuple[int, int]) -> None:
    """Two iterators over one engine, read in turns: each gets all of its own, and neither waits for ever."""
    llm = impatient(make_llm())
    streams = [llm.stream(PROMPTS[i], greedy(max_tokens=n)) for i, n in enumerate(max_tokens)]
    chunks: list[list[StreamChunk]] = [[], []]
    live = [0, 1]
    while live:
        for i in live.copy():
            chunk = next(streams[i], None)
            if chunk is None:
                live.remove(i)
            else:
                chunks[i].append(chunk)
    assert [joined(c) for c in chunks] == [expected()[i][:n] for i, n in enumerate(max_tokens)]


def test_generate_while_a_stream_is_open() -> None:
    llm = impatient(make_llm())
    stream = llm.stream(PROMPTS[0], greedy(max_tokens=12))
    chunks = [next(stream)]
    (out,) = llm.generate([PROMPTS[1]], greedy(max_tokens=12), use_tqdm=False)
    chunks += stream
    assert out.outputs[0].token_ids == expected()[1]
    assert joined(chunks) == expected()[0]


def test_threads_share_one_llm() -> None:
    llm = make_llm()
    got: dict[int, Any] = {}

    def work(number: int) -> None:
        for _ in range(4):
            outs = llm.generate(PROMPTS, greedy(max_tokens=12), use_tqdm=False)
            got[number] = [out.outputs[0].token_ids for out in outs]

    threads = [Thread(target=work, args=(number,), daemon=True) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert got == {number: expected() for number in range(4)}
    assert not llm.engine.has_work


def test_an_abort_at_the_engine_ends_the_stream() -> None:
    llm = impatient(make_llm())
    stream = llm.stream(PROMPTS[1], greedy(max_tokens=12))
    first = next(stream)
    llm.engine.abort(0)
    rest = list(stream)
    assert [chunk.finish_reason for chunk in (first, *rest)][-1] == "abort"
    tokens = joined([first, *rest])
    assert tokens == expected()[1][: len(tokens)]


def test_a_lost_request_is_an_error_and_no_endless_wait() -> None:
    llm = make_llm()
    stream = llm.stream(PROMPTS[1], greedy(max_tokens=12))
    next(stream)
    llm.engine.outbox.clear()
    llm.engine.scheduler.running.clear()
    with pytest.raises(RuntimeError, match="request 0 is lost"):
        list(stream)


@pytest.mark.parametrize("prompt", [b"abc", [b"abc"], bytearray(b"abc")])
def test_bytes_are_no_prompt(prompt: Any) -> None:
    with pytest.raises(RequestError, match="text"):
        make_llm().generate(prompt, greedy(max_tokens=1), use_tqdm=False)


def test_unknown_options_name_the_nearest() -> None:
    with pytest.raises(ConfigError, match="'max_model_length'; the nearest known one is 'max_model_len'"):
        LLM("tiny", max_model_length=3)
