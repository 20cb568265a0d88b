"""The baseline of `gdn_verify`: a verify that stores the state after every row, as engines do that roll back by index.

With one row it is a plain decode step: one read and one write of the state.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from metrale.kernels import gdn_verify as ours
from metrale.kernels.launch import ceil_div, kernel, launch, next_power_of_2


@kernel(sizes=["num_rows"])
def _state_per_row_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    g_ptr,
    beta_ptr,
    state_ptr,
    states_ptr,
    out_ptr,
    num_rows,
    NUM_KEY_HEADS: tl.constexpr,
    NUM_VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_DK: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    i_head = tl.program_id(0)
    i_tile = tl.program_id(1)
    i_sequence = tl.program_id(2).to(tl.int64)
    i_key_head = i_head // (NUM_VALUE_HEADS // NUM_KEY_HEADS)
    offs_k = tl.arange(0, BLOCK_DK)
    offs_v = i_tile * BLOCK_DV + tl.arange(0, BLOCK_DV)
    mask_k = offs_k < KEY_DIM
    mask_v = offs_v < VALUE_DIM
    mask_state = mask_v[:, None] & mask_k[None, :]
    at_state = (i_head * VALUE_DIM + offs_v[:, None]) * KEY_DIM + offs_k[None, :]
    size = NUM_VALUE_HEADS * VALUE_DIM * KEY_DIM
    state = tl.load(state_ptr + i_sequence * size + at_state, mask=mask_state, other=0.0)
    for i in range(num_rows):
        row = i_sequence * num_rows + i
        at_k = (row * NUM_KEY_HEADS + i_key_head) * KEY_DIM + offs_k
        at_v = (row * NUM_VALUE_HEADS + i_head) * VALUE_DIM + offs_v
        key = tl.load(k_ptr + at_k, mask=mask_k, other=0.0).to(tl.float32)
        query = tl.load(q_ptr + at_k, mask=mask_k, other=0.0).to(tl.float32)
        value = tl.load(v_ptr + at_v, mask=mask_v, other=0.0).to(tl.float32)
        decay = tl.load(g_ptr + row * NUM_VALUE_HEADS + i_head)
        strength = tl.load(beta_ptr + row * NUM_VALUE_HEADS + i_head)
        state = state * tl.exp(decay)
        delta = strength * (value - tl.sum(state * key[None, :], axis=1))
        state = tl.fma(delta[:, None], key[None, :], state)
        out = tl.sum(state * query[None, :], axis=1)
        tl.store(out_ptr + at_v, out.to(out_ptr.dtype.element_ty), mask=mask_v)
        tl.store(states_ptr + row * size + at_state, state, mask=mask_state)


def state_per_row(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, states: Tensor
) -> Tensor:
    """Runs every sequence's rows from `state` and writes the state after each.

    | tensor | shape | dtype | dir | meaning |
    | --- | --- | --- | --- | --- |
    | q, k | [N R, Hk, dk] | activation | in | normalised queries (scaled) and keys |
    | v | [N R, Hv, dv] | activation | in | values |
    | g, beta | [N R, Hv] | float32 | in | log decays, write strengths |
    | state | [N, Hv, dv, dk] | float32 | in | |
    | states | [N R, Hv, dv, dk] | float32 | out | after each row |
    | result | [N R, Hv, dv] | activation | out | |
    """
    _, num_key_heads, key_dim = q.shape
    num_sequences, num_value_heads, value_dim, _ = state.shape
    block_dv, num_warps = ours.tile_of(key_dim, value_dim)
    out = torch.empty_like(v)
    launch(
        _state_per_row_kernel,
        (num_value_heads, ceil_div(value_dim, block_dv), num_sequences),
        q,
        k,
        v,
        g,
        beta,
        state,
        states,
        out,
        q.shape[0] // num_sequences,
        NUM_KEY_HEADS=num_key_heads,
        NUM_VALUE_HEADS=num_value_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        BLOCK_DK=max(16, next_power_of_2(key_dim)),
        BLOCK_DV=block_dv,
        num_warps=num_warps,
        num_stages=1,
        enable_fp_fusion=True,
    )
    return out
