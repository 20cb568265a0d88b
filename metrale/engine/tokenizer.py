"""Text to token ids and back: a checkpoint's byte-level tokenizer, and the incremental way back."""

from __future__ import annotations

import json
from codecs import utf_8_decode
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.decoders import ByteLevel

from metrale.errors import ConfigError, RequestError


class Tokenizer:
    """A checkpoint's tokenizer.

    Text of ids is built from bytes: each token stands for a fixed byte string, the strings are joined and
    read as UTF-8, invalid sequences becoming U+FFFD. This is what the tokenizers library computes for a
    ByteLevel decoder, and it can be done one token at a time (`Detokenizer`). Ids that the vocabulary lacks
    stand for nothing.

    `num_ids` is 1 + the highest id, added tokens included. `special_ids` are those that `skip_special_tokens`
    leaves out. `eos_token_id` is what tokenizer_config.json calls eos_token, None where it says nothing.
    `chat_template` is the Jinja text of the checkpoint, or None.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        config: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> None:
        """Wrap a library tokenizer; `config` holds tokenizer_config.json. ConfigError: not byte-level."""
        if not isinstance(tokenizer.decoder, ByteLevel):
            kind = type(tokenizer.decoder).__name__
            raise ConfigError(
                f"tokenizer.json: decoder must be ByteLevel, got {kind}; use skip_tokenizer_init=True"
            )
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._bytes: dict[int, bytes] = {}
        self.num_ids = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        eos_token = (config or {}).get("eos_token")
        if isinstance(eos_token, Mapping):
            eos_token = eos_token.get("content")
        if eos_token is not None and not isinstance(eos_token, str):
            raise ConfigError(f"tokenizer_config.json: eos_token must be a string, got {eos_token!r}")
        self.eos_token_id: int | None = None if eos_token is None else tokenizer.token_to_id(eos_token)
        self.chat_template = chat_template

    @staticmethod
    def from_directory(directory: Path) -> Tokenizer:
        """Read tokenizer.json, and where present tokenizer_config.json and chat_template.jinja.

        ConfigError names the file that is missing or cannot be read.
        """
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"{path}: no such file; use skip_tokenizer_init=True to serve token ids alone")
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises Exception itself
            raise ConfigError(f"{path}: not a tokenizer: {error}") from error
        config_path = directory / "tokenizer_config.json"
        config: dict[str, Any] = {}
        if config_path.is_file():
            try:
                config = json.loads(config_path.read_text(encoding="utf-8"))
            except ValueError as error:
                raise ConfigError(f"{config_path}: not JSON: {error}") from error
            if not isinstance(config, dict):
                raise ConfigError(f"{config_path}: must hold an object, got {type(config).__name__}")
        template_path = directory / "chat_template.jinja"
        if template_path.is_file():
            return Tokenizer(tokenizer, config, template_path.read_text(encoding="utf-8"))
        template = config.get("chat_template")
        return Tokenizer(tokenizer, config, template if isinstance(template, str) else None)

    def encode(self, text: str) -> list[int]:
        """Ids of a text, with the special tokens that the checkpoint adds. RequestError: not valid text."""
        if not isinstance(text, str):
            raise RequestError(f"a text must be a string, got {text!r}")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(
                f"a text must be valid Unicode, got a lone surrogate at {error.start}"
            ) from error
        return self._tokenizer.encode(text).ids

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of the ids. Never raises: invalid UTF-8 becomes U+FFFD, ids without a token leave nothing."""
        skipped = self.special_ids if skip_special_tokens else ()
        data = b"".join(self.token_bytes(token_id) for token_id in token_ids if token_id not in skipped)
        return data.decode("utf-8", "replace")

    def detokenizer(self, skip_special_tokens: bool = True) -> Detokenizer:
        """A fresh incremental decoder over this vocabulary."""
        return Detokenizer(self, skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; none for an id without a token."""
        data = self._bytes.get(token_id)
        if data is None:
            data = self._bytes[token_id] = self._read_bytes(token_id)
        return data

    def _read_bytes(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id) if 0 <= token_id < self.num_ids else None
        if token is None:
            return b""
        try:
            return bytes(map(_BYTE_OF_CHARACTER.__getitem__, token))
        except KeyError:  # an added token that holds a character outside the alphabet is literal text
            return token.encode("utf-8")


class Detokenizer:
    """Text of a growing token list, one token at a time, at a cost that does not depend on its length.

    The texts of all `push` calls and a last `flush` join to `Tokenizer.decode` of the same ids, however the
    ids were spread over steps. At most three bytes, an incomplete UTF-8 sequence, are held back.
    """

    __slots__ = ("_pending", "_skipped", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._pending = b""

    def copy(self) -> Detokenizer:
        """An independent decoder in the same state."""
        twin = Detokenizer.__new__(Detokenizer)
        twin._tokenizer, twin._skipped, twin._pending = self._tokenizer, self._skipped, self._pending
        return twin

    def push(self, token_id: int) -> str:
        """Take one more token; return the text that it completes."""
        if token_id in self._skipped:
            return ""
        data = self._pending + self._tokenizer.token_bytes(token_id)
        text, num_read = utf_8_decode(data, "replace", False)
        self._pending = data[num_read:]
        return text

    def flush(self) -> str:
        """Give up what is held back: U+FFFD for an incomplete sequence, else nothing."""
        text = self._pending.decode("utf-8", "replace")
        self._pending = b""
        return text


def _byte_alphabet() -> dict[str, int]:
    """Byte of each character of the byte-level alphabet.

    Printable characters of Latin-1 stand for themselves, the other bytes for the characters from U+0100 on,
    in order. Source: Radford et al. 2019, Language models are unsupervised multitask learners (GPT-2's
    encoder).
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + index): byte for index, byte in enumerate(hidden)}


_BYTE_OF_CHARACTER = _byte_alphabet()
