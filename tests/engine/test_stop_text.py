"""StopText: what may be shown is final, and a stop string ends the text wherever its pieces fall."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

from hypothesis import given, settings
from hypothesis import strategies as st

from metrale.engine.stop_text import StopText


class Pieces:
    """A decoder whose token i is the i-th piece of a given text."""

    def __init__(self, pieces: Sequence[str], rest: str = "") -> None:
        self.pieces = pieces
        self.rest = rest

    def push(self, token_id: int) -> str:
        return self.pieces[token_id]

    def flush(self) -> str:
        return self.rest

    def copy(self) -> Pieces:
        return self


def run(pieces: Sequence[str], stops: Sequence[str]) -> tuple[list[str], str | None]:
    """Text shown after each token, up to the first stop; the flush comes last where there is none."""
    text = StopText(Pieces(pieces), stops)
    shown = []
    for token_id in range(len(pieces)):
        new, stop = text.push(token_id)
        shown.append(new)
        if stop is not None:
            return shown, stop
    return [*shown, text.flush()], None


def oracle(pieces: Sequence[str], stops: Sequence[str]) -> tuple[str, str | None]:
    """Whole text after each token: the earliest start among the strings that it holds."""
    text = ""
    for piece in pieces:
        text += piece
        found = [(text.find(stop), order, stop) for order, stop in enumerate(stops) if stop in text]
        if found:
            start, _, stop = min(found)
            return text[:start], stop
    return text, None


@settings(deadline=None, max_examples=500)
@given(
    pieces=st.lists(st.text(alphabet="ab", max_size=5), max_size=25),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=6), max_size=4),
)
def test_equals_a_search_of_the_whole_text(pieces: list[str], stops: list[str]) -> None:
    shown, stop = run(pieces, stops)
    assert ("".join(shown), stop) == oracle(pieces, stops)


@settings(deadline=None, max_examples=300)
@given(
    pieces=st.lists(st.text(alphabet="ab", max_size=4), max_size=15),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=6), min_size=1, max_size=3),
)
def test_nothing_is_held_back_that_no_stop_can_claim(pieces: list[str], stops: list[str]) -> None:
    text = StopText(Pieces(pieces), stops)
    whole = shown = ""
    for token_id, piece in enumerate(pieces):
        new, stop = text.push(token_id)
        if stop is not None:
            return
        whole, shown = whole + piece, shown + new
        held = whole[len(shown) :]
        assert whole.startswith(shown)
        assert not held or any(string.startswith(held) for string in stops)
        assert not any(string.startswith(whole[i:]) for string in stops for i in range(len(shown)))


def test_across_tokens() -> None:
    assert run(["one\n", "\nUs", "er:", " x"], ["\n\nUser:"]) == (["one", "", ""], "\n\nUser:")


def test_inside_one_token() -> None:
    assert run(["abENDcd"], ["END"]) == (["ab"], "END")


def test_a_false_start_is_shown_when_it_breaks() -> None:
    assert run(["E", "N", "EN", "X"], ["END"]) == (["", "", "EN", "ENX", ""], None)


def test_a_string_that_repeats_its_own_start() -> None:
    assert run(["aabaaa", "b", "aaac"], ["aabaaac"]) == (["", "aaba", ""], "aabaaac")


def test_the_earliest_start_wins_then_the_first_given() -> None:
    assert run(["xabc"], ["bc", "abc"]) == (["x"], "abc")
    assert run(["xabc"], ["abc", "ab"]) == (["x"], "abc")
    assert run(["xabc"], ["ab", "abc"]) == (["x"], "ab")


def test_an_earlier_token_wins_over_an_earlier_start() -> None:
    assert run(["xab", "c"], ["abc", "b"]) == (["xa"], "b")


def test_what_is_held_comes_with_the_flush() -> None:
    assert run(["aEN"], ["END"]) == (["a", "EN"], None)
    text = StopText(Pieces(["aEN"], rest="\ufffd"), ["END"])
    text.push(0)
    assert [text.flush(), text.flush()] == ["EN\ufffd", "\ufffd"]


def test_no_stops_shows_everything() -> None:
    assert run(["a", "", "b"], []) == (["a", "", "b", ""], None)


def test_a_copy_leaves_the_original_alone() -> None:
    text = StopText(Pieces(["a", "E", "ND", "x"]), ["END"])
    assert [text.push(0), text.push(1)] == [("a", None), ("", None)]
    twin = text.copy()
    assert twin.push(2) == ("", "END")
    assert text.push(3) == ("Ex", None)


class Late(Pieces):
    """Gives each piece one token later."""

    def push(self, token_id: int) -> str:
        new, self.rest = self.rest, self.pieces[token_id]
        return new

    def copy(self) -> Late:
        return Late(self.pieces, self.rest)


def test_a_copy_has_a_decoder_of_its_own() -> None:
    text = StopText(Late(["a", "b", "c"]))
    text.push(0)
    twin = text.copy()
    assert [twin.push(2), twin.flush()] == [("a", None), "c"]
    assert [text.push(1), text.flush()] == [("a", None), "b"]


def test_the_cost_of_a_token_does_not_grow() -> None:
    """Neither with the output nor with a string that the output nearly is."""
    pieces = ["ab" * 2] * 20_000
    text = StopText(Pieces(pieces), ["ab" * 30_000, "abc", "q"])
    took = []
    for block in range(20):
        start = time.thread_time()
        for token_id in range(block * 500, (block + 1) * 500):
            text.push(token_id)
        took.append(time.thread_time() - start)
    assert median(took[-5:]) < 8 * median(took[:5])
