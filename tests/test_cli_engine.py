"""The command line over the real engine and the embedded checkpoint."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from metrale import cli
from tests.test_cli import PROMPT, assert_one_sentence


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, arguments)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([PROMPT, "--model", "no/such/model"], ["no such model"]),
        (
            [PROMPT, "--speculative-config", '{"method": "mtp", "num_speculative_token": 3}'],
            ["num_speculative_tokens"],
        ),
        ([PROMPT, "--speculative-config", '{"method": "mpt"}'], ["mpt"]),
        ([PROMPT, "--max-tokens", "0"], ["max_tokens"]),
        ([PROMPT, "--temperature", "-1"], ["temperature"]),
        ([PROMPT, "--backend", "none"], ["backend"]),
        ([PROMPT, "--dtype", "int3"], ["dtype"]),
        ([""], ["prompt"]),
        ([PROMPT * 20, "--max-model-len", "64"], ["prompt", "64"]),
    ],
)
def test_bad_input_to_the_engine(arguments: list[str], words: list[str]) -> None:
    assert_one_sentence(run("generate", *arguments), *words)


@pytest.mark.parametrize("sampling", [[], ["--temperature", "0.8", "--seed", "7", "--logprobs", "2"]])
@pytest.mark.parametrize("method", ["mtp", "ngram"])
def test_a_real_comparison_is_identical(method: str, sampling: list[str]) -> None:
    result = run(
        "generate", PROMPT, "--method", method, "--max-tokens", "24", "--compare", "--json", *sampling
    )
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["identical"] is True
    assert len(found["token_ids"]) == found["speculative_decoding"]["num_emitted_tokens"]


def test_streamed_text_is_the_generated_text() -> None:
    streamed = run("generate", PROMPT, "--quiet", "--method", "mtp", "--max-tokens", "8")
    whole = run("generate", PROMPT, "--json", "--max-tokens", "8")
    assert streamed.stdout == json.loads(whole.stdout)["text"]


def test_a_closed_pipe_is_quiet() -> None:
    arguments = ["generate", PROMPT, "--max-tokens", "400", "--ignore-eos"]
    process = subprocess.Popen(
        [sys.executable, "-c", "from metrale.cli import main; main()", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(timeout=120) == cli.EXIT_CLOSED_PIPE


def test_info() -> None:
    result = run("info", "tiny")
    assert result.exit_code == 0, result.output
    for word in ("family", "layers", "parameters", "MTP head", "tokenizer", "vocabulary", "context", "total"):
        assert word in result.stdout


def test_info_in_json() -> None:
    result = CliRunner().invoke(
        cli.app, ["info", "tiny", "--json", "--max-num-seqs", "2", "--max-model-len", "17"]
    )
    found = json.loads(result.stdout)
    assert found["has_mtp_head"] is True
    assert found["num_layers"] == found["num_gdn_layers"] + found["num_attention_layers"]
    assert found["total_state_bytes"] == 2 * found["state_bytes_per_sequence"]
    assert found["total_kv_bytes"] == 2 * 32 * found["kv_bytes_per_token"]  # whole pages of 16
    parts = ("weight_bytes", "total_state_bytes", "total_kv_bytes")
    assert found["total_bytes"] == sum(found[part] for part in parts)


def test_info_of_nothing(tmp_path: Path) -> None:
    assert_one_sentence(run("info", str(tmp_path)), "config.json")
