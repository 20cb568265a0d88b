"""The gated delta rule over whole sequences, in chunks, with hand-written backward passes for its serial parts."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


class UnitLowerInverse(Function):
    """(I + A)^-1 for strictly lower triangular A [..., C, C]."""

    @staticmethod
    def forward(ctx: Any, lower: Tensor) -> Tensor:
        identity = torch.eye(lower.shape[-1], dtype=lower.dtype).expand_as(lower)
        inverse = torch.linalg.solve_triangular(lower, identity, upper=False, unitriangular=True)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        transposed = ctx.saved_tensors[0].mT
        return -(transposed @ grad @ transposed).tril(-1)


class ChunkScan(Function):
    """The only serial part: carry the state S [M, dk, dv] from chunk to chunk.

    V_i = U_i - W_i S_i and S_{i+1} = a_i S_i + K_i^T V_i, over the first dimension: U [n, M, C, dv], W and K
    [n, M, C, dk], a [n, M]. Returns S_i before each chunk [n, M, dk, dv], and V [n, M, C, dv]. S_0 = 0.
    """

    @staticmethod
    def forward(ctx: Any, u: Tensor, w: Tensor, k: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        num_chunks, width, _, dv = u.shape
        states = u.new_zeros(num_chunks, width, k.shape[-1], dv)
        values = torch.empty_like(u)
        # unbind once: indexing tensors inside the loop is slower by a third
        scales = a[..., None, None].unbind(0)
        parts = list(
            zip(u.unbind(0), w.unbind(0), k.mT.unbind(0), states.unbind(0), values.unbind(0), strict=True)
        )
        for index, (u_i, w_i, kt_i, state, value) in enumerate(parts):
            torch.baddbmm(u_i, w_i, state, alpha=-1, out=value)
            if index + 1 < num_chunks:
                torch.baddbmm(state * scales[index], kt_i, value, out=parts[index + 1][3])
        ctx.save_for_backward(w, k, a, states, values)
        return states, values

    @staticmethod
    def backward(ctx: Any, grad_states: Tensor, grad_values: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        w, k, a, states, values = ctx.saved_tensors
        carried = torch.zeros_like(states)  # the gradient of the state that each chunk leaves behind
        grad_u = torch.empty_like(values)
        scales = a[..., None, None].unbind(0)
        parts = list(
            zip(
                w.mT.unbind(0),
                k.unbind(0),
                grad_states.unbind(0),
                grad_values.unbind(0),
                carried.unbind(0),
                grad_u.unbind(0),
                strict=True,
            )
        )
        for index in range(len(parts) - 1, -1, -1):
            wt_i, k_i, grad_state, grad_value, carry, grad_u_i = parts[index]
            torch.baddbmm(grad_value, k_i, carry, out=grad_u_i)
            if index:
                torch.baddbmm(
                    torch.addcmul(grad_state, carry, scales[index]),
                    wt_i,
                    grad_u_i,
                    alpha=-1,
                    out=parts[index - 1][4],
                )
        grad_w = -(grad_u @ states.mT)
        grad_k = values @ carried.mT
        grad_a = (states * carried).sum(dim=(-2, -1))
        return grad_u, grad_w, grad_k, grad_a


def chunk_inputs(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, chunk: int
) -> tuple[Tensor, ...]:
    """Everything that chunks compute apart from each other.

    q, k [B, T, H, dk] (normalised, q scaled), v [B, T, H, dv], log_decay and beta [B, T, H]; T is a multiple of `chunk`.
    Returns per chunk, chunks first: the triangular system [n, B*H, C, C], its right sides beta*v and beta*k*decay,
    q*decay, k*(decay to the chunk's end), the whole chunk's decay [n, B*H] and the causal scores [n, B*H, C, C].
    """
    batch, length, heads, _ = q.shape
    num_chunks = length // chunk

    def split(x: Tensor) -> Tensor:
        return x.view(batch, num_chunks, chunk, heads, -1).permute(1, 0, 3, 2, 4).flatten(1, 2)

    q, k, v, beta = split(q), split(k), split(v), split(beta)
    total = split(log_decay).squeeze(-1).cumsum(-1)  # [n, B*H, C]
    causal = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()
    gap = (total[..., :, None] - total[..., None, :]).masked_fill(~causal, float("-inf"))
    decay = gap.exp()
    system = ((beta * k) @ k.mT * decay).tril(-1)
    scores = q @ k.mT * decay
    grown = total.exp()[..., None]
    left = (total[..., -1:] - total).exp()[..., None]
    return system, beta * v, beta * k * grown, q * grown, k * left, total[..., -1].exp(), scores


def chunk_outputs(batch: int, parts: tuple[Tensor, ...]) -> Tensor:
    """Solve, scan and read: from chunk_inputs' result to the operator's output [B, T, H, dv]."""
    system, right_v, right_k, q_grown, k_left, chunk_decay, scores = parts
    inverse = UnitLowerInverse.apply(system)
    states, values = ChunkScan.apply(inverse @ right_v, inverse @ right_k, k_left, chunk_decay)
    out = q_grown @ states + scores @ values  # [n, B*H, C, dv]
    num_chunks, width, chunk, dv = out.shape
    out = out.view(num_chunks, batch, width // batch, chunk, dv).permute(1, 0, 3, 2, 4)
    return out.reshape(batch, num_chunks * chunk, width // batch, dv)


def gated_delta_step(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """One token. state [B, H, dk, dv], q, k [B, H, dk], v [B, H, dv], log_decay, beta [B, H]: (output, new state)."""
    state = state * log_decay.exp()[..., None, None]
    error = (v - torch.einsum("bhkv,bhk->bhv", state, k)) * beta[..., None]
    state = state + k[..., None] * error[..., None, :]
    return torch.einsum("bhkv,bhk->bhv", state, q), state
