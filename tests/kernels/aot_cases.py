"""Every launcher at the shapes that must compile, on memory that nobody touches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metrale.kernels.accept import accept
from metrale.kernels.attention_verify import attention_prefill, attention_verify
from metrale.kernels.conv_prefill import conv_prefill
from metrale.kernels.conv_verify import conv_verify
from metrale.kernels.gated_rms_norm import gated_rms_norm
from metrale.kernels.gdn_chunk import gdn_chunk
from metrale.kernels.gdn_verify import gdn_verify, num_tiles
from metrale.kernels.groups import Groups
from metrale.kernels.gumbel import gumbel
from metrale.kernels.linear import linear
from metrale.kernels.masked_argmax import masked_argmax
from metrale.kernels.moe import moe
from metrale.kernels.picks import Truncation
from metrale.kernels.rms_norm import rms_norm
from metrale.kernels.rotary_store import rotary_store
from metrale.kernels.state_copy import state_copy
from metrale.kernels.thresholds import thresholds
from tests.reference.oracles import GdnShape, groups_of

BF16, F32 = torch.bfloat16, torch.float32
EPS = 1e-6


class Batch(NamedTuple):
    """What follows the batch, and so may choose nothing but a grid."""

    counts: tuple[int, ...] = (5, 3)  # rows of each group
    start: int = 128
    skipped: int = 0  # rows of a larger tensor that lie before these
    num_slots: int = 8
    ring: int = 34

    @property
    def num_rows(self) -> int:
        return sum(self.counts)

    def rows(self, *sizes: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(self.skipped + self.num_rows, *sizes, dtype=dtype)[self.skipped :]

    def groups(self, page_size: int = 64) -> Groups:
        last = self.start + max(self.counts, default=0)
        pages = [range(-(-last // page_size))] * len(self.counts)
        return groups_of([(n, self.start, count) for n, count in enumerate(self.counts)], pages)


BATCHES = (
    *(Batch((n,)) for n in (1, 2, 15, 16, 17)),
    Batch((48,), ring=96),
    Batch((1, 1, 16), num_slots=5),
    Batch((16, 0, 17), start=192, num_slots=16, ring=48),
    Batch((3, 1), start=64, skipped=1, ring=33),
    Batch((4,), skipped=3, num_slots=1),
)
"""Any number of rows, slots and ring rows: one, odd ones and multiples of 16, and slices of larger tensors."""


class Case(NamedTuple):
    """A launcher at one shape."""

    operator: str
    shape: str
    call: Callable[[Batch], object]
    is_main: bool = True  # compiled by default
    is_wide: bool = True  # rows that stand at multiples of 16 bytes


def name_of(dtype: torch.dtype) -> str:
    return "bf16" if dtype is BF16 else "f32"


def gdn_state(shape: GdnShape, batch: Batch) -> tuple[Tensor, Tensor]:
    tiles = num_tiles(shape.key_dim, shape.value_dim)
    heads = shape.value_heads
    return (
        torch.empty(batch.num_slots, heads, shape.value_dim, shape.key_dim),
        torch.empty(batch.num_slots, heads, tiles, dtype=torch.int32),
    )


def rings(shape: GdnShape, batch: Batch, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """ring_x, ring_k, ring_u, ring_g."""
    slots, ring, heads = batch.num_slots, batch.ring, shape.value_heads
    return (
        torch.empty(slots, ring - 13, shape.num_channels, dtype=dtype),
        torch.empty(slots, ring, shape.key_heads, shape.key_dim, dtype=dtype),
        torch.empty(slots, ring, heads, shape.value_dim),
        torch.empty(slots, ring, heads),
    )


def gdn_cases(shape: GdnShape, dtype: torch.dtype, is_main: bool) -> list[Case]:
    keys = (shape.key_heads, shape.key_dim)
    values = (shape.value_heads, shape.value_dim)

    def conv(operator: Callable[..., object]) -> Callable[[Batch], object]:
        def call(batch: Batch) -> object:
            ring_x, ring_k, _, ring_g = rings(shape, batch, dtype)
            weights = (
                torch.empty(shape.num_channels, shape.conv_width),
                torch.empty(values[0]),
                torch.empty(values[0]),
            )
            projected = batch.rows(shape.width, dtype=dtype)
            return operator(projected, *weights, ring_x, ring_k, ring_g, batch.groups())

        return call

    def verify(batch: Batch) -> object:
        _, *state_rings = rings(shape, batch, dtype)
        q, v = batch.rows(*keys, dtype=dtype), batch.rows(*values, dtype=dtype)
        beta = batch.rows(values[0], dtype=F32)
        return gdn_verify(q, v, beta, *state_rings, *gdn_state(shape, batch), batch.groups(), 8)

    def chunk(batch: Batch) -> object:
        rows = (batch.rows(*sizes, dtype=dtype) for sizes in (keys, keys, values))
        gates = (batch.rows(values[0], dtype=F32) for _ in range(2))
        return gdn_chunk(*rows, *gates, *gdn_state(shape, batch), batch.groups())

    def norm(batch: Batch) -> object:
        projected = batch.rows(shape.width, dtype=dtype)
        gate = projected.as_strided(
            (batch.num_rows, *values),
            (shape.width, values[1], 1),
            projected.storage_offset() + shape.num_channels,
        )
        return gated_rms_norm(batch.rows(*values, dtype=dtype), gate, torch.empty(values[1]), EPS)

    words = f"Hk {keys[0]} Hv {values[0]} dk {keys[1]} dv {values[1]} W {shape.conv_width} {name_of(dtype)}"
    calls: tuple[tuple[str, Callable[[Batch], object]], ...] = (
        ("conv_verify", conv(conv_verify)),
        ("conv_prefill", conv(conv_prefill)),
        ("gdn_verify", verify),
        ("gdn_chunk", chunk),
        ("gated_rms_norm", norm),
    )
    is_wide = min(keys[1], values[1]) >= 64 and not is_odd(shape, dtype)
    return [Case(name, words, call, is_main, is_wide) for name, call in calls]


def is_odd(shape: GdnShape, dtype: torch.dtype) -> bool:
    """Rows that do not all stand at multiples of 16 bytes."""
    return any(dim * dtype.itemsize % 16 for dim in (shape.key_dim, shape.value_dim, shape.width))


def attention_cases(
    num_heads: int, num_kv_heads: int, dim: int, half: int, page_size: int, dtype: torch.dtype, is_main: bool
) -> list[Case]:
    columns = 2 * dim * (num_heads + num_kv_heads)

    def caches() -> tuple[Tensor, Tensor]:
        cache = torch.empty(16, page_size, num_kv_heads, dim, dtype=dtype)
        return cache, torch.empty_like(cache)

    def attend(operator: Callable[..., object]) -> Callable[[Batch], object]:
        def call(batch: Batch) -> object:
            q, projected = batch.rows(num_heads, dim, dtype=dtype), batch.rows(columns, dtype=dtype)
            return operator(q, projected, *caches(), batch.groups(page_size))

        return call

    def rotary(batch: Batch) -> object:
        scales = (torch.empty(dim), torch.empty(dim), torch.empty(512, half), torch.empty(512, half))
        places = (batch.rows(dtype=torch.int64), batch.rows(dtype=torch.int64))
        return rotary_store(batch.rows(columns, dtype=dtype), *scales, *places, *caches(), EPS)

    words = f"H {num_heads}/{num_kv_heads} dh {dim} rot {2 * half} {name_of(dtype)}"
    calls: tuple[tuple[str, Callable[[Batch], object]], ...] = (
        ("attention_verify", attend(attention_verify)),
        ("attention_prefill", attend(attention_prefill)),
        ("rotary_store", rotary),
    )
    is_wide = dim >= 256  # a lane holds 8 elements of a head or more
    return [Case(name, words, call, is_main, is_wide) for name, call in calls]


def linear_case(
    inner: int, outputs: int, dtype: torch.dtype, is_prompt: bool, epilogue: str = "", is_main: bool = True
) -> Case:
    """`epilogue`: words of norm, norm4 (a norm for each of 4 parts), residual, silu_mul."""

    def call(batch: Batch) -> object:
        options: dict[str, Any] = {}
        if "norm" in epilogue:
            options = {"norm": torch.empty((4, inner // 4) if "norm4" in epilogue else (inner,)), "eps": EPS}
        if "residual" in epilogue:
            options["residual"] = batch.rows(outputs, dtype=dtype)
        silu_mul = "silu_mul" in epilogue
        weight = torch.empty((1 + silu_mul) * outputs, inner, dtype=dtype)
        num_generated = 0 if is_prompt else batch.num_rows
        return linear(batch.rows(inner, dtype=dtype), weight, num_generated, silu_mul=silu_mul, **options)

    row_class = "prompt" if is_prompt else "generated"
    words = f"{inner} x {outputs} {epilogue} {row_class} {name_of(dtype)}".replace("  ", " ")
    return Case("linear", words, call, is_main, inner * dtype.itemsize % 16 == 0)


def moe_case(experts: int, top_k: int, dim: int, inner: int, dtype: torch.dtype, is_main: bool) -> Case:
    sizes = ((experts, dim), (experts, 2 * inner, dim), (experts, dim, inner), (2 * inner, dim), (dim, inner))

    def call(batch: Batch) -> object:
        weights = [torch.empty(*size, dtype=dtype) for size in (*sizes, (1, dim))]
        x, residual = batch.rows(dim, dtype=dtype), batch.rows(dim, dtype=dtype)
        return moe(x, *weights, top_k, True, batch.num_rows // 2, residual)

    return Case("moe", f"{top_k} of {experts} of {dim} x {inner} {name_of(dtype)}", call, is_main)


def norm_case(dim: int, dtype: torch.dtype, is_main: bool) -> Case:
    def call(batch: Batch) -> object:
        return rms_norm(batch.rows(dim, dtype=dtype), torch.empty(dim), EPS)

    return Case("rms_norm", f"{dim} {name_of(dtype)}", call, is_main, dim * dtype.itemsize % 16 == 0)


def pick_cases(vocab: int, valid: int, is_main: bool) -> list[Case]:
    def plain(batch: Batch) -> object:
        return masked_argmax(batch.rows(vocab, dtype=F32), valid)

    def full(batch: Batch) -> object:
        rows = batch.num_rows
        return masked_argmax(
            batch.rows(vocab, dtype=F32),
            valid,
            bitmask=batch.rows(-(-vocab // 32), dtype=torch.int32),
            held_ids=batch.rows(2, dtype=torch.int32),
            temperatures=batch.rows(dtype=F32),
            thresholds=batch.rows(dtype=F32),
            noise=[(n, 0, n) for n in range(rows)],
            with_logprobs=True,
        )

    def cut(batch: Batch) -> object:
        rows = [Truncation(20, 0.9, 0.1)] * batch.num_rows
        mask = batch.rows(-(-vocab // 32), dtype=torch.int32)
        temperatures = batch.rows(dtype=F32)
        return thresholds(batch.rows(vocab, dtype=F32), valid, temperatures, rows, bitmask=mask)

    return [
        Case("masked_argmax", f"{valid} of {vocab}", plain, is_main),
        Case("masked_argmax", f"{valid} of {vocab}, all stages", full, is_main),
        Case("thresholds", f"{valid} of {vocab}, bitmask", cut, is_main),
    ]


def small_cases() -> list[Case]:
    def verdicts(batch: Batch) -> object:
        batch = batch._replace(counts=tuple(min(max(n, 1), 17) for n in batch.counts))
        return accept(*(batch.rows(dtype=torch.int64) for _ in range(2)), batch.groups())

    def noise(batch: Batch) -> object:
        return gumbel([(n, 0, n) for n in range(batch.num_rows)], 151936)

    def copy(dtype: torch.dtype, *sizes: int) -> Callable[[Batch], object]:
        def call(batch: Batch) -> object:
            slots = 2 + batch.num_slots
            tensors = (torch.empty(3, n, *sizes, dtype=dtype) for n in (slots, slots + 1))
            return state_copy(*tensors, (0, 2), (2, 1))

        return call

    return [
        Case("accept", "", verdicts),
        Case("gumbel", "151936", noise),
        Case("state_copy", "32 x 128 x 128 f32", copy(F32, 32, 128, 128)),
        Case("state_copy", "37 x 8192 bf16", copy(BF16, 37, 8192)),
        Case("state_copy", "32 x 1 int32", copy(torch.int32, 32, 1), is_wide=False),
        Case("state_copy", "3 x 7 bf16", copy(BF16, 3, 7), is_wide=False),
    ]


def cases() -> Sequence[Case]:
    found: list[Case] = []
    for heads in (16, 32, 48, 64):
        for dtype in (BF16, F32):
            found += gdn_cases(GdnShape(16, heads // 16, 128, 128), dtype, is_main=heads == 32)
    for key_dim, value_dim, width in ((96, 40, 3), (100, 100, 4), (20, 24, 3), (9, 7, 2), (16, 128, 4)):
        for dtype in (BF16, F32):
            is_main = (key_dim, dtype) == (96, BF16)
            found += gdn_cases(GdnShape(2, 2, key_dim, value_dim, width), dtype, is_main)
    for dtype in (BF16, F32):
        found += attention_cases(16, 2, 256, 32, 16, dtype, is_main=True)
        found += attention_cases(24, 4, 256, 32, 64, dtype, is_main=False)
        found += attention_cases(32, 4, 128, 64, 16, dtype, is_main=False)
        found += attention_cases(8, 2, 64, 16, 16, dtype, is_main=False)
        found += attention_cases(6, 2, 40, 10, 1, dtype, is_main=False)
        found += [norm_case(2048, dtype, True), norm_case(5120, dtype, False), norm_case(100, dtype, False)]
        found.append(moe_case(512, 10, 2048, 512, dtype, dtype is BF16))
        for is_prompt in (False, True):
            found += [
                linear_case(2048, 12288, dtype, is_prompt, "norm"),
                linear_case(4096, 2048, dtype, is_prompt, "residual"),
                linear_case(2048, 5632, dtype, is_prompt, "norm silu_mul", dtype is BF16),
                linear_case(2048, 12288, dtype, is_prompt, "norm silu_mul", False),
                linear_case(4096, 2048, dtype, is_prompt, "norm4 residual", False),
                linear_case(2048, 151936, dtype, is_prompt, "", False),
                linear_case(2048, 248320, dtype, is_prompt, "norm", False),
                linear_case(100, 60, dtype, is_prompt, "norm", False),
            ]
    found += pick_cases(248320, 248077, is_main=True)
    found += pick_cases(151936, 151669, is_main=False)
    found += small_cases()
    return found


CASES = tuple(cases())
OPERATORS = tuple(dict.fromkeys(case.operator for case in CASES))
