"""Reference of `linear`: a matrix product whose rows do not see one another."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from metrale.kernels.groups import check_generated
from metrale.reference.norms import rms_norm
from metrale.reference.numeric import silu

GENERATED_TILE = 4
PROMPT_TILE = 64
ALIGNMENT_BYTES = 64


def linear(
    x: Tensor,
    weight: Tensor,
    num_generated: int,
    residual: Tensor | None = None,
    silu_mul: bool = False,
    norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """y = norm(x) W^T, plus an optional epilogue.

    | tensor | shape | dtype | dir | meaning |
    | --- | --- | --- | --- | --- |
    | x | [T, K] | activation | in | rows, generated rows first; the row stride may exceed K |
    | weight | [N, K] | activation | in | with `silu_mul` [2 I, K]: gate rows, then up rows |
    | residual | [T, N] | activation | in | added to the rounded product |
    | norm | [K] or [G, K / G] | float32 | in | RMSNorm scales, one norm for each of a row's G parts, with `eps` |
    | result | [T, N] or [T, I] | activation | out | |

    The first `num_generated` rows run in tiles of GENERATED_TILE rows, the others in tiles of PROMPT_TILE, zero-padded:
    a library GEMM picks its algorithm by the row count, so one fixed height a class is what keeps a row's bits its own.

    Requires: `x.shape[1] == weight.shape[1]`; no residual with `silu_mul`.
    """
    if x.shape[1] != weight.shape[1]:
        raise ValueError(f"linear: x has {x.shape[1]} columns, weight expects {weight.shape[1]}")
    check_generated("linear", num_generated, x.shape[0])
    if silu_mul and (residual is not None or weight.shape[0] % 2):
        raise ValueError(
            f"linear: silu_mul: expected an even number of outputs and no residual, got {weight.shape[0]}"
        )
    if norm is not None:
        x = rms_norm(x.unflatten(-1, norm.shape), norm, eps).reshape(x.shape)
    bounds = [(t, min(t + GENERATED_TILE, num_generated)) for t in range(0, num_generated, GENERATED_TILE)]
    tiles = [_product(x[first:last], weight, GENERATED_TILE) for first, last in bounds]
    for first in range(num_generated, x.shape[0], PROMPT_TILE):
        tiles.append(_product(x[first : first + PROMPT_TILE], weight, PROMPT_TILE))
    y = torch.cat(tiles) if tiles else x.new_empty(0, weight.shape[0])
    if silu_mul:
        gate, up = y.float().chunk(2, dim=-1)
        y = (silu(gate) * up).to(x.dtype)
    return y if residual is None else residual + y


def _product(rows: Tensor, weight: Tensor, height: int) -> Tensor:
    """One tile: the rows, zero-padded to `height` in aligned memory (BLAS may choose its path by alignment)."""
    num_rows = rows.shape[0]
    if num_rows < height or not rows.is_contiguous() or rows.data_ptr() % ALIGNMENT_BYTES:
        tile = rows.new_zeros(height, rows.shape[1])
        tile[:num_rows] = rows
    else:
        tile = rows
    return functional.linear(tile, weight)[:num_rows]
