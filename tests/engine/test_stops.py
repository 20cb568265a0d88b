"""Ends: the earliest wins, a stop before a length, exact counts, whatever the drafts; stop strings over real tokens."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from metrale.core import Sequence
from metrale.engine.engine import Engine
from metrale.engine.tokenizer import Tokenizer
from metrale.scheduler.scheduler import Event
from tests.engine.scripted import (
    EOS,
    SECOND_EOS,
    Target,
    always_right,
    always_wrong,
    cycle,
    drafting,
    emitted,
    greedy,
    make_engine,
    run,
    scripted,
)

PROMPT = (5, 6)
STOP = 13
# (depth, what the drafter does); depth None is plain decode
DRAFTERS = [
    (None, always_right),
    (1, always_right),
    (2, always_right),
    (3, always_right),
    (4, always_right),
    (16, always_right),
    (4, always_wrong),
    (5, cycle((5, 2), (0, 0), (3, 3))),
]


class Case(NamedTuple):
    """What the target says, what the request asks for, and what must come of it."""

    said: list[int]
    options: dict[str, Any]
    num_tokens: int
    finish_reason: str
    stop_reason: int | str | None = None


CASES = {
    "EOS in a draft window": Case([10, 11, EOS, 20, 21, 22], {"max_tokens": 20}, 3, "stop"),
    "EOS is the first token": Case([EOS, 20, 21], {"max_tokens": 20}, 1, "stop"),
    "the second of several EOS ids": Case([10, SECOND_EOS, EOS, 21], {"max_tokens": 20}, 2, "stop"),
    "EOS ignored": Case(
        [10, EOS, 12, SECOND_EOS, 14, 15, 16], {"max_tokens": 6, "ignore_eos": True}, 6, "length"
    ),
    "EOS ignored, but a stop id": Case(
        [10, EOS, 12], {"max_tokens": 6, "ignore_eos": True, "stop_token_ids": [EOS]}, 2, "stop", EOS
    ),
    "EOS and stop id in one": Case([10, EOS, 12], {"max_tokens": 6, "stop_token_ids": [EOS]}, 2, "stop"),
    "a stop id": Case(
        [10, 11, STOP, 20, 21, 22], {"max_tokens": 5, "stop_token_ids": [STOP]}, 3, "stop", STOP
    ),
    "a stop id past the length": Case(
        [10, 11, 12, 20, 21, 22, STOP], {"max_tokens": 5, "stop_token_ids": [STOP]}, 5, "length"
    ),
    "a stop id at the length": Case(
        [10, 11, 12, 20, STOP], {"max_tokens": 5, "stop_token_ids": [STOP]}, 5, "stop", STOP
    ),
    "EOS at the length": Case([10, 11, EOS], {"max_tokens": 3}, 3, "stop"),
    "the earlier of two stop ids": Case(
        [10, 12, STOP, 11], {"max_tokens": 9, "stop_token_ids": [STOP, 12]}, 2, "stop", 12
    ),
    "EOS before a stop id": Case([10, EOS, STOP], {"max_tokens": 9, "stop_token_ids": [STOP]}, 2, "stop"),
    "a stop id before EOS": Case(
        [10, STOP, EOS], {"max_tokens": 9, "stop_token_ids": [STOP]}, 2, "stop", STOP
    ),
    "a stop id in the prompt": Case([10, 11, 12], {"max_tokens": 3, "stop_token_ids": [5, 6]}, 3, "length"),
    **{f"max_tokens {n}": Case([10, 11, 12, 20, 21], {"max_tokens": n}, n, "length") for n in (1, 2, 3, 4)},
    "max_model_len": Case(list(range(10, 40)), {"max_tokens": None}, 14, "length"),
    "max_tokens above max_model_len": Case(list(range(10, 40)), {"max_tokens": 99}, 14, "length"),
}


@pytest.mark.parametrize("drafter", DRAFTERS, ids=lambda d: f"{d[0]}-{getattr(d[1], '__name__', 'cycle')}")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_ends(case: Case, drafter: tuple[int | None, Any]) -> None:
    depth, script = drafter
    target = Target(scripted({PROMPT: case.said}), eos=(EOS, SECOND_EOS))
    engine = make_engine(target, depth=depth, drafter=depth and drafting(target, script), max_model_len=16)
    events: list[Event] = []
    (got,) = run(engine, [(PROMPT, greedy(logprobs=0, **case.options))], each_step=events.extend)
    assert emitted(got) == case.said[: case.num_tokens]
    assert (got.finish_reason, got.stop_reason) == (case.finish_reason, case.stop_reason)
    assert len(got.logprobs) == case.num_tokens
    assert all(token in row for token, row in zip(emitted(got), got.logprobs, strict=True))
    assert [token for event in events for token in event.token_ids] == emitted(got)
    assert [e.finish_reason for e in events] == [None] * (len(events) - 1) + [case.finish_reason]
    assert got.stats.num_emitted_tokens == case.num_tokens
    if depth == 16 and script is always_right:
        assert len(events) <= 2, "the whole window was accepted at once"


# Stop strings, over a real byte-level tokenizer

CORPUS = [
    "the end of the road, said the old fox: größer 東京 🙂\n",
    "this is the end. that is not the end!\n",
] * 3


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint directory that holds a byte-level BPE tokenizer trained on a few words."""
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=80, special_tokens=["<pad>", "<eos>", "<other>"], show_progress=False
    )
    library.train_from_iterator(CORPUS, trainer)
    path = tmp_path_factory.mktemp("tokenizer")
    library.save(str(path / "tokenizer.json"))
    return path


TEXT = "the old fox said: this is not the end of the road, größer 東京 🙂 this is the end."
STRINGS: list[tuple[list[str], str, str | None]] = [
    (["the end"], "the old fox said: this is not ", "the end"),
    (["end of"], "the old fox said: this is not the ", "end of"),
    (["end of", "not the"], "the old fox said: this is ", "not the"),
    (["not the end", "the end"], "the old fox said: this is ", "not the end"),
    (["t"], "", "t"),
    (["東"], "the old fox said: this is not the end of the road, größer ", "東"),
    (["🙂"], "the old fox said: this is not the end of the road, größer 東京 ", "🙂"),
    (["ß", "r 東"], "the old fox said: this is not the end of the road, grö", "ß"),
    (["the end.", "zzz"], TEXT[: TEXT.index("the end.")], "the end."),
    (["the endless", "zzz"], TEXT, None),
]


def text_engine(
    directory: Path, depth: int | None, script: Any, text: str = TEXT
) -> tuple[Engine, list[int]]:
    """An engine whose target says `text` after the prompt, then EOS; and the ids of that text."""
    said = [*Tokenizer.from_directory(directory).encode(text), EOS]
    target = Target(scripted({PROMPT: said}), vocab_size=128)
    drafter = drafting(target, script) if depth else None
    return make_engine(
        target, depth=depth, drafter=drafter, directory=directory, skip_tokenizer_init=False
    ), said


@pytest.mark.parametrize("drafter", DRAFTERS, ids=lambda d: f"{d[0]}-{getattr(d[1], '__name__', 'cycle')}")
@pytest.mark.parametrize(("stops", "text", "stop"), STRINGS, ids=lambda v: repr(v)[:20])
def test_stop_strings(
    stops: list[str], text: str, stop: str | None, drafter: tuple[int | None, Any], directory: Path
) -> None:
    depth, script = drafter
    engine, said = text_engine(directory, depth, script)
    events: list[Event] = []
    (got,) = run(engine, [(PROMPT, greedy(stop=stops, max_tokens=200, logprobs=1))], each_step=events.extend)
    assert "".join(got.shown) == text
    assert (got.finish_reason, got.stop_reason) == ("stop", stop)
    # ids run up to and including the token that completed the stop
    shortest = next(
        (n for n in range(len(said)) if any(s in engine.tokenizer.decode(said[:n]) for s in stops)), len(said)
    )
    assert emitted(got) == said[:shortest]
    assert len(got.logprobs) == shortest
    # what was shown is never taken back: the steps' pieces are the text
    assert "".join(event.new_text for event in events) == text


def test_the_stops_do_span_tokens(directory: Path) -> None:
    """Otherwise the table above would show little."""
    tokenizer = Tokenizer.from_directory(directory)
    ids = tokenizer.encode(TEXT)
    pieces = [tokenizer.decode([token]) for token in ids]
    spanning = [
        stop
        for stops, _, _ in STRINGS
        for stop in stops
        if stop in TEXT and not any(stop in p for p in pieces)
    ]
    assert {"the end", "end of", "not the", "東", "🙂"} <= set(spanning)


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 11, 25])
def test_text_of_a_length(num_tokens: int, directory: Path) -> None:
    """What a stop string held back is given up at the end, an unfinished character becomes U+FFFD."""
    for depth, script in DRAFTERS:
        engine, said = text_engine(directory, depth, script)
        (got,) = run(engine, [(PROMPT, greedy(stop=["the endless", "🙂🙂"], max_tokens=num_tokens))])
        assert emitted(got) == said[:num_tokens]
        assert "".join(got.shown) == engine.tokenizer.decode(said[:num_tokens])
        assert got.finish_reason == "length"


def test_streams_of_any_schedule_join_to_one_text(directory: Path) -> None:
    rng = random.Random(0)

    def script(sequence: Sequence, limit: int) -> tuple[int, int]:
        num_drafts = rng.randint(0, limit)
        return num_drafts, rng.randint(0, num_drafts)

    for stops in (["the end"], ["r 東京"], ["zzz"], []):
        texts = set()
        for depth in (None, 7, 7, 7, 7):
            engine, _ = text_engine(directory, depth, script)
            (got,) = run(engine, [(PROMPT, greedy(stop=stops, max_tokens=200))])
            texts.add(("".join(got.shown), tuple(emitted(got)), got.finish_reason, got.stop_reason))
        assert len(texts) == 1


@pytest.mark.parametrize("stops", [["the end"], ["🙂🙂"], []])
def test_a_verdict_that_is_never_committed_leaves_no_text(stops: list[str], directory: Path) -> None:
    """Every step is run twice and the first verdict dropped, as after a fault: held-back text is not lost or doubled."""
    engine, _ = text_engine(directory, 3, cycle((3, 2), (0, 0), (3, 3)))
    request = (PROMPT, greedy(stop=stops, max_tokens=200))
    (expected,) = run(engine, [request])
    engine, _ = text_engine(directory, None, always_right)
    sound = engine._step.run

    def twice(prepared: Any) -> Any:
        dropped = sound(prepared)
        again = sound(prepared)
        assert [v.new_text for v in again.verdicts] == [v.new_text for v in dropped.verdicts]
        return again

    engine._step.run = twice  # type: ignore[method-assign]
    (got,) = run(engine, [request])
    assert ("".join(got.shown), got.stop_reason) == ("".join(expected.shown), expected.stop_reason)
