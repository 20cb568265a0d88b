"""Reference of `moe`: top-k routed experts and a shared expert."""

from __future__ import annotations

import torch
from torch import Tensor

from metrale.reference.linear import linear
from metrale.reference.numeric import sigmoid


def moe(
    x: Tensor,
    router: Tensor,
    gate_up: Tensor,
    down: Tensor,
    shared_gate_up: Tensor,
    shared_down: Tensor,
    shared_gate: Tensor,
    top_k: int,
    norm_topk: bool,
    num_generated: int,
    residual: Tensor | None = None,
) -> Tensor:
    """Sparse mixture of experts.

    | tensor | shape | dtype | dir | meaning |
    | --- | --- | --- | --- | --- |
    | x | [T, D] | activation | in | rows, generated rows first |
    | router | [E, D] | activation | in | |
    | gate_up | [E, 2 I, D] | activation | in | gate rows, then up rows |
    | down | [E, D, I] | activation | in | |
    | shared_gate_up, shared_down | [2 Is, D], [D, Is] | activation | in | the expert that every row takes |
    | shared_gate | [1, D] | activation | in | its sigmoid gate |
    | residual | [T, D] | activation | in | added last |
    | result | [T, D] | activation | out | |

    Router probabilities are a float32 softmax over all experts; the `top_k` largest are taken (the lowest id on a tie) and
    renormalised when `norm_topk`. Contributions are added in expert order, in float32, the shared expert last.
    """
    probabilities = torch.softmax(linear(x, router, num_generated).float(), dim=-1)
    chosen, experts = (t[:, :top_k] for t in probabilities.sort(dim=-1, descending=True, stable=True))
    if norm_topk:
        chosen = chosen / chosen.sum(-1, keepdim=True)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in experts.unique().tolist():  # ascending
        rows, column = (experts == expert).nonzero(as_tuple=True)
        generated = int((rows < num_generated).sum())
        hidden = linear(x[rows], gate_up[expert], generated, silu_mul=True)
        y = linear(hidden, down[expert], generated)
        out[rows] += y.float() * chosen[rows, column][:, None]
    gate = sigmoid(linear(x, shared_gate, num_generated).float())
    shared = linear(linear(x, shared_gate_up, num_generated, silu_mul=True), shared_down, num_generated)
    y = (out + gate * shared.float()).to(x.dtype)
    return y if residual is None else residual + y
