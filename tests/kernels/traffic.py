"""What each kernel loads and stores under the interpreter, against what its contract must move once.

`TRITON_INTERPRET=1 python -m tests.kernels.traffic` prints the table and fails where a bound breaks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import torch

from metrale.kernels.attention_verify import attention_prefill, attention_verify
from metrale.kernels.conv_prefill import conv_prefill
from metrale.kernels.conv_verify import conv_verify
from metrale.kernels.gated_rms_norm import gated_rms_norm
from metrale.kernels.gdn_chunk import gdn_chunk
from metrale.kernels.gdn_verify import gdn_verify
from metrale.kernels.gumbel import gumbel
from metrale.kernels.linear import linear
from metrale.kernels.masked_argmax import masked_argmax
from metrale.kernels.moe import moe
from metrale.kernels.picks import Truncation
from metrale.kernels.rms_norm import rms_norm
from metrale.kernels.rotary_store import rotary_store
from metrale.kernels.state_copy import state_copy
from metrale.kernels.thresholds import thresholds
from tests.kernels.meter import metered
from tests.kernels.suite.cases import GdnPool, GdnShape, Layer, randn
from tests.reference.oracles import groups_of

BF16 = torch.bfloat16
EPS = 1e-6
PAGE_SIZE = 16
MENTIONED = 0.005
"""What is read again is shown from this part of all that moved."""


class Case(NamedTuple):
    """A call of one operator at one shape, and the traffic that it is held to.

    `floor` is every input byte that the operator needs once and every output byte once, from the shapes alone; index
    tables and intermediate results are not in it, but count as moved. `bound` is the most that kernels may move, in
    floors. `once` names arguments of which no byte may be read twice even where the bound has room. `rivals` are the
    bytes of a state a draft row and of a dense scatter.
    """

    operator: str
    shape: str
    call: Callable[[], object]
    floor: int
    bound: float
    once: tuple[str, ...] = ()
    rivals: tuple[int, int] | None = None


def f32(*sizes: int) -> int:
    return 4 * prod(sizes)


def bf16(*sizes: int) -> int:
    return 2 * prod(sizes)


def gdn_verify_case(ratio: int, num_drafts: int, states: int) -> Case:
    """One sequence, as many pending rows as new ones; `states` moved: 0 near position 0, 1, or 2 with a fold.

    Rows are counted a value head: its key head's key and query too.
    """
    shape = GdnShape(1, ratio, 128, 128)
    new = pending = 1 + num_drafts
    heads, dk, dv = shape.value_heads, shape.key_dim, shape.value_dim

    def call() -> None:
        pool, folded = GdnPool(shape, BF16), 64 if states else 0
        pool.num_folded.fill_(folded)
        q, v = randn(new, 1, dk, dtype=BF16), randn(new, heads, dv, dtype=BF16)
        rings = (pool.ring_k, pool.ring_u, pool.ring_g)
        groups, threshold = groups_of([(1, folded + pending, new)]), 0 if states == 2 else 2**20
        gdn_verify(q, v, randn(new, heads), *rings, pool.ssm, pool.num_folded, groups, threshold)

    state = f32(heads, dv, dk)
    a_row = bf16(heads, dk) + f32(heads)  # key, decay
    a_new_row = bf16(heads, dk) + 2 * bf16(heads, dv) + f32(heads) + f32(heads, dv)  # query, v, out, beta, u
    rows = (pending + new) * a_row + pending * f32(heads, dv) + new * a_new_row
    return Case(
        "gdn_verify",
        f"K {num_drafts}, Hv/Hk {ratio}, {states} S + rows",
        call,
        states * state + rows,
        1.05,
        ("ring_u", "ring_g", "v", "beta"),
        ((1 + num_drafts) * state + rows, (3 + num_drafts) * state + rows) if states else None,
    )


def conv_case(operator: Callable[..., object], num_rows: int, bound: float, once: tuple[str, ...]) -> Case:
    """One sequence whose window is full."""
    shape = GdnShape(1, 2, 128, 128)
    keys, heads, channels = shape.key_heads, shape.value_heads, shape.num_channels

    def call() -> None:
        pool, layer = GdnPool(shape, BF16), Layer(shape, num_rows, BF16)
        rings = (pool.ring_x, pool.ring_k, pool.ring_g)
        operator(layer.projected, *layer.weights, *rings, groups_of([(1, 128, num_rows)]))

    window = shape.conv_width - 1
    kept = min(num_rows, window + 17)  # rows of the ring that `GdnPool` has
    weights = f32(channels, shape.conv_width) + 2 * f32(heads)
    read = bf16(window, channels) + bf16(num_rows, channels + 2 * heads)
    written = bf16(kept, channels) + bf16(num_rows, channels) + 2 * f32(num_rows, heads)
    return Case(
        operator.__name__,
        f"{num_rows} rows, {keys} + {keys} + {heads} heads of 128",
        call,
        weights + read + written,
        bound,
        once,
    )


def gdn_chunk_case() -> Case:
    shape = GdnShape(1, 2, 128, 128)
    rows, heads = 64, 2

    def call() -> None:
        pool = GdnPool(shape, BF16)
        q, k, v = (randn(rows, n, 128, dtype=BF16) for n in (1, 1, heads))
        gates = (-randn(rows, heads).abs(), randn(rows, heads))
        gdn_chunk(q, k, v, *gates, pool.ssm, pool.num_folded, groups_of([(1, 64, rows)]))

    floor = 2 * f32(heads, 128, 128) + 2 * bf16(rows, 128) + 2 * bf16(rows, heads, 128) + 2 * f32(rows, heads)
    # each of 2 heads x 4 value blocks reads the keys and queries, and the chunk's two matrices that are written once
    return Case("gdn_chunk", "64 rows, Hv/Hk 2, d 128", call, floor, 3.3, ("ssm", "v"))


def attention_case(
    operator: Callable[..., object], num_rows: int, num_keys: int, bound: float, once: tuple[str, ...]
) -> Case:
    """The last rows of one sequence; 8 query heads of 256 share a key head."""
    heads, dim = 8, 256

    def call() -> None:
        pages = num_keys // PAGE_SIZE
        caches = (randn(pages, PAGE_SIZE, 1, dim, seed=n, dtype=BF16) for n in (1, 2))
        groups = groups_of([(0, num_keys - num_rows, num_rows)], [range(pages)[::-1]])
        operator(
            randn(num_rows, heads, dim, dtype=BF16),
            randn(num_rows, 2 * dim * (heads + 1), dtype=BF16),
            *caches,
            groups,
        )

    floor = 3 * bf16(num_rows, heads, dim) + 2 * bf16(num_keys, dim)  # q, gates, result; keys and values
    return Case(operator.__name__, f"{num_rows} rows, {num_keys} keys, H 8/1 d 256", call, floor, bound, once)


def rotary_store_case() -> Case:
    rows, heads, dim, half = 5, 8, 256, 32

    def call() -> None:
        cache = torch.zeros(2, PAGE_SIZE, 1, dim, dtype=BF16)
        rotary_store(
            randn(rows, 2 * dim * (heads + 1), dtype=BF16),
            randn(dim),
            randn(dim, seed=1),
            randn(64, half),
            randn(64, half, seed=1),
            torch.arange(rows) + 10,
            torch.arange(rows) + 10,
            cache,
            cache.clone(),
            EPS,
        )

    floor = 2 * bf16(rows, heads + 2, dim) + 2 * f32(dim) + 2 * f32(rows, half)
    # a program reads a head's row and float32 scales of twice its size, half of the turning ones again
    return Case("rotary_store", "5 rows, H 8/1 d 256", call, floor, 3.0)


def linear_case(num_rows: int, inner: int, outputs: int, bound: float, is_fused: bool = False) -> Case:
    """Generated rows; `is_fused`: with a norm before and a gated pair of weights."""

    def call() -> None:
        x = randn(num_rows, inner, dtype=BF16)
        weight = randn((1 + is_fused) * outputs, inner, seed=1, dtype=BF16)
        options: dict[str, Any] = {"silu_mul": True, "norm": randn(inner), "eps": EPS} if is_fused else {}
        linear(x, weight, num_rows, **options)

    weight = bf16((1 + is_fused) * outputs, inner) + is_fused * f32(inner)
    floor = weight + bf16(num_rows, inner) + bf16(num_rows, outputs)
    name = f"[{num_rows}, {inner}] x [{inner}, {outputs}]{', norm, silu_mul' if is_fused else ''}"
    return Case("linear", name, call, floor, bound, ("weight",))


def moe_case() -> Case:
    experts, top_k, dim, inner = 4, 2, 512, 256

    def call() -> None:
        sizes = (
            (experts, dim),
            (experts, 2 * inner, dim),
            (experts, dim, inner),
            (2 * inner, dim),
            (dim, inner),
        )
        weights = [randn(*size, seed=n, dtype=BF16) / 16 for n, size in enumerate((*sizes, (1, dim)))]
        moe(randn(1, dim, dtype=BF16), *weights, top_k, True, 1)

    floor = 2 * bf16(dim) + bf16(experts + 1, dim) + bf16(top_k + 1, 3 * inner, dim)
    return Case("moe", "1 row, 2 of 4 experts + shared, 512 x 256", call, floor, 1.1)


def rms_norm_case(num_rows: int, bound: float) -> Case:
    def call() -> None:
        rms_norm(randn(num_rows, 2048, dtype=BF16), randn(2048), EPS)

    return Case("rms_norm", f"[{num_rows}, 2048]", call, 2 * bf16(num_rows, 2048) + f32(2048), bound, ("x",))


def gated_rms_norm_case(num_rows: int) -> Case:
    def call() -> None:
        gate = randn(num_rows, 8192, seed=1, dtype=BF16)[:, 4096:].view(num_rows, 32, 128)
        gated_rms_norm(randn(num_rows, 32, 128, dtype=BF16), gate, randn(128), EPS)

    floor = 3 * bf16(num_rows, 32, 128) + f32(128)
    return Case("gated_rms_norm", f"[{num_rows}, 32, 128]", call, floor, 1.05, ("x", "gate"))


def masked_argmax_case(has_masks: bool) -> Case:
    rows, vocab, valid = 2, 3 * 4096 + 64, 3 * 4096 + 37
    num_words = -(-valid // 32)

    def call() -> None:
        options: dict[str, Any] = {}
        if has_masks:
            bitmask = torch.full((rows, num_words), -1, dtype=torch.int32)
            options = {"bitmask": bitmask, "held_ids": torch.zeros(rows, 2, dtype=torch.int32)}
        masked_argmax(randn(rows, vocab), valid, **options)

    floor = f32(rows, valid) + 8 * rows + has_masks * f32(rows, num_words + 2)
    name = f"[{rows}, {valid}]{', bitmask, EOS hold' if has_masks else ''}"
    return Case("masked_argmax", name, call, floor, 1.05, ("logits",))


def thresholds_case() -> Case:
    def call() -> None:
        thresholds(randn(1, 4100), 4100, torch.ones(1), [Truncation(20, 1.0, 0.0)])

    # the highest logit, then two bits of the k-th a pass
    return Case("thresholds", "[1, 4100], top_k", call, f32(4100) + 4, 17.05)


def state_copy_case() -> Case:
    size = (4, 128, 128)

    def call() -> None:
        state_copy(torch.zeros(2, 4, *size), torch.zeros(2, 3, *size), (0, 3), (2, 1))

    return Case(
        "state_copy", "2 layers, 2 slots of [4, 128, 128]", call, 2 * f32(2, 2, *size), 1.05, ("source",)
    )


def gumbel_case() -> Case:
    def call() -> None:
        gumbel([(7, 0, 3), (8, 1, 4)], 2048)

    return Case("gumbel", "[2, 2048]", call, f32(2, 2048), 1.05)


CASES = (
    *(
        gdn_verify_case(ratio, num_drafts, states)
        for ratio in (1, 2)
        for num_drafts in (0, 1, 4, 16)
        for states in (1, 2)
    ),
    gdn_verify_case(1, 4, 0),
    conv_case(conv_verify, 5, 1.05, ("x", "weight", "ring_x")),
    conv_case(conv_prefill, 64, 2.5, ()),  # every tap loads its rows: 4 loads and a store for 1 and 1
    gdn_chunk_case(),
    attention_case(attention_verify, 5, 1024, 1.1, ("k_cache", "v_cache", "projected")),
    attention_case(attention_prefill, 8, 512, 1.1, ("k_cache", "v_cache", "projected")),
    rotary_store_case(),
    linear_case(1, 512, 256, 1.1),
    linear_case(4, 128, 8192, 1.1),
    linear_case(16, 512, 256, 1.5),  # 16 rows of x again for every 32 outputs
    linear_case(4, 512, 256, 1.1, is_fused=True),
    moe_case(),
    rms_norm_case(1, 1.05),
    rms_norm_case(5, 1.05),
    rms_norm_case(19, 1.2),  # the float32 scales, a row's load and store in size, again for every 8 rows
    gated_rms_norm_case(1),
    gated_rms_norm_case(5),
    masked_argmax_case(has_masks=False),
    masked_argmax_case(has_masks=True),
    thresholds_case(),
    state_copy_case(),
    gumbel_case(),
)
HEADER = (
    "operator",
    "shape",
    "floor",
    "moved",
    "factor",
    "bound",
    "state a row",
    "dense scatter",
    "read again",
)


def main() -> int:
    lines, faults = [HEADER], []
    for case in CASES:
        with metered() as meter:
            case.call()
        tensors = meter.tensors.values()
        factor = meter.moved / case.floor
        again = [
            f"{t.name} x{t.times_read:.1f}"
            for t in tensors
            if t.loaded - t.distinct > MENTIONED * meter.moved
        ]
        reads = {t.name: t.times_read for t in tensors}
        not_once = [name for name in case.once if reads.get(name) != 1]
        if not 1 <= factor <= case.bound or not_once:
            faults.append(f"{case.operator} {case.shape}: {factor:.3f} floors, not read once: {not_once}")
        rivals = [f"{bytes_ / meter.moved:.2f}" for bytes_ in case.rivals] if case.rivals else ["", ""]
        figures = (f"{case.floor:,}", f"{meter.moved:,}", f"{factor:.3f}", f"{case.bound:.2f}")
        lines.append((case.operator, case.shape, *figures, *rivals, ", ".join(again)))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, tuple("-" * width for width in widths))
    for line in lines:
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |")
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
