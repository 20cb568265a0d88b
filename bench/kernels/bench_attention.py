"""`attention_verify` and `attention_prefill`: one read of the keys and values; matrix-unit rate for prompt rows."""

from __future__ import annotations

from typing import Any

import torch

from bench.kernels.common import main, run_benchmark
from bench.kernels.inputs import SMALL_ATTENTION, AttentionDims, AttentionInputs, Random
from bench.kernels.problem import Oracle, Outputs, Problem


def num_bytes(dims: AttentionDims, num_sequences: int, context: int, new: int, element_size: int) -> int:
    """Keys and values of every position once; queries and gates in, outputs out."""
    cache = 2 * context * dims.kv_heads * dims.dim
    return num_sequences * (cache + 3 * new * dims.heads * dims.dim) * element_size


def num_flops(dims: AttentionDims, context: int, new: int) -> int:
    """Of both products, over the positions that each row sees."""
    seen = sum(range(context - new + 1, context + 1))
    return 4 * seen * dims.heads * dims.dim


def problem(
    operator: str, dims: AttentionDims, num_sequences: int, context: int, new: int, dtype: torch.dtype
) -> Problem:
    last = num_sequences - 1

    def make(device: torch.device) -> AttentionInputs:
        return AttentionInputs(dims, num_sequences, context, new, Random(device, dtype))

    def run(ops: Any, i: AttentionInputs) -> Outputs:
        out = getattr(ops, operator)(i.q, i.projected, i.k_cache, i.v_cache, i.groups)
        return out[:new], out[last * new :]

    def expect(i: AttentionInputs) -> Outputs:
        # the oracle takes seconds for many long sequences: the first and the last stand for all
        oracle = getattr(Oracle(), operator)
        first = oracle(*i.only(0))
        return first, oracle(*i.only(last)) if last else first

    return Problem(
        operator=operator,
        shape=f"{num_sequences} x {new} rows, context {context}, {dims}",
        dtype=dtype,
        num_bytes=num_bytes(dims, num_sequences, context, new, dtype.itemsize),
        num_flops=num_flops(dims, context, new) if operator == "attention_prefill" else 0,
        make=make,
        run=run,
        expect=expect,
    )


def problems(is_small: bool) -> list[Problem]:
    if is_small:
        dims, dtype = SMALL_ATTENTION, torch.float32
        return [
            problem("attention_verify", dims, 1, 256, 5, dtype),
            problem("attention_verify", dims, 4, 256, 5, dtype),
            problem("attention_prefill", dims, 1, 256, 128, dtype),
        ]
    dims, dtype = AttentionDims(), torch.bfloat16
    verify = [
        problem("attention_verify", dims, n, context, 5, dtype) for context in (4096, 32768) for n in (1, 64)
    ]
    return verify + [
        problem("attention_prefill", dims, 1, context, 2048, dtype) for context in (2048, 4096, 32768)
    ]


def test_attention(benchmark: Any, problem: Problem) -> None:
    run_benchmark(benchmark, problem)


if __name__ == "__main__":
    main(problems)
