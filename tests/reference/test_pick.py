"""`masked_argmax` and `gumbel`: known answers, moments and the tail."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from metrale.reference import pick
from metrale.reference.pick import gumbel, masked_argmax
from tests.reference.oracles import randn

NAN, INF = math.nan, math.inf
WORD = 0xFFFFFFFF


def argmax(logits: Tensor, num_valid: int) -> Tensor:
    return masked_argmax(logits, num_valid).token_ids


def one(row: list[float], num_valid: int | None = None) -> int:
    return int(argmax(torch.tensor([row]), len(row) if num_valid is None else num_valid))


# masked_argmax


@settings(deadline=None, max_examples=300)
@given(
    st.lists(st.sampled_from((-INF, -2.0, -1.0, -0.0, 0.0, 1.0, 1.5, INF, NAN)), min_size=1, max_size=70),
    st.data(),
)
def test_equals_a_loop(row: list[float], data: st.DataObject) -> None:
    num_valid = data.draw(st.integers(1, len(row)))
    valid = row[:num_valid]
    expected = -1
    if not any(math.isnan(x) for x in valid) and max(valid) > -INF:
        expected = next(i for i, x in enumerate(valid) if x == max(valid))
    assert one(row, num_valid) == expected


def test_rows_do_not_see_each_other() -> None:
    """Width 1000: all NaN between two good rows, NaN at one id only, nothing but -inf."""
    logits = randn(7, 1000)
    expected = argmax(logits, 1000).tolist()
    logits[1] = NAN
    logits[3, 999] = NAN
    logits[5] = -INF
    assert argmax(logits, 1000).tolist() == [
        expected[0],
        -1,
        expected[2],
        -1,
        expected[4],
        -1,
        expected[6],
    ]


@pytest.mark.parametrize("padding", [0.0, 50.0, INF, NAN])
@pytest.mark.parametrize("num_columns", [128, 160])
def test_padded_columns_do_not_exist(num_columns: int, padding: float) -> None:
    """All real logits are negative, the padding is not."""
    logits = torch.full((3, num_columns), padding)
    logits[:, :100] = -5.0
    logits[0, 40] = logits[1, 99] = -4.0
    assert argmax(logits, 100).tolist() == [40, 99, 0]
    logits[:, :100] = -INF
    assert argmax(logits, 100).tolist() == [-1, -1, -1]


@pytest.mark.parametrize("num_ids", [2000, 151_936])
@pytest.mark.parametrize("ids", [(5, 6), (5, 1029), (1029, 1030), (255, 256, 257), (0, 1999)])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_the_lowest_of_tied_ids(ids: tuple[int, ...], num_ids: int, num_threads: int) -> None:
    """Inside a tile, across tiles, at the ends; however many threads share the row."""
    logits = -randn(3, num_ids).abs()
    logits[:, list(ids)] = 2.0
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        assert argmax(logits, num_ids).tolist() == [min(ids)] * 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("num_ids", [1, 7, 64, 1000])
def test_all_equal(num_ids: int) -> None:
    assert argmax(torch.zeros(2, num_ids), num_ids).tolist() == [0, 0]


def test_both_zeros_tie() -> None:
    assert one([-1.0, -0.0, 0.0]) == 1
    assert one([-1.0, 0.0, -0.0]) == 1
    wide = torch.full((1, 2000), -0.0)
    wide[0, 1500] = 0.0
    assert int(argmax(wide, 2000)) == 0


@pytest.mark.parametrize("num_valid", [0, 101, -1])
def test_bounds_are_checked(num_valid: int) -> None:
    with pytest.raises(ValueError, match=f"masked_argmax: num_valid: expected 1 to 100, got {num_valid}"):
        argmax(torch.zeros(1, 100), num_valid)


def test_no_rows() -> None:
    got = argmax(torch.empty(0, 9), 9)
    assert (got.shape, got.dtype) == ((0,), torch.int64)


# gumbel


def philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 on Python integers."""
    for _ in range(10):
        product0, product1 = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [
            (product1 >> 32) ^ counter[1] ^ key[0],
            product1 & WORD,
            (product0 >> 32) ^ counter[3] ^ key[1],
            product0 & WORD,
        ]
        key = [(key[0] + 0x9E3779B9) & WORD, (key[1] + 0xBB67AE85) & WORD]
    return counter


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_known_answers(counter: str, key: str, expected: str) -> None:
    """The vectors of Salmon et al. 2011 (Random123, kat_vectors): what the words below are compared with is Philox."""
    words = philox([int(word, 16) for word in counter.split()], [int(word, 16) for word in key.split()])
    assert words == [int(word, 16) for word in expected.split()]


def noise_of(word: int) -> float:
    """-log(-log(1 - u)) in float64 from the float32 uniform of a word."""
    u = min(float(torch.tensor((word + 0.5) * 2.0**-32, dtype=torch.float32)), 1 - 2.0**-24)
    return -math.log(-math.log1p(-u))


@pytest.mark.parametrize("seed", [0, 1, 0xFFFFFFFF, 1 << 32, 0x299F31D0A4093822, (1 << 64) - 1])
@pytest.mark.parametrize(("sample", "position"), [(0, 0), (1, 0), (0, 1), (3, 70_000), (65_535, 0xFFFFFFFF)])
def test_words(seed: int, sample: int, position: int) -> None:
    """Key: the seed's halves; counter: id // 4, position, sample, 0; word id % 4."""
    num_ids = 43
    got = gumbel([(seed, sample, position)], num_ids)
    assert (got.shape, got.dtype) == ((1, num_ids), torch.float32)
    for token_id in range(num_ids):
        words = philox([token_id // 4, position, sample, 0], [seed & WORD, seed >> 32])
        assert float(got[0, token_id]) == pytest.approx(noise_of(words[token_id % 4]), rel=2e-6, abs=2e-6)


def test_first_words_of_the_zero_key() -> None:
    """The published vector seen through the operator itself."""
    expected = [noise_of(int(word, 16)) for word in "6627e8d5 e169c58d bc57ac4c 9b00dbd8".split()]
    assert gumbel([(0, 0, 0)], 4)[0].tolist() == pytest.approx(expected, rel=2e-6)


def test_a_row_is_its_name_alone() -> None:
    """In any company, at any place, at any width."""
    rng = random.Random(0)
    names = [(rng.randrange(1 << 64), rng.randrange(4), rng.randrange(1 << 20)) for _ in range(9)]
    together = gumbel(names, 1001)
    for i, name in enumerate(names):
        assert torch.equal(gumbel([name], 1001)[0], together[i])
        assert torch.equal(gumbel([name], 18)[0], together[i, :18])
    assert len({tuple(row) for row in together.tolist()}) == len(names)
    assert gumbel([], 5).shape == (0, 5)


def test_moments() -> None:
    """Mean 0.5772 and variance pi^2 / 6, within five standard errors of 400,000 draws."""
    noise = gumbel([(seed, 0, position) for seed in (1, 2) for position in range(2)], 100_000).double()
    count = noise.numel()
    mean, variance = float(noise.mean()), float(noise.var())
    assert abs(mean - 0.5772156649) < 5 * math.sqrt(math.pi**2 / 6 / count)
    fourth = 14.6114  # central moment of a standard Gumbel: 27/5 of the squared variance
    assert abs(variance - math.pi**2 / 6) < 5 * math.sqrt((fourth - (math.pi**2 / 6) ** 2) / count)
    ordered, _ = noise.flatten().sort()
    steps = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    assert float((torch.exp(-torch.exp(-ordered)) - steps).abs().max()) < 1.95 / math.sqrt(count), (
        "Kolmogorov-Smirnov"
    )


def test_the_tail_goes_on_beyond_sixteen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uniforms of 24 bits would end at 16.6: the smallest words give distinct, finite noise up to 22.9."""

    def smallest(blocks: torch.Tensor, *_: int) -> list[torch.Tensor]:
        return [4 * blocks + i for i in range(4)]

    monkeypatch.setattr(pick, "_philox", smallest)
    noise = gumbel([(0, 0, 0)], 400)[0].tolist()
    assert noise == pytest.approx([noise_of(word) for word in range(400)], rel=1e-6)
    assert noise == sorted(noise, reverse=True)
    assert len(set(noise)) == 400
    assert noise[0] > 22.8
    assert noise[399] > 16


def test_the_other_end_is_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    def largest(blocks: torch.Tensor, *_: int) -> list[torch.Tensor]:
        return [WORD - (4 * blocks + i) for i in range(4)]

    monkeypatch.setattr(pick, "_philox", largest)
    noise = gumbel([(0, 0, 0)], 1000)[0]
    assert noise.isfinite().all()
    assert noise.tolist() == sorted(noise.tolist())
    assert float(noise[0]) == pytest.approx(-math.log(24 * math.log(2)), rel=1e-6)
