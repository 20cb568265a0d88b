"""Tokenizer and Detokenizer: text is a function of the ids alone, however they arrive."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from metrale.engine.tokenizer import Tokenizer
from metrale.errors import ConfigError, RequestError

CORPUS = [
    "def fib(n):\n    return n if n < 2 else fib(n - 1)\n",
    "größer, 東京 東京, naïve café",
    "🙂🙃 🙂🙂 👩‍👩‍👧 ok",
] * 4


def train() -> tokenizers.Tokenizer:
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<|endoftext|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(CORPUS, trainer)
    library.add_tokens([AddedToken("<think>", special=False), AddedToken("two words é", special=False)])
    library.add_special_tokens([AddedToken("<| fim é |>", special=True)])
    return library


LIBRARY = train()
TOKENIZER = Tokenizer(LIBRARY, {"eos_token": "<|endoftext|>"})
BYTE_IDS = [LIBRARY.token_to_id(character) for character in pre_tokenizers.ByteLevel.alphabet()]

# single bytes among them, so that broken and split UTF-8 is common; ids past the end too
IDS = st.lists(st.integers(0, TOKENIZER.num_ids + 3) | st.sampled_from(BYTE_IDS), max_size=60)


def stream(token_ids: Sequence[int], skip_special_tokens: bool = True) -> list[str]:
    detokenizer = TOKENIZER.detokenizer(skip_special_tokens)
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.flush()]


def byte_ids(data: bytes) -> list[int]:
    """One token a byte."""
    by_byte = {TOKENIZER.token_bytes(token_id)[0]: token_id for token_id in BYTE_IDS}
    return [by_byte[byte] for byte in data]


@settings(deadline=None, max_examples=300)
@given(token_ids=IDS, skip=st.booleans())
def test_decode_equals_the_library(token_ids: list[int], skip: bool) -> None:
    assert TOKENIZER.decode(token_ids, skip) == LIBRARY.decode(token_ids, skip_special_tokens=skip)


@settings(deadline=None, max_examples=300)
@given(token_ids=IDS, skip=st.booleans())
def test_deltas_join_to_decode(token_ids: list[int], skip: bool) -> None:
    assert "".join(stream(token_ids, skip)) == TOKENIZER.decode(token_ids, skip)


@settings(deadline=None)
@given(text=st.text())
def test_text_survives(text: str) -> None:
    token_ids = TOKENIZER.encode(text)
    assert token_ids == LIBRARY.encode(text).ids
    assert "".join(stream(token_ids, skip_special_tokens=False)) == text
    assert "".join(stream(byte_ids(text.encode()))) == text


@settings(deadline=None)
@given(token_ids=IDS, cut=st.integers(0, 60))
def test_a_copy_goes_its_own_way(token_ids: list[int], cut: int) -> None:
    detokenizer = TOKENIZER.detokenizer()
    head = "".join(detokenizer.push(token_id) for token_id in token_ids[:cut])
    twin = detokenizer.copy()
    for token_id in byte_ids("é🙂".encode()):
        twin.push(token_id)
    twin.flush()
    tail = "".join(detokenizer.push(token_id) for token_id in token_ids[cut:]) + detokenizer.flush()
    assert head + tail == TOKENIZER.decode(token_ids)


def test_incomplete_characters_are_held_back() -> None:
    assert stream(byte_ids("a🙂b".encode())) == ["a", "", "", "", "🙂", "b", ""]


def test_an_incomplete_character_ends_as_a_replacement() -> None:
    assert stream(byte_ids("🙂".encode()[:3])) == ["", "", "", "\ufffd"]
    assert stream(byte_ids("🙂".encode()[:2] + b"a")) == ["", "", "\ufffda", ""]


def test_nothing_is_held_back_for_long() -> None:
    """At most three bytes, whatever comes."""
    detokenizer = TOKENIZER.detokenizer()
    length = 0
    for count, token_id in enumerate(byte_ids(bytes(range(256)) * 4), start=1):
        length += len(detokenizer.push(token_id).encode("utf-8", "replace"))
        assert count - 3 <= length * 3


def test_flush_twice() -> None:
    detokenizer = TOKENIZER.detokenizer()
    detokenizer.push(byte_ids(b"\xe6")[0])
    assert [detokenizer.flush(), detokenizer.flush()] == ["\ufffd", ""]


def test_special_tokens() -> None:
    token_ids = TOKENIZER.encode("a<|im_end|>b<think>c<| fim é |>two words é")
    assert TOKENIZER.decode(token_ids) == "ab<think>ctwo words é"
    assert (
        TOKENIZER.decode(token_ids, skip_special_tokens=False) == "a<|im_end|>b<think>c<| fim é |>two words é"
    )
    assert {TOKENIZER.decode([i], skip_special_tokens=False) for i in TOKENIZER.special_ids} == {
        "<|endoftext|>",
        "<|im_end|>",
        "<| fim é |>",
    }


def test_ids_without_a_token_leave_nothing() -> None:
    assert TOKENIZER.decode([-1, TOKENIZER.num_ids, 10**9, byte_ids(b"a")[0]]) == "a"


def test_num_ids_counts_added_tokens() -> None:
    assert TOKENIZER.num_ids == 1 + max(LIBRARY.get_vocab(with_added_tokens=True).values())
    assert LIBRARY.id_to_token(TOKENIZER.num_ids - 1) is not None


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb"])
def test_text_that_is_not_unicode(text: str) -> None:
    with pytest.raises(RequestError, match="surrogate"):
        TOKENIZER.encode(text)


def test_text_that_is_no_text() -> None:
    with pytest.raises(RequestError, match="must be a string"):
        TOKENIZER.encode(3)  # type: ignore[arg-type]


# Directories


def write(directory: Path, library: tokenizers.Tokenizer = LIBRARY) -> Path:
    library.save(str(directory / "tokenizer.json"))
    return directory


def test_directory(tmp_path: Path) -> None:
    write(tmp_path)
    bare = Tokenizer.from_directory(tmp_path)
    assert (bare.eos_token_id, bare.chat_template, bare.num_ids) == (None, None, TOKENIZER.num_ids)
    config = {"eos_token": {"content": "<|im_end|>"}, "chat_template": "old"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    configured = Tokenizer.from_directory(tmp_path)
    assert configured.eos_token_id == LIBRARY.token_to_id("<|im_end|>")
    assert configured.chat_template == "old"
    (tmp_path / "chat_template.jinja").write_text("{{ messages }} é", encoding="utf-8")
    assert Tokenizer.from_directory(tmp_path).chat_template == "{{ messages }} é"


def test_stored_truncation_and_padding_are_dropped(tmp_path: Path) -> None:
    library = train()
    library.enable_truncation(max_length=3)
    library.enable_padding(length=8)
    text = "def fib(n): return n"
    assert Tokenizer.from_directory(write(tmp_path, library)).encode(text) == TOKENIZER.encode(text)


def test_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json: no such file.*skip_tokenizer_init"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize("text", ["", "{}", "[", '{"version": "1.0", "model": {"type": "none"}}'])
def test_a_file_that_is_no_tokenizer(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ConfigError, match=r"tokenizer\.json: not a tokenizer"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{"])
def test_a_config_that_is_no_object(tmp_path: Path, text: str) -> None:
    write(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json"):
        Tokenizer.from_directory(tmp_path)


def test_another_decoder_is_refused() -> None:
    library = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    with pytest.raises(ConfigError, match="decoder must be ByteLevel, got NoneType"):
        Tokenizer(library)
    library.decoder = decoders.Metaspace()
    with pytest.raises(ConfigError, match="decoder must be ByteLevel, got Metaspace"):
        Tokenizer(library)
