"""References of `rotary_store`, `attention_verify` and `attention_prefill`: gated attention over paged keys and values."""

from __future__ import annotations

import torch
from torch import Tensor

from metrale.kernels.groups import Groups, HostGroup
from metrale.reference.norms import rms_norm
from metrale.reference.numeric import sigmoid

KEY_BLOCK = 64


def rotary_store(
    projected: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    kv_index: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    eps: float,
) -> Tensor:
    """Normalise and rotate queries and keys, store keys and values in their pages.

    | tensor | shape | dtype | dir | meaning |
    | --- | --- | --- | --- | --- |
    | projected | [T, 2 H dh + 2 Hkv dh] | activation | in | per head query then gate; all keys; all values |
    | q_norm, k_norm | [dh] | float32 | in | RMSNorm scales, 1 + w |
    | cos, sin | [positions, rot / 2] | float32 | in | rotary table; the first `rot` of dh dimensions turn |
    | positions | [T] | int64 | in | absolute position of each row |
    | kv_index | [T] | int64 | in | page * P + offset of each row |
    | k_cache, v_cache | [pages, P, Hkv, dh] | activation | inout | one layer's pages |
    | result | [T, H, dh] | activation | out | queries |

    Source: Su et al. 2021, RoFormer (the rotate-half form); Henry et al. 2020 for query-key normalisation.
    """
    num_kv_heads, dim = k_cache.shape[2], k_cache.shape[3]
    num_heads = projected.shape[1] // (2 * dim) - num_kv_heads
    if projected.shape[1] != 2 * dim * (num_heads + num_kv_heads):
        raise ValueError(
            f"rotary_store: projected has {projected.shape[1]} columns, not a multiple of {2 * dim}"
        )
    queries, keys, values = projected.split(
        [2 * num_heads * dim, num_kv_heads * dim, num_kv_heads * dim], dim=-1
    )
    q = rms_norm(queries.reshape(-1, num_heads, 2 * dim)[:, :, :dim], q_norm, eps)
    k = rms_norm(keys.reshape(-1, num_kv_heads, dim), k_norm, eps)
    at_cos, at_sin = cos[positions][:, None, :], sin[positions][:, None, :]
    k_cache.view(-1, num_kv_heads, dim)[kv_index] = _rotate(k, at_cos, at_sin)
    v_cache.view(-1, num_kv_heads, dim)[kv_index] = values.reshape(-1, num_kv_heads, dim)
    return _rotate(q, at_cos, at_sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    first, second, rest = x[..., :half].float(), x[..., half : 2 * half].float(), x[..., 2 * half :]
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
    return torch.cat([turned, rest], dim=-1)


def attention_verify(
    q: Tensor, projected: Tensor, k_cache: Tensor, v_cache: Tensor, groups: Groups
) -> Tensor:
    """Attention of generated rows over their sequence's pages, times the sigmoid of the gate.

    | tensor | shape | dtype | dir | meaning |
    | --- | --- | --- | --- | --- |
    | q | [T, H, dh] | activation | in | from `rotary_store` |
    | projected | [T, 2 H dh + 2 Hkv dh] | activation | in | its gates |
    | k_cache, v_cache | [pages, P, Hkv, dh] | activation | in | one layer's pages, this step's rows stored |
    | groups | | | in | row i of a group stands at start + i and sees positions 0 .. start + i |
    | result | [T, H dh] | activation | out | |

    Keys are walked in blocks of 64 from position 0 with an online softmax; scores are scaled by dh^-1/2.
    Source: Milakov and Gimelshein 2018, Online normalizer calculation for softmax.
    """
    return _attend(q, projected, k_cache, v_cache, groups, tile=1)


def attention_prefill(
    q: Tensor, projected: Tensor, k_cache: Tensor, v_cache: Tensor, groups: Groups
) -> Tensor:
    """`attention_verify` for prompt rows: the same contract, computed in tiles of 64 rows at absolute multiples of 64."""
    return _attend(q, projected, k_cache, v_cache, groups, tile=KEY_BLOCK)


def _attend(
    q: Tensor, projected: Tensor, k_cache: Tensor, v_cache: Tensor, groups: Groups, tile: int
) -> Tensor:
    num_heads, dim = q.shape[1], q.shape[2]
    out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    for n, group in enumerate(groups.host):
        keys, values = (_blocks(cache, groups.page_table[n], group) for cache in (k_cache, v_cache))
        for offset in range(0, group.num_rows, tile):
            rows = slice(group.first_row + offset, group.first_row + min(offset + tile, group.num_rows))
            out[rows] = _attend_tile(q[rows], keys, values, group.start + offset, tile)
    gate = projected[:, : 2 * num_heads * dim].reshape(-1, num_heads, 2 * dim)[:, :, dim:]
    return (out.to(q.dtype).float() * sigmoid(gate.float())).to(q.dtype).reshape(-1, num_heads * dim)


def _blocks(cache: Tensor, pages: Tensor, group: HostGroup) -> Tensor:
    """One sequence's cache rows up to its last new row, float32 [blocks, Hkv, 64, dh], zero past the end."""
    page_size, num_kv_heads, dim = cache.shape[1:]
    num_keys = group.start + group.num_rows
    at = torch.arange(num_keys, device=cache.device)
    rows = cache.view(-1, num_kv_heads, dim)[pages[at // page_size].long() * page_size + at % page_size]
    padded = rows.new_zeros(-(-num_keys // KEY_BLOCK) * KEY_BLOCK, num_kv_heads, dim, dtype=torch.float32)
    padded[:num_keys] = rows
    return padded.view(-1, KEY_BLOCK, num_kv_heads, dim).transpose(1, 2).contiguous()


def _attend_tile(q: Tensor, keys: Tensor, values: Tensor, position: int, tile: int) -> Tensor:
    """Rows at `position`, `position` + 1, ... (at most `tile`, padded to it) over key blocks; float32 [rows, H, dh]."""
    num_rows, num_heads, dim = q.shape
    num_kv_heads = keys.shape[1]
    ratio = num_heads // num_kv_heads
    padded = q.new_zeros(tile, num_heads, dim, dtype=torch.float32)
    padded[:num_rows] = q
    query = (
        padded.view(tile, num_kv_heads, ratio, dim)
        .permute(1, 2, 0, 3)
        .reshape(num_kv_heads, ratio * tile, dim)
    )
    # [ratio * tile, 1]
    last = torch.arange(position, position + tile, device=q.device).repeat(ratio)[:, None]
    highest = query.new_full((num_kv_heads, ratio * tile, 1), -torch.inf)
    total = torch.zeros_like(highest)
    acc = torch.zeros_like(query)
    for block in range((position + num_rows - 1) // KEY_BLOCK + 1):
        at = torch.arange(block * KEY_BLOCK, (block + 1) * KEY_BLOCK, device=q.device)
        scores = (query @ keys[block].transpose(1, 2)) * dim**-0.5
        scores = scores.masked_fill(at > last, -torch.inf)
        shared = values[block]
        if tile == 1 and position < (block + 1) * KEY_BLOCK:
            # a later row's NaN must not reach this one
            shared = shared.masked_fill((at > position)[:, None], 0.0)
        new_highest = torch.maximum(highest, scores.amax(-1, keepdim=True))
        old, weights = torch.exp(highest - new_highest), torch.exp(scores - new_highest)
        total = total * old + weights.sum(-1, keepdim=True)
        acc = acc * old + weights @ shared
        highest = new_highest
    result = (acc / total).view(num_kv_heads, ratio, tile, dim).permute(2, 0, 1, 3)
    return result.reshape(tile, num_heads, dim)[:num_rows]
