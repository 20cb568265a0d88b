"""A sequence's text as it grows: which part may be shown already, and where a stop string ends it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class IncrementalDecoder(Protocol):
    """What StopText needs of a detokenizer: text of one more token, the rest at the end, a copy."""

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...

    def copy(self) -> IncrementalDecoder: ...


class StopText:
    """Finds stop strings in generated text, across token and step boundaries.

    A suffix of the text that could still become a stop string is held back; everything else is returned by
    the `push` that settles it, so that text once returned is final. Each string is followed by its
    Knuth-Morris-Pratt automaton: the cost of a token follows its own text, not the length of the output or of
    the strings.
    """

    __slots__ = ("_decoder", "_held", "_matched", "_stops")

    def __init__(self, decoder: IncrementalDecoder, stop_strings: Sequence[str] = ()) -> None:
        """`stop_strings` are not empty. `decoder` belongs to this object from here on."""
        self._decoder = decoder
        self._stops = tuple((stop, _failure_table(stop)) for stop in stop_strings)
        self._matched = (0,) * len(self._stops)  # characters of each string that the text ends with
        self._held = ""

    def copy(self) -> StopText:
        """An independent object in the same state, for a scan that may not be committed."""
        twin = StopText.__new__(StopText)
        twin._decoder = self._decoder.copy()
        twin._stops, twin._matched, twin._held = self._stops, self._matched, self._held
        return twin

    def push(self, token_id: int) -> tuple[str, str | None]:
        """Take one more token; return the text that may be shown now, and the stop string that the token
        completed.

        Of several strings completed by one token the one that starts earliest in the text counts, then the
        first given. The returned text then ends before it, and the object is done.
        """
        new_text = self._decoder.push(token_id)
        if not self._stops or not new_text:
            return new_text, None
        text = self._held + new_text
        matched = []
        found: tuple[int, str] | None = None
        for (stop, failure), num_matched in zip(self._stops, self._matched, strict=True):
            num_matched, num_read = _advance(stop, failure, num_matched, new_text)
            matched.append(num_matched)
            if num_matched == len(stop):
                start = len(self._held) + num_read - len(stop)
                if found is None or start < found[0]:
                    found = (start, stop)
        if found is not None:
            self._held = ""
            return text[: found[0]], found[1]
        self._matched = tuple(matched)
        num_shown = len(text) - max(matched)
        self._held = text[num_shown:]
        return text[:num_shown], None

    def flush(self) -> str:
        """The text that is still held back, for an output that ends without a stop string."""
        text = self._held + self._decoder.flush()
        self._held = ""
        return text


def _failure_table(pattern: str) -> tuple[int, ...]:
    """For each prefix of the pattern the length of its longest proper border.

    Source: Knuth, Morris and Pratt 1977, Fast pattern matching in strings.
    """
    table = [0] * len(pattern)
    for index in range(1, len(pattern)):
        length = table[index - 1]
        while length and pattern[length] != pattern[index]:
            length = table[length - 1]
        table[index] = length + (pattern[length] == pattern[index])
    return tuple(table)


def _advance(pattern: str, failure: tuple[int, ...], num_matched: int, text: str) -> tuple[int, int]:
    """Read text until the pattern is complete; return the characters matched and those read."""
    if not num_matched and pattern[0] not in text:
        return 0, len(text)
    for index, character in enumerate(text):
        while num_matched and pattern[num_matched] != character:
            num_matched = failure[num_matched - 1]
        num_matched += pattern[num_matched] == character
        if num_matched == len(pattern):
            return num_matched, index + 1
    return num_matched, len(text)
