"""`moe` as a C kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from metrale.native.build import Kernel
from metrale.native.checks import describe, new_rows, refuse

_kernel = Kernel("moe", "q" * 18)


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
    | x | [T, D] | float32 | in | |
    | router | [E, D] | float32, bfloat16 | in | |
    | gate_up | [E, 2 I, D] | the same | in | gate rows, then up rows |
    | down | [E, D, I] | the same | in | |
    | shared_gate_up, shared_down | [2 Is, D], [D, Is] | the same | in | the expert that every row takes |
    | shared_gate | [1, D] | the same | in | its sigmoid gate |
    | residual | [T, D] | float32 | in | added last |
    | result | [T, D] | float32 | out | |

    Router probabilities are a softmax over all experts; the `top_k` largest are taken (the lowest id on a tie) and
    renormalised when `norm_topk`. Contributions are added in expert order, the shared expert last. Both row classes
    share one arithmetic, so `num_generated` changes nothing.

    Requires: contiguous tensors, weights of one dtype, 1 <= top_k <= E.
    """
    num_rows, dim = x.shape
    num_experts, _, inner = down.shape
    shared_inner = shared_down.shape[1]
    shapes = {
        "router": (router, (num_experts, dim)),
        "gate_up": (gate_up, (num_experts, 2 * inner, dim)),
        "down": (down, (num_experts, dim, inner)),
        "shared_gate_up": (shared_gate_up, (2 * shared_inner, dim)),
        "shared_down": (shared_down, (dim, shared_inner)),
        "shared_gate": (shared_gate, (1, dim)),
    }
    dtype = router.dtype
    if dtype not in (torch.float32, torch.bfloat16):
        raise refuse("moe", "router", "float32 or bfloat16", dtype)
    for name, (weight, shape) in shapes.items():
        if weight.shape != shape or weight.dtype is not dtype or not weight.is_contiguous():
            raise refuse("moe", name, f"contiguous {dtype} {shape}", describe(weight))
    for name, rows in (("x", x), ("residual", x if residual is None else residual)):
        if rows.shape != x.shape or rows.dtype is not torch.float32 or not rows.is_contiguous():
            raise refuse("moe", name, f"contiguous float32 {tuple(x.shape)}", describe(rows))
    if not 1 <= top_k <= num_experts:
        raise refuse("moe", "top_k", f"1 to {num_experts}", top_k)
    out = new_rows(num_rows, dim)
    arguments = _kernel.pack(
        x.data_ptr(),
        num_rows,
        num_experts,
        dim,
        inner,
        shared_inner,
        dtype is torch.bfloat16,
        router.data_ptr(),
        gate_up.data_ptr(),
        down.data_ptr(),
        shared_gate_up.data_ptr(),
        shared_down.data_ptr(),
        shared_gate.data_ptr(),
        top_k,
        norm_topk,
        torch.get_num_threads(),
        0 if residual is None else residual.data_ptr(),
        out.data_ptr(),
    )
    if status := _kernel.run(arguments):
        raise _kernel.fail(status)
    return out
