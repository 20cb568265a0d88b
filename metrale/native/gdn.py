"""`gdn_verify` and `gdn_chunk` as C kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from metrale.kernels.groups import Groups
from metrale.native.build import Kernel
from metrale.native.checks import describe, group_words, new_rows, refuse, refuse_tensors

MOST_KEY_DIM = 256

_verify = Kernel("gdn_verify", "q" * 20)
_chunk = Kernel("gdn_chunk", "q" * 17)


def gdn_verify(
    q: Tensor,
    v: Tensor,
    beta: Tensor,
    ring_k: Tensor,
    ring_u: Tensor,
    ring_g: Tensor,
    ssm: Tensor,
    num_folded: Tensor,
    groups: Groups,
    fold_threshold: int,
) -> Tensor:
    """Replay the pending rows of each group's slot, fold them when due, run the new rows.

    | tensor | shape | dtype | dir | meaning |
    | --- | --- | --- | --- | --- |
    | q | [T, Hk, dk] | float32 | in | normalised, scaled queries of the new rows |
    | v | [T, Hv, dv] | float32 | in | values |
    | beta | [T, Hv] | float32 | in | write strengths |
    | ring_k | [S, W, Hk, dk] | float32 | in | normalised keys, row p at p mod W; the new rows are in already |
    | ring_u | [S, W, Hv, dv] | float32 | inout | deltas u = beta (v - S k); the new rows are written |
    | ring_g | [S, W, Hv] | float32 | in | log decays |
    | ssm | [S, Hv, dv, dk] | float32 | inout | state after row num_folded - 1; stored only by a fold |
    | num_folded | [S, Hv, 1] | int32 | inout | rows in `ssm`; a fold sets it to `start` |
    | result | [T, Hv, dv] | float32 | out | S q after each row's update |

    Pending rows are [num_folded, start). A row is S = S exp(g), u = beta (v - S k), S = S + u k^T, o = S q; a replayed
    row is S = S exp(g) + u k^T from the ring, multiply then add, so that it has the bits of its first run. A fold is
    due when pending plus new rows exceed `fold_threshold`; it changes no bit of any result. num_folded == 0 means the
    zero state, which is not loaded. Value head h reads key head h // (Hv / Hk).

    Requires: contiguous tensors, dk <= 256, pending + new rows <= W.
    Source: Yang et al. 2024, Gated Delta Networks, equation 10.
    """
    num_rows, value_heads, value_dim = v.shape
    num_slots, ring_rows, key_heads, key_dim = ring_k.shape
    if (
        value_heads % key_heads
        or q.shape != (num_rows, key_heads, key_dim)
        or beta.shape != (num_rows, value_heads)
        or ring_u.shape != (num_slots, ring_rows, value_heads, value_dim)
        or ring_g.shape != (num_slots, ring_rows, value_heads)
        or ssm.shape != (num_slots, value_heads, value_dim, key_dim)
        or not (q.dtype is v.dtype is beta.dtype is ring_k.dtype is torch.float32)
        or not (ring_u.dtype is ring_g.dtype is ssm.dtype is torch.float32)
        or not (q.is_contiguous() and v.is_contiguous() and beta.is_contiguous() and ring_k.is_contiguous())
        or not (ring_u.is_contiguous() and ring_g.is_contiguous() and ssm.is_contiguous())
    ):
        raise refuse_tensors(
            "gdn_verify", q=q, v=v, beta=beta, ring_k=ring_k, ring_u=ring_u, ring_g=ring_g, ssm=ssm
        )
    _check_folds("gdn_verify", num_folded, num_slots, value_heads)
    if key_dim > MOST_KEY_DIM:
        raise refuse("gdn_verify", "ring_k", f"a key dimension of at most {MOST_KEY_DIM}", key_dim)
    count, slots, starts, cu_rows, _ = group_words("gdn_verify", groups, num_rows)
    out = new_rows(num_rows, value_heads, value_dim)
    arguments = _verify.pack(
        q.data_ptr(),
        v.data_ptr(),
        beta.data_ptr(),
        ring_k.data_ptr(),
        ring_u.data_ptr(),
        ring_g.data_ptr(),
        ssm.data_ptr(),
        num_folded.data_ptr(),
        count,
        slots,
        starts,
        cu_rows,
        num_slots,
        ring_rows,
        key_heads,
        key_dim,
        value_heads,
        value_dim,
        fold_threshold,
        out.data_ptr(),
    )
    if status := _verify.run(arguments):
        raise _verify.fail(status)
    return out


def gdn_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    ssm: Tensor,
    num_folded: Tensor,
    groups: Groups,
) -> Tensor:
    """The gated delta rule over prompt rows in chunks of 64, state in and state out.

    | tensor | shape | dtype | dir | meaning |
    | --- | --- | --- | --- | --- |
    | q, k | [T, Hk, dk] | float32 | in | normalised queries (scaled) and keys |
    | v | [T, Hv, dv] | float32 | in | values |
    | g | [T, Hv] | float32 | in | log decays |
    | beta | [T, Hv] | float32 | in | write strengths |
    | ssm | [S, Hv, dv, dk] | float32 | inout | state before and after the group's rows |
    | num_folded | [S, Hv, 1] | int32 | inout | set to start + rows |
    | result | [T, Hv, dv] | float32 | out | |

    The equations of `metrale.reference.gdn.gdn_chunk`. Chunks stand at absolute multiples of 64; a row reads the rows
    before it in its chunk and the chunk's first state alone, so its bits do not depend on how the prompt was cut.

    A group without rows leaves its state as it is, zeros at start 0.

    Requires: contiguous tensors; group starts at a multiple of 64 with nothing pending (num_folded == start, or
    start == 0, which means the zero state).
    Source: Yang et al. 2024, Gated Delta Networks, section 3.3 (the WY form with decay).
    """
    num_rows, value_heads, value_dim = v.shape
    _, key_heads, key_dim = q.shape
    num_slots = ssm.shape[0]
    if (
        value_heads % key_heads
        or q.shape != (num_rows, key_heads, key_dim)
        or k.shape != q.shape
        or g.shape != (num_rows, value_heads)
        or beta.shape != g.shape
        or ssm.shape != (num_slots, value_heads, value_dim, key_dim)
        or not (q.dtype is k.dtype is v.dtype is g.dtype is beta.dtype is ssm.dtype is torch.float32)
        or not (q.is_contiguous() and k.is_contiguous() and v.is_contiguous())
        or not (g.is_contiguous() and beta.is_contiguous() and ssm.is_contiguous())
    ):
        raise refuse_tensors("gdn_chunk", q=q, k=k, v=v, g=g, beta=beta, ssm=ssm)
    _check_folds("gdn_chunk", num_folded, num_slots, value_heads)
    count, slots, starts, cu_rows, _ = group_words("gdn_chunk", groups, num_rows)
    out = new_rows(num_rows, value_heads, value_dim)
    arguments = _chunk.pack(
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        g.data_ptr(),
        beta.data_ptr(),
        ssm.data_ptr(),
        num_folded.data_ptr(),
        count,
        slots,
        starts,
        cu_rows,
        num_slots,
        key_heads,
        key_dim,
        value_heads,
        value_dim,
        out.data_ptr(),
    )
    if status := _chunk.run(arguments):
        raise _chunk.fail(status)
    return out


def _check_folds(operator: str, num_folded: Tensor, num_slots: int, value_heads: int) -> None:
    shape = (num_slots, value_heads, 1)
    if num_folded.shape != shape or num_folded.dtype is not torch.int32 or not num_folded.is_contiguous():
        raise refuse(operator, "num_folded", f"contiguous int32 {shape}", describe(num_folded))
