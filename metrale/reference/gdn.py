"""References of `gdn_verify` and `gdn_chunk`: the gated delta rule over a slot's state, row by row and in chunks."""

from __future__ import annotations

import torch
from torch import Tensor

from metrale.kernels.groups import Groups

CHUNK = 64


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
    | q | [T, Hk, dk] | activation | in | normalised, scaled queries of the new rows |
    | v | [T, Hv, dv] | activation | in | values |
    | beta | [T, Hv] | float32 | in | write strengths |
    | ring_k | [S, W, Hk, dk] | activation | in | normalised keys, row p at p mod W; the new rows are in already |
    | ring_u | [S, W, Hv, dv] | float32 | inout | deltas u = beta (v - S k); the new rows are written |
    | ring_g | [S, W, Hv] | float32 | in | log decays |
    | ssm | [S, Hv, dv, dk] | float32 | inout | state after row num_folded - 1; stored only by a fold |
    | num_folded | [S, Hv, tiles] | int32 | inout | rows in `ssm`; a fold sets it to `start` |
    | result | [T, Hv, dv] | activation | out | S q after each row's update |

    Pending rows are [num_folded, start). A row is S = S exp(g), u = beta (v - S k), S = S + u k^T, o = S q; a replayed
    row is S = S exp(g) + u k^T from the ring, multiply then add, so that it has the bits of its first run whatever
    the evaluation order. A fold is due when pending plus new rows exceed `fold_threshold`; it changes no bit of any
    result. num_folded == 0 means the zero state, which is not loaded. Value head h reads key head h // (Hv / Hk).

    Requires: pending + new rows <= W.
    Source: Yang et al. 2024, Gated Delta Networks, equation 10.
    """
    num_value_heads, ratio = ssm.shape[1], ssm.shape[1] // ring_k.shape[2]
    out = torch.empty_like(v)
    for group in groups.host:
        slot, folded = group.slot, int(num_folded[group.slot, 0, 0])
        num_pending = group.start - folded
        if num_pending < 0 or num_pending + group.num_rows > ring_k.shape[1]:
            raise ValueError(
                f"gdn_verify: {num_pending} pending and {group.num_rows} new rows do not fit a ring of {ring_k.shape[1]}"
            )
        state = ssm[slot].clone() if folded else ssm.new_zeros(ssm.shape[1:])
        for position in range(folded, group.start):
            at = position % ring_k.shape[1]
            key = ring_k[slot, at].float().repeat_interleave(ratio, 0)[:, None, :]  # [Hv, 1, dk]
            state = state * torch.exp(ring_g[slot, at])[:, None, None] + ring_u[slot, at][:, :, None] * key
        if num_pending and num_pending + group.num_rows > fold_threshold:
            ssm[slot] = state
            num_folded[slot] = group.start
        for i in range(group.num_rows):
            row, at = group.first_row + i, (group.start + i) % ring_k.shape[1]
            key = ring_k[slot, at].float().repeat_interleave(ratio, 0)[:, None, :]
            query = q[row].float().repeat_interleave(ratio, 0)[:, None, :]
            state = state * torch.exp(ring_g[slot, at])[:, None, None]
            u = beta[row].reshape(num_value_heads, 1) * (v[row].float() - (state * key).sum(-1))
            ring_u[slot, at] = u
            state = state + u[:, :, None] * key
            out[row] = (state * query).sum(-1).to(out.dtype)
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
    | q, k | [T, Hk, dk] | activation | in | normalised queries (scaled) and keys |
    | v | [T, Hv, dv] | activation | in | values |
    | g | [T, Hv] | float32 | in | log decays |
    | beta | [T, Hv] | float32 | in | write strengths |
    | ssm | [S, Hv, dv, dk] | float32 | inout | state before and after the group's rows |
    | num_folded | [S, Hv, tiles] | int32 | inout | set to start + rows |
    | result | [T, Hv, dv] | activation | out | |

    With G the running sum of g inside a chunk and S0 its first state, the deltas solve the unit lower triangular system
    (I + tril(beta_i e^(G_i - G_j) k_i.k_j, -1)) U = beta (V - e^G K S0^T); then o_i = e^(G_i) S0 q_i plus the sum over
    j <= i of e^(G_i - G_j) (k_j.q_i) u_j. Chunks stand at absolute multiples of 64 and the last one is padded with rows
    that neither read nor write, so a row's bits do not depend on how the prompt was cut into steps.

    A group without rows leaves its state as it is, zeros at start 0. A chunk's rows are one product: what is no number in one of them may reach all 64,
    and no other chunk but those after it in its group.

    Requires: group starts at a multiple of 64 with nothing pending (num_folded == start, or start == 0).
    Source: Yang et al. 2024, Gated Delta Networks, section 3.3 (the WY form with decay).
    """
    ratio = ssm.shape[1] // q.shape[1]
    out = torch.empty_like(v)
    for group in groups.host:
        if group.start % CHUNK or (group.start and int(num_folded[group.slot, 0, 0]) != group.start):
            raise ValueError(
                f"gdn_chunk: group at row {group.start} needs a multiple of {CHUNK} with nothing pending"
            )
        state = ssm[group.slot].clone() if group.start else ssm.new_zeros(ssm.shape[1:])
        end = group.first_row + group.num_rows
        for first in range(group.first_row, end, CHUNK):
            rows = slice(first, min(first + CHUNK, end))
            o, state = _chunk(
                _padded(q[rows].repeat_interleave(ratio, 1)),
                _padded(k[rows].repeat_interleave(ratio, 1)),
                _padded(v[rows]),
                _padded(g[rows]),
                _padded(beta[rows]),
                state,
            )
            out[rows] = o.transpose(0, 1)[: rows.stop - first].to(out.dtype)
        ssm[group.slot] = state
        num_folded[group.slot] = group.start + group.num_rows
    return out


def _padded(x: Tensor) -> Tensor:
    """[rows, Hv, ...] to float32 [Hv, CHUNK, ...], zero rows at the end."""
    tile = x.new_zeros(CHUNK, *x.shape[1:], dtype=torch.float32)
    tile[: x.shape[0]] = x
    return tile.transpose(0, 1).contiguous()


def _chunk(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One chunk of all heads: q, k [Hv, 64, dk], v [Hv, 64, dv], g, beta [Hv, 64], state [Hv, dv, dk]."""
    total = g.cumsum(-1)  # [Hv, 64]
    seen = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    decay = (total[:, :, None] - total[:, None, :]).masked_fill(~seen, -torch.inf).exp()  # [Hv, 64, 64]
    system = ((k @ k.transpose(1, 2)) * decay * beta[:, :, None]).tril(-1)
    known = beta[:, :, None] * (v - total.exp()[:, :, None] * (k @ state.transpose(1, 2)))
    u = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)  # [Hv, 64, dv]
    o = total.exp()[:, :, None] * (q @ state.transpose(1, 2)) + ((q @ k.transpose(1, 2)) * decay) @ u
    remaining = (total[:, -1:] - total).exp()[:, :, None]  # decay from row j to the chunk's end
    return o, state * total[:, -1, None, None].exp() + u.transpose(1, 2) @ (k * remaining)
