"""The text: the Python standard library's source, split by file into training and held-out text, and its tokenizer."""

import hashlib
import re
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tiny_training.config import END_OF_TEXT, SPECIAL_TOKENS

HELD_OUT_MODULUS = 50
MAX_FILE_CHARS = 300_000
MAX_DIGIT_SHARE = 0.15
MAX_CONSTANT_SHARE = 0.5
CONSTANT_LINE = re.compile(r"\s*['\"\d]")
"""A line that begins with a string or a number: an entry of a table."""
TEST_FOLDERS = frozenset({"test", "tests", "idle_test"})
FOREIGN_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__"})
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Document(NamedTuple):
    """One source file."""

    path: str
    text: str
    is_test: bool
    is_held_out: bool


class Tokens(NamedTuple):
    """Token ids of every group of documents, each document followed by END_OF_TEXT."""

    library: np.ndarray
    tests: np.ndarray
    held_out_library: np.ndarray
    held_out_tests: np.ndarray


def path_hash(path: str, purpose: str) -> int:
    """A number that depends on the relative path alone, and is independent between purposes."""
    return int.from_bytes(hashlib.sha256(f"{purpose}:{path}".encode()).digest()[:8], "little")


def is_table(text: str) -> bool:
    """True for generated data: very long files, and files of numbers or strings such as the character map codecs."""
    visible = sum(not char.isspace() for char in text)
    digits = sum(char.isdigit() for char in text)
    lines = text.splitlines()
    constants = sum(CONSTANT_LINE.match(line) is not None for line in lines)
    return (
        len(text) > MAX_FILE_CHARS
        or digits > MAX_DIGIT_SHARE * max(visible, 1)
        or constants > MAX_CONSTANT_SHARE * len(lines)
    )


def read_documents(root: Path | None = None) -> list[Document]:
    """The source files under `root` (the running Python's standard library), in the order of their paths.

    Tables of numbers or of strings and half of the test files are left out: tests are two thirds of the text, and dull.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    documents = []
    for file in sorted(root.rglob("*.py")):
        folders = file.relative_to(root).parts[:-1]
        path = file.relative_to(root).as_posix()
        is_test = not TEST_FOLDERS.isdisjoint(folders)
        if not FOREIGN_FOLDERS.isdisjoint(folders) or (is_test and path_hash(path, "keep") % 2):
            continue
        try:
            text = file.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue  # a few test files are invalid on purpose
        if text.strip() and not is_table(text):
            is_held_out = path_hash(path, "hold out") % HELD_OUT_MODULUS == 0
            documents.append(Document(path, text, is_test, is_held_out))
    return documents


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer whose first ids are SPECIAL_TOKENS."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(documents: Iterable[Document], tokenizer: Tokenizer) -> Tokens:
    """Tokenize each group of documents into one array of ids, uint16."""
    groups: dict[tuple[bool, bool], list[np.ndarray]] = {}
    documents = list(documents)
    encodings = tokenizer.encode_batch_fast(
        [document.text for document in documents], add_special_tokens=False
    )
    for document, encoding in zip(documents, encodings, strict=True):
        key = (document.is_held_out, document.is_test)
        groups.setdefault(key, []).append(np.array([*encoding.ids, END_OF_TEXT], dtype=np.uint16))
    empty = [np.empty(0, dtype=np.uint16)]
    keys = ((False, False), (False, True), (True, False), (True, True))
    return Tokens(*(np.concatenate(groups.get(key, empty)) for key in keys))


def _endless_windows(ids: np.ndarray, length: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Windows of `length` tokens: each pass covers the text once, in a new order and from a new offset."""
    while True:
        starts = np.arange(rng.integers(length), len(ids) - length, length)
        rng.shuffle(starts)
        for start in starts:
            yield ids[start : start + length]


def training_batches(
    tokens: Tokens, batch_size: int, length: int, library_share: float, seed: int
) -> Iterator[np.ndarray]:
    """Endless batches of ids, int64 [batch_size, length], drawn from library and tests by `library_share`."""
    rng = np.random.default_rng(seed)
    library = _endless_windows(tokens.library, length, rng)
    tests = _endless_windows(tokens.tests, length, rng)
    while True:
        rows = [next(library if rng.random() < library_share else tests) for _ in range(batch_size)]
        yield np.stack(rows).astype(np.int64)


def held_out_windows(ids: np.ndarray, length: int) -> np.ndarray:
    """All whole windows of the text in order, int64 [num_windows, length]; each starts on the last one's final token.

    The shared token makes every token but the first a target exactly once.
    """
    starts = range(0, len(ids) - length + 1, length - 1)
    return np.stack([ids[start : start + length] for start in starts]).astype(np.int64)
