"""The command line over a scripted engine: what it prints, how it fails, and its exit codes."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

import metrale
from metrale import cli, cli_generate
from metrale.cli_generate import Generation, first_difference
from metrale.errors import ConfigError, RequestError

PROMPT = "def read_config(path):"
STATS: dict[str, Any] = {
    "num_drafts": 4,
    "num_draft_tokens": 12,
    "num_accepted_tokens": 6,
    "num_accepted_tokens_per_pos": [4, 2, 0],
    "acceptance_histogram": [0, 2, 2, 0],
    "mean_acceptance_length": 2.5,
    "draft_acceptance_rate": 0.5,
    "num_trimmed_tokens": 0,
    "num_emitted_tokens": 10,
}
NO_STATS = {name: [] if isinstance(value, list) else 0 for name, value in STATS.items()} | {
    "mean_acceptance_length": 1.0
}


def _logprobs(ids: Iterable[int]) -> tuple[dict[int, Any], ...]:
    from metrale.sampling.logprobs import Logprob

    return tuple({i: Logprob(logprob=-0.5, rank=1)} for i in ids)


class FakeLLM:
    """Answers every prompt with `answer`, or with `plain` where it was made without drafts."""

    answer: ClassVar[tuple[str, ...]] = ("\n    with", " open(path)")
    plain: ClassVar[tuple[str, ...]] = answer
    error: ClassVar[BaseException | None] = None
    made: ClassVar[list[FakeLLM]] = []

    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments
        self.prompts: list[tuple[str, Any]] = []
        self.pieces = self.answer if arguments["speculative_config"] else self.plain
        FakeLLM.made.append(self)

    def stream(self, prompt: str, params: Any) -> Iterator[Any]:
        from metrale.engine.outputs import StreamChunk

        self.prompts.append((prompt, params))
        if self.error is not None:
            raise self.error
        for i, piece in enumerate(self.pieces):
            is_last = i == len(self.pieces) - 1
            logprobs = None if params.logprobs is None else _logprobs([len(piece)])
            yield StreamChunk(piece, (len(piece),), "length" if is_last else None, logprobs=logprobs)

    def generate(self, prompt: str, params: Any, use_tqdm: bool) -> list[Any]:
        from metrale.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput

        assert not use_tqdm
        self.prompts.append((prompt, params))
        if self.error is not None:
            raise self.error
        ids = tuple(len(piece) for piece in self.pieces)
        logprobs = None if params.logprobs is None else _logprobs(ids)
        output = CompletionOutput(0, "".join(self.pieces), ids, logprobs, "length", None)
        return [RequestOutput(0, prompt, (1,), (output,), RequestMetrics())]

    def stats(self) -> dict[str, Any]:
        return STATS if self.arguments["speculative_config"] else NO_STATS


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeLLM]:
    """Puts a fresh FakeLLM in the engine's place."""

    class Fresh(FakeLLM):
        pass

    FakeLLM.made = []
    monkeypatch.setattr(metrale, "LLM", Fresh, raising=False)
    return Fresh


def run(*arguments: str, text: str | bytes | None = None) -> Result:
    return CliRunner().invoke(cli.app, ["generate", *arguments], input=text)


def assert_one_sentence(result: Result, *words: str) -> None:
    """Exit code 2, nothing on stdout, one line on stderr that holds the words."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("metrale: ")
    assert "Traceback" not in line
    for word in words:
        assert word in line


# What is printed


def test_text_comes_first_then_the_table(fake: type[FakeLLM]) -> None:
    result = run(PROMPT, "--method", "mtp")
    assert result.exit_code == 0, result.output
    text, _, table = result.stdout.partition("\n    with open(path)\n")
    assert text == ""
    for word in (
        "tokens/s",
        "mean acceptance length",
        "2.50",
        "acceptance by position",
        "1.00  0.50  0.00",
        "12",
    ):
        assert word in table


def test_plain_decode_has_no_acceptance(fake: type[FakeLLM]) -> None:
    result = run(PROMPT)
    assert result.exit_code == 0
    assert "tokens/s" in result.stdout
    assert "acceptance" not in result.stdout


def test_quiet_prints_the_text_and_nothing_else(fake: type[FakeLLM]) -> None:
    result = run(PROMPT, "--method", "mtp", "--quiet", "--compare")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "\n    with open(path)", "")


def test_json_is_one_object(fake: type[FakeLLM]) -> None:
    result = run(PROMPT, "--method", "mtp", "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert list(found) == [
        "text",
        "token_ids",
        "finish_reason",
        "stop_reason",
        "error",
        "tokens_per_second",
        "speculative_decoding",
        "identical",
    ]
    assert found["text"] == "\n    with open(path)"
    assert found["token_ids"] == [9, 11]
    assert (found["finish_reason"], found["stop_reason"], found["identical"]) == ("length", None, None)
    assert found["speculative_decoding"] == STATS
    assert found["tokens_per_second"] > 0


def test_json_holds_logprobs_when_asked(fake: type[FakeLLM]) -> None:
    found = json.loads(run(PROMPT, "--json", "--logprobs", "1").stdout)
    assert found["logprobs"] == [{"9": {"logprob": -0.5, "rank": 1}}, {"11": {"logprob": -0.5, "rank": 1}}]


def test_unshowable_text_is_escaped(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", narrow)
    cli_generate.write_stdout("né")
    assert narrow.buffer.getvalue() == b"n\\xe9"  # type: ignore[attr-defined]


# Comparing


def test_compare_says_identical(fake: type[FakeLLM]) -> None:
    result = run(PROMPT, "--method", "mtp", "--compare")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1] == "identical"
    assert "plain decode" in result.stdout
    drafting, plain = FakeLLM.made
    assert drafting.arguments["speculative_config"] == {"method": "mtp"}
    assert plain.arguments == drafting.arguments | {"speculative_config": None}
    assert plain.prompts == drafting.prompts


def test_compare_names_the_first_difference(fake: type[FakeLLM]) -> None:
    fake.plain = ("\n    with", " f")
    result = run(PROMPT, "--method", "mtp", "--compare")
    assert result.exit_code == 1
    assert "identical" not in result.stdout
    assert "plain decode" not in result.stdout, "no speed beside another output"
    assert result.stderr == "metrale: not identical: token 1 is 11, plain decode gives 2\n"


def test_compare_in_json(fake: type[FakeLLM]) -> None:
    assert json.loads(run(PROMPT, "--json", "--compare", "--method", "mtp").stdout)["identical"] is True
    fake.plain = ("else",)
    result = run(PROMPT, "--json", "--compare", "--method", "mtp")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["identical"] is False


def test_brackets_of_the_user_are_shown_as_they_are() -> None:
    console = Console(file=io.StringIO(), width=100)
    console.print(cli_generate.table(replace(SAME, stop_reason="[/INST]"), None))
    assert "stop ('[/INST]')" in console.file.getvalue()  # type: ignore[attr-defined]


SAME = Generation("ab", (1, 2), "stop", "b", None, ({1: -0.5}, {2: -0.25}), 1.0, STATS)


def test_equal_generations_have_no_difference() -> None:
    assert first_difference(SAME, replace(SAME, seconds=2.0, speculative_decoding=NO_STATS)) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"token_ids": (1, 3)}, "token 1 is 2, plain decode gives 3"),
        ({"token_ids": (1, 2, 3)}, "2 tokens, plain decode gives 3"),
        ({"text": "abc"}, "text is 'ab', plain decode gives 'abc'"),
        ({"finish_reason": "length"}, "finish_reason is 'stop', plain decode gives 'length'"),
        ({"stop_reason": None}, "stop_reason is 'b', plain decode gives None"),
        ({"logprobs": ({1: -0.5}, {2: -0.125})}, "the logprobs of token 1"),
        ({"error": "no number"}, "error is None, plain decode gives 'no number'"),
    ],
)
def test_each_part_of_the_identity_is_compared(change: dict[str, Any], words: str) -> None:
    difference = first_difference(SAME, replace(SAME, **change))
    assert difference is not None
    assert words in difference


# What reaches the engine


def test_options_reach_the_engine(fake: type[FakeLLM]) -> None:
    arguments = [
        "--model",
        "m",
        "--method",
        "ngram",
        "--num-speculative-tokens",
        "2",
        "--prompt-lookup-max",
        "5",
        "--prompt-lookup-min",
        "3",
        "--max-tokens",
        "7",
        "--temperature",
        "0.5",
        "--top-k",
        "4",
        "--top-p",
        "0.9",
        "--min-p",
        "0.1",
        "--seed",
        "3",
        "--stop",
        "a",
        "--stop",
        "b",
        "--stop-token-id",
        "5",
        "--ignore-eos",
        "--backend",
        "torch",
        "--dtype",
        "float32",
        "--max-model-len",
        "99",
        "--max-num-seqs",
        "2",
        "--max-num-batched-tokens",
        "64",
    ]
    assert run(PROMPT, *arguments).exit_code == 0
    (llm,) = FakeLLM.made
    assert llm.arguments == {
        "model": "m",
        "backend": "torch",
        "device": "auto",
        "dtype": "float32",
        "max_model_len": 99,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 64,
        "kv_cache_memory_bytes": None,
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": 2,
            "prompt_lookup_max": 5,
            "prompt_lookup_min": 3,
        },
    }
    ((prompt, params),) = llm.prompts
    assert prompt == PROMPT
    assert (params.max_tokens, params.temperature, params.top_k, params.top_p) == (7, 0.5, 4, 0.9)
    assert (params.min_p, params.seed, params.ignore_eos) == (0.1, 3, True)
    assert (params.stop, params.stop_token_ids, params.logprobs) == (("a", "b"), (5,), None)


def test_the_command_line_is_greedy_and_plain_by_default(fake: type[FakeLLM]) -> None:
    assert run(PROMPT).exit_code == 0
    (llm,) = FakeLLM.made
    assert llm.arguments["speculative_config"] is None
    assert llm.prompts[0][1] == metrale.SamplingParams(temperature=0)


def test_single_options_win_over_the_json_object(fake: type[FakeLLM]) -> None:
    config = '{"method": "mtp", "num_speculative_tokens": 5}'
    assert run(PROMPT, "--speculative-config", config, "--num-speculative-tokens", "2").exit_code == 0
    assert FakeLLM.made[0].arguments["speculative_config"] == {"method": "mtp", "num_speculative_tokens": 2}


def test_prompt_from_stdin_and_from_a_file_is_taken_as_it_is(fake: type[FakeLLM], tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes("é = 1\r\n".encode())
    assert run("-", text="é = 1\r\n".encode()).exit_code == 0
    assert run("--prompt-file", str(file)).exit_code == 0
    assert [llm.prompts[0][0] for llm in FakeLLM.made] == ["é = 1\r\n"] * 2


# Failing


def test_no_prompt_or_two(fake: type[FakeLLM], tmp_path: Path) -> None:
    assert_one_sentence(run(), "prompt")
    assert_one_sentence(run("a", "--prompt-file", str(tmp_path)), "prompt")
    assert_one_sentence(run("--prompt-file", str(tmp_path / "none")), "cannot be read")
    assert_one_sentence(run("-", text=b"\xff"), "not UTF-8")


@pytest.mark.parametrize("config", ["{", "mtp", "[1]", '"mtp"'])
def test_speculative_config_that_is_no_object(fake: type[FakeLLM], config: str) -> None:
    assert_one_sentence(run(PROMPT, "--speculative-config", config), "--speculative-config", "JSON")


def test_drafts_without_a_method(fake: type[FakeLLM]) -> None:
    assert_one_sentence(run(PROMPT, "--num-speculative-tokens", "2"), "num_speculative_tokens", "--method")


@pytest.mark.parametrize("error", [ConfigError("no\nsuch model"), RequestError("too long")])
def test_our_errors_become_one_sentence(fake: type[FakeLLM], error: Exception) -> None:
    fake.error = error
    assert_one_sentence(run(PROMPT), " ".join(str(error).split()))


def test_a_bug_keeps_its_traceback(fake: type[FakeLLM]) -> None:
    fake.error = KeyError("a bug")
    assert isinstance(run(PROMPT).exception, KeyError)


def test_interrupt(fake: type[FakeLLM]) -> None:
    fake.error = KeyboardInterrupt()
    result = run(PROMPT)
    assert result.exit_code == 130
    assert "Traceback" not in result.stderr


def test_an_unknown_option_is_a_usage_error() -> None:
    assert run(PROMPT, "--no-such-option").exit_code == 2


def test_version() -> None:
    result = CliRunner().invoke(cli.app, ["--version"])
    assert result.exit_code == 0
    assert result.stdout.startswith("metrale")


def test_help_names_the_commands() -> None:
    result = CliRunner().invoke(cli.app, ["--help"])
    for command in ("generate", "info", "bench"):
        assert command in result.stdout


def test_bench_outside_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "__file__", str(tmp_path / "metrale" / "cli.py"))
    assert_one_sentence(CliRunner().invoke(cli.app, ["bench"]), "checkout")
