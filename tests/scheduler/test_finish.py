"""The cut of new tokens at the earliest end, and its independence of how tokens fall into steps."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metrale.scheduler.finish import Cut, FinishView, scan

EOS, EOS2, STOP = 90, 91, 80


class Letters:
    """Text bookkeeping with token i < 26 as the i-th letter, and one stop string looked for in the whole text."""

    def __init__(self, stop: str | None = None) -> None:
        self.stop = stop
        self.text = ""
        self.num_shown = 0

    def copy(self) -> Letters:
        twin = Letters(self.stop)
        twin.text, twin.num_shown = self.text, self.num_shown
        return twin

    def push(self, token_id: int) -> tuple[str, str | None]:
        self.text += chr(ord("a") + token_id) if token_id < 26 else f"<{token_id}>"
        if self.stop is None:
            return self._show(len(self.text)), None
        if self.stop in self.text:
            return self._show(self.text.find(self.stop)), self.stop
        return self._show(max(self.num_shown, len(self.text) - len(self.stop) + 1)), None

    def flush(self) -> str:
        return self._show(len(self.text))

    def _show(self, end: int) -> str:
        new, self.num_shown = self.text[self.num_shown : end], end
        return new


def view(
    num_remaining: int = 100,
    *,
    text: Letters | None = None,
    eos: Sequence[int] = (EOS,),
    stop_ids: Sequence[int] = (),
) -> FinishView:
    return FinishView(num_remaining, frozenset(eos), frozenset(stop_ids), text)


def ends(cut: Cut) -> tuple[int, str | None, int | str | None]:
    return cut.num_kept, cut.finish_reason, cut.stop_reason


@pytest.mark.parametrize(
    ("new", "given", "want"),
    [
        # EOS
        ([1, EOS, 2, 3, 4], view(), (2, "stop", None)),
        ([EOS], view(), (1, "stop", None)),
        ([1, 2, EOS2, EOS], view(eos=(EOS, EOS2)), (3, "stop", None)),
        ([1, EOS, 2], view(eos=()), (3, None, None)),
        # stop ids
        ([10, 11, STOP, 20, 21, 22], view(5, stop_ids=(STOP,)), (3, "stop", STOP)),
        ([10, 11, 12, 13, 14, 15, STOP], view(5, stop_ids=(STOP,)), (5, "length", None)),
        ([1, EOS, STOP], view(stop_ids=(STOP,)), (2, "stop", None)),
        ([1, STOP, EOS], view(stop_ids=(STOP,)), (2, "stop", STOP)),
        ([1, EOS], view(stop_ids=(EOS,)), (2, "stop", None)),
        ([1, EOS], view(eos=(), stop_ids=(EOS,)), (2, "stop", EOS)),
        # limits are exact, and a stop at the last token counts first
        ([1, 2, 3, 4], view(1), (1, "length", None)),
        ([1, 2, 3, 4], view(2), (2, "length", None)),
        ([1, 2, 3, 4], view(3), (3, "length", None)),
        ([1, 2, 3, 4], view(4), (4, "length", None)),
        ([1, 2, 3, 4], view(5), (4, None, None)),
        ([1, 2, EOS, 4], view(3), (3, "stop", None)),
        ([1, 2, STOP, 4], view(3, stop_ids=(STOP,)), (3, "stop", STOP)),
        # an invalid pick
        ([1, -1], view(), (1, "error", None)),
        ([-1], view(), (0, "error", None)),
        ([1, 2, -1], view(2), (2, "length", None)),
        ([1, EOS, -1], view(), (2, "stop", None)),
        # nothing new
        ([], view(), (0, None, None)),
    ],
)
def test_the_earliest_end(
    new: list[int], given: FinishView, want: tuple[int, str | None, int | str | None]
) -> None:
    assert ends(scan(new, given)) == want
    with_text = scan(new, given._replace(text=Letters()))
    assert ends(with_text) == want


@pytest.mark.parametrize(
    ("new", "given", "want", "shown"),
    [
        ([0, 1, 2, 3], view(text=Letters("bc")), (3, "stop", "bc"), "a"),
        ([0, 1, 2, 3], view(3, text=Letters("bc")), (3, "stop", "bc"), "a"),
        ([0, 1, 2, 3], view(2, text=Letters("bc")), (2, "length", None), "ab"),
        ([0, 1, EOS, 2], view(text=Letters("bc")), (3, "stop", None), "ab"),
        ([0, 1, STOP], view(text=Letters("bc"), stop_ids=(STOP,)), (3, "stop", STOP), "ab"),
        ([0, 1, 2, EOS], view(text=Letters("bc")), (3, "stop", "bc"), "a"),
        ([0, 1, -1], view(text=Letters("bc")), (2, "error", None), "ab"),
        ([0, 1], view(text=Letters("bc")), (2, None, None), "a"),
        ([EOS], view(text=Letters()), (1, "stop", None), ""),
        ([EOS, 0], view(text=Letters(), eos=()), (2, None, None), f"<{EOS}>a"),
        ([0, 1], view(text=Letters()), (2, None, None), "ab"),
    ],
)
def test_text(
    new: list[int], given: FinishView, want: tuple[int, str | None, int | str | None], shown: str
) -> None:
    cut = scan(new, given)
    assert ends(cut) == want
    assert cut.new_text == shown


def test_no_token_left_is_an_error() -> None:
    with pytest.raises(ValueError, match="num_remaining 0"):
        scan([1], view(0))


def test_without_a_tokenizer_there_is_no_text() -> None:
    assert scan([1, EOS], view()) == Cut(2, "stop", None, "", None)


def test_a_scan_that_is_not_committed_leaves_no_trace() -> None:
    text = Letters("abc")
    given = view(text=text)
    first = scan([0, 1], given)
    assert (text.text, text.num_shown) == ("", 0)
    assert scan([0, 1], given)[:4] == first[:4]
    assert first.text is not None
    assert ends(scan([2], given._replace(text=first.text))) == (1, "stop", "abc")
    assert ends(scan([2], given)) == (1, None, None)


TOKENS = st.integers(0, 3) | st.sampled_from([EOS, STOP, -1])


@settings(deadline=None, max_examples=300)
@given(
    tokens=st.lists(TOKENS, min_size=1, max_size=30),
    steps=st.lists(st.integers(1, 6), min_size=30, max_size=30),
    max_tokens=st.integers(1, 30),
    stop=st.none() | st.text(alphabet="abcd", min_size=1, max_size=4),
    stop_ids=st.sampled_from([(), (STOP,), (2, STOP)]),
)
def test_steps_do_not_matter(
    tokens: list[int], steps: list[int], max_tokens: int, stop: str | None, stop_ids: tuple[int, ...]
) -> None:
    """Tokens, text and reasons are those of one token a step, whatever the windows."""

    def run(widths: Sequence[int]) -> tuple[list[int], str, str | None, int | str | None]:
        kept: list[int] = []
        shown, at = "", 0
        state = Letters(stop)
        for width in widths:
            new = tokens[at : at + width]
            at += width
            if not new:
                break
            cut = scan(new, view(max_tokens - len(kept), text=state, stop_ids=stop_ids))
            kept += new[: cut.num_kept]
            shown += cut.new_text
            assert isinstance(cut.text, Letters)
            state = cut.text
            if cut.finish_reason is not None:
                return kept, shown, cut.finish_reason, cut.stop_reason
        return kept, shown, None, None

    assert run(steps) == run([1] * len(tokens))
