"""`gdn_verify` beside a plain decode step, a verify that stores a state per row, and flash-linear-attention where it is."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from bench.kernels import bench_conv_verify
from bench.kernels.common import main, run_benchmark
from bench.kernels.inputs import SMALL_GDN, GdnDims, GdnInputs, Random
from bench.kernels.problem import Outputs, Problem, Target

PENDING, NEW = 4, 5
FOLD, NO_FOLD = 8, 1000
ONE_ROW = "one row, plain decode"
PER_ROW = "a state per row"
FLA_ONE_ROW = "fla, one row"
MANY_SEQUENCES = 64


def num_bytes(
    dims: GdnDims, num_sequences: int, pending: int, new: int, element_size: int, folds: bool, tiles: int = 1
) -> int:
    """One read of the state, one write if it folds, pending rows' k, u, g in; q, k, v, g, beta in, u and o out."""
    d = dims
    keys, values, heads = d.key_heads * d.key_dim, d.value_heads * d.value_dim, d.value_heads
    state = d.state_bytes * (2 if folds else 1) + 4 * heads * tiles * (2 if folds else 1)
    replayed = pending * (keys * element_size + 4 * values + 4 * heads)
    run = new * ((2 * keys + 2 * values) * element_size + 4 * values + 8 * heads)
    return num_sequences * (state + replayed + run)


def num_bytes_of_rows(dims: GdnDims, num_sequences: int, new: int, element_size: int, num_writes: int) -> int:
    """A baseline: one read and `num_writes` writes of the state, the rows' inputs and outputs."""
    keys, values = dims.key_heads * dims.key_dim, dims.value_heads * dims.value_dim
    rows = new * ((2 * keys + 2 * values) * element_size + 8 * dims.value_heads)
    return num_sequences * (dims.state_bytes * (1 + num_writes) + rows)


class Rows:
    """What a baseline reads: the pending rows in the state already, and the step's first `new` rows side by side."""

    def __init__(self, inputs: GdnInputs, new: int) -> None:
        i, n = inputs, inputs.num_sequences
        self.new = new
        self.state = self._replayed(i)
        self.q, self.k, self.v, self.g, self.beta = (
            x.unflatten(0, (n, i.new))[:, :new].flatten(0, 1).contiguous()
            for x in (i.q, i.new_rows(i.ring_k), i.v, i.new_rows(i.ring_g), i.beta)
        )
        self.states = self.state.new_empty(n * new, *self.state.shape[1:])

    @staticmethod
    def _replayed(i: GdnInputs) -> torch.Tensor:
        ratio, state = i.dims.value_heads // i.dims.key_heads, i.ssm
        for position in range(i.folded, i.start):
            at = position % i.ring_k.shape[1]
            key = i.ring_k[:, at].float().repeat_interleave(ratio, 1)[:, :, None, :]
            state = state * i.ring_g[:, at].exp()[..., None, None] + i.ring_u[:, at][..., None] * key
        return state


def run_state_per_row(ops: Any, rows: Rows) -> Outputs:
    from bench.kernels.state_per_row import state_per_row

    return (state_per_row(rows.q, rows.k, rows.v, rows.g, rows.beta, rows.state, rows.states),)


def run_fla(ops: Any, rows: Rows) -> Outputs:
    """flash-linear-attention's recurrent kernel with the state read and, once, written."""
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    by_sequence = (x.unflatten(0, (-1, rows.new)) for x in (rows.q, rows.k, rows.v, rows.g, rows.beta))
    q, k, v, g, beta = by_sequence
    out, _ = fused_recurrent_gated_delta_rule(
        q, k, v, g=g, beta=beta, scale=1.0, initial_state=rows.state, output_final_state=True
    )
    return (out.flatten(0, 1),)


class Baseline(NamedTuple):
    """Who else runs the step's first `new` rows, and how often it writes the state."""

    variant: str
    new: int
    run: Callable[[Any, Rows], Outputs]
    num_writes: int
    has_keys_first: bool = False  # the state is [dk, dv]


def baselines() -> list[Baseline]:
    found = [Baseline(ONE_ROW, 1, run_state_per_row, 1), Baseline(PER_ROW, NEW, run_state_per_row, NEW)]
    if importlib.util.find_spec("fla") is not None:
        found += [
            Baseline(FLA_ONE_ROW, 1, run_fla, 1, has_keys_first=True),
            Baseline(f"fla, {NEW} rows", NEW, run_fla, 1, has_keys_first=True),
        ]
    return found


def baseline_problem(ours: Problem, dims: GdnDims, num_sequences: int, other: Baseline) -> Problem:
    """A baseline owes the outputs that we owe, of its rows."""

    def make(device: torch.device) -> Rows:
        rows = Rows(ours.make(device), other.new)
        if other.has_keys_first:
            rows.state = rows.state.transpose(-1, -2).contiguous()
        return rows

    def expect(rows: Rows) -> Outputs:
        out = ours.by_reference(ours.make(rows.q.device))[0]
        return (out.unflatten(0, (num_sequences, NEW))[:, : other.new].flatten(0, 1),)

    return ours.baseline(
        other.variant,
        other.run,
        make=make,
        expect=expect,
        reset=None,
        needs_triton=True,
        num_bytes=num_bytes_of_rows(dims, num_sequences, other.new, ours.dtype.itemsize, other.num_writes),
    )


def problem(
    dims: GdnDims, num_sequences: int, dtype: torch.dtype, folds: bool, pending: int = PENDING, new: int = NEW
) -> Problem:
    def make(device: torch.device) -> GdnInputs:
        return GdnInputs(dims, num_sequences, pending, new, Random(device, dtype))

    def run(ops: Any, i: GdnInputs) -> Outputs:
        out = ops.gdn_verify(
            *(i.q, i.v, i.beta, i.ring_k, i.ring_u, i.ring_g, i.ssm, i.num_folded, i.groups),
            FOLD if folds else NO_FOLD,
        )
        return out, i.ring_u, i.ssm, i.num_folded

    return Problem(
        operator="gdn_verify",
        shape=f"{num_sequences} x ({pending} + {new}) rows, {dims}{', fold' if folds else ''}",
        dtype=dtype,
        num_bytes=num_bytes(dims, num_sequences, pending, new, dtype.itemsize, folds),
        make=make,
        run=run,
        reset=GdnInputs.unfold if folds else None,
    )


def with_baselines(made: Problem, dims: GdnDims, num_sequences: int) -> Problem:
    """A problem with its baselines and, where many sequences fill the device, what is wanted of it."""
    others = baselines()
    if num_sequences >= MANY_SEQUENCES:
        at_most = {ONE_ROW: 1.4, PER_ROW: 0.5, FLA_ONE_ROW: 1.0}
        against = (
            Target(max_times=at_most[o.variant], beside=o.variant) for o in others if o.variant in at_most
        )
        made = replace(made, targets=(Target(min_percent=55.0), *against))
    return made.with_baselines(*(baseline_problem(made, dims, num_sequences, other) for other in others))


def layer(dims: GdnDims, num_sequences: int, dtype: torch.dtype, targets: tuple[Target, ...] = ()) -> Problem:
    """`conv_verify` and `gdn_verify` one after the other: all of a GDN layer between its products."""

    def make(device: torch.device) -> GdnInputs:
        return GdnInputs(dims, num_sequences, PENDING, NEW, Random(device, dtype))

    def run(ops: Any, i: GdnInputs) -> Outputs:
        q, v, beta = ops.conv_verify(i.projected, *i.conv, i.ring_x, i.ring_k, i.ring_g, i.groups)
        out = ops.gdn_verify(
            *(q, v, beta, i.ring_k, i.ring_u, i.ring_g, i.ssm, i.num_folded, i.groups), NO_FOLD
        )
        return out, i.ring_u

    sizes = (dims, num_sequences)
    return Problem(
        operator="gdn layer",
        shape=f"conv_verify + gdn_verify, {num_sequences} x ({PENDING} + {NEW}) rows, {dims}",
        dtype=dtype,
        num_bytes=bench_conv_verify.num_bytes(*sizes, NEW, dtype.itemsize)
        + num_bytes(*sizes, PENDING, NEW, dtype.itemsize, folds=False),
        make=make,
        run=run,
        targets=targets,
    )


def problems(is_small: bool) -> list[Problem]:
    if is_small:
        f32 = torch.float32
        return [
            with_baselines(problem(SMALL_GDN, 1, f32, folds=False), SMALL_GDN, 1),
            problem(SMALL_GDN, 4, f32, folds=False),
            problem(SMALL_GDN, 4, f32, folds=True),
            layer(SMALL_GDN, 1, f32),
        ]
    dims, bf16 = GdnDims(), torch.bfloat16
    found = []
    for n in (1, 64, 256):
        plain = problem(dims, n, bf16, folds=False)
        found.append(with_baselines(plain, dims, n))
        found.append(problem(dims, n, bf16, folds=True))
    found.append(layer(dims, 1, bf16, targets=(Target(max_us=16.0),)))
    found.append(layer(dims, 64, bf16))
    return found


def test_gdn_verify(benchmark: Any, problem: Problem) -> None:
    run_benchmark(benchmark, problem)


if __name__ == "__main__":
    main(problems)
