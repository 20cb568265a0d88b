"""The public API: what goes in, what comes out, and that open requests do not disturb one another."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from metrale import LLM, ConfigError, RequestError, SamplingParams
from metrale.engine.outputs import StreamChunk

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}


@pytest.fixture(scope="module")
def llm(random_model: Path) -> LLM:
    return LLM(str(random_model), backend="torch", skip_tokenizer_init=True, max_num_seqs=3, max_model_len=128)


def ids(chunks: list[StreamChunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


def test_results_keep_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [[1, 2, 3], [4], [5, 6], [7, 8, 9, 10], [11]]
    together = llm.generate(prompts, GREEDY, use_tqdm=False)
    alone = [llm.generate(prompt, GREEDY, use_tqdm=False)[0] for prompt in prompts]
    assert [out.prompt_token_ids for out in together] == [tuple(prompt) for prompt in prompts]
    assert [out.outputs for out in together] == [out.outputs for out in alone]


def test_one_prompt_is_text_or_ids_and_a_list_is_several(llm: LLM) -> None:
    assert len(llm.generate([1, 2], GREEDY, use_tqdm=False)) == 1
    assert len(llm.generate([[1], [2]], GREEDY, use_tqdm=False)) == 2
    assert len(llm.generate([np.int64(1), np.int64(2)], GREEDY, use_tqdm=False)) == 1
    assert llm.generate([], GREEDY, use_tqdm=False) == []


def test_each_prompt_has_its_own_parameters(llm: LLM) -> None:
    short = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    first, second = llm.generate([[1, 2], [3]], [GREEDY, short], use_tqdm=False)
    assert (len(first.outputs[0].token_ids), len(second.outputs[0].token_ids)) == (12, 2)
    with pytest.raises(RequestError, match="1 SamplingParams for 2 prompts"):
        llm.generate([[1], [2]], [GREEDY], use_tqdm=False)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[1], []], "prompt 1: the prompt is empty"),
        ([[1], [101]], "prompt 1: token id 101 is outside the vocabulary of 101 ids"),
        ([[-1]], "prompt 0: token id -1"),
        ([[True, 2]], "prompt 0: token id True"),
        ([[1] * 128], "prompt 0: the prompt has 128 tokens, which leaves no room in max_model_len 128"),
        (["text"], "prompt 0: this engine has no tokenizer"),
        ([[1], 2.5], "prompt 1: a prompt must be text or a list of token ids"),
        (7, "prompts must be text, token ids or a list of either"),
    ],
)
def test_a_bad_prompt_raises_before_any_work(llm: LLM, prompts: object, message: str) -> None:
    emitted = llm.stats()["num_emitted_tokens"]
    with pytest.raises(RequestError, match=message.replace("(", r"\(")):
        llm.generate(prompts, GREEDY, use_tqdm=False)  # type: ignore[arg-type]
    with pytest.raises(RequestError):
        llm.stream(prompts, GREEDY)  # type: ignore[arg-type]
    assert llm.stats()["num_emitted_tokens"] == emitted
    assert not llm.engine.has_work


def test_the_last_prompt_that_fits(llm: LLM) -> None:
    out = llm.generate([1] * 127, GREEDY, use_tqdm=False)[0].outputs[0]
    assert (len(out.token_ids), out.finish_reason) == (1, "length")


def test_a_paused_stream_loses_nothing_to_other_requests(llm: LLM) -> None:
    expected = llm.generate([1, 2, 3], GREEDY, use_tqdm=False)[0].outputs[0]
    stream = llm.stream([1, 2, 3], GREEDY)
    other = llm.stream([4], GREEDY)
    chunks = [next(stream)]
    others = [next(other), next(other)]
    llm.generate([[5, 6], [7]], GREEDY, use_tqdm=False)
    chunks += stream
    others += other
    assert tuple(ids(chunks)) == expected.token_ids
    assert [chunk.finish_reason for chunk in chunks[-2:]] == [None, "length"]
    assert tuple(ids(others)) == llm.generate([4], GREEDY, use_tqdm=False)[0].outputs[0].token_ids


def test_leaving_a_stream_early_ends_its_request(llm: LLM) -> None:
    stream = llm.stream([1, 2, 3], GREEDY)
    next(stream)
    stream.close()
    assert not llm.engine.has_work
    assert llm.engine.pool.slots.num_free == 3


def test_samples_differ_by_their_noise_and_repeat_by_their_seed(llm: LLM) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=8, ignore_eos=True)
    first, second = (llm.generate([1, 2], params, use_tqdm=False)[0] for _ in range(2))
    assert first.outputs == second.outputs
    assert [out.index for out in first.outputs] == [0, 1, 2]
    assert len({out.token_ids for out in first.outputs}) == 3
    streamed: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for chunk in llm.stream([1, 2], params):
        streamed[chunk.index] += chunk.token_ids
    assert [tuple(streamed[i]) for i in range(3)] == [out.token_ids for out in first.outputs]


def test_unseeded_requests_differ_and_follow_the_engine_s_seed(random_model: Path) -> None:
    def outputs(seed: int) -> list[tuple[int, ...]]:
        llm = LLM(str(random_model), backend="torch", skip_tokenizer_init=True, max_model_len=64, seed=seed)
        params = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True)
        return [out.outputs[0].token_ids for out in llm.generate([[1, 2]] * 3, params, use_tqdm=False)]

    first = outputs(0)
    assert len(set(first)) == 3
    assert outputs(0) == first
    assert outputs(1) != first


def test_statistics_of_a_request_and_of_all(random_model: Path) -> None:
    llm = LLM(
        str(random_model), backend="torch", skip_tokenizer_init=True, max_model_len=128, speculative_config=NGRAM
    )
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    outs = llm.generate([[1, 2, 3], [9]], params, use_tqdm=False)
    each = [out.metrics.speculative_decoding for out in outs]
    total = llm.stats()
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_emitted_tokens"):
        assert total[name] == sum(stats[name] for stats in each)
    assert total["num_emitted_tokens"] == 80


def test_an_unknown_option_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="unknown option 'max_seqs'; the nearest known one is 'max_num_seqs'"):
        LLM("tiny", max_seqs=3)
