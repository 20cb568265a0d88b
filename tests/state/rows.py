"""One sequence driven over a pool with the reference operators and made-up projections, without a model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from metrale import reference
from metrale.kernels.groups import Groups
from metrale.model.build import RowSpec, build_batch
from metrale.state.pool import PAGE_SIZE, Pool, StateShape

OPS = reference.ops()
STATE_TENSORS = ("ssm", "ring_k", "ring_u", "ring_g", "ring_x", "k_cache", "v_cache")
NUM_POSITIONS = 160


def shape_of(conv_width: int = 4) -> StateShape:
    """Odd dimensions, three value heads over one key head, two recurrent layers and one of attention."""
    return StateShape(
        num_gdn_layers=2,
        num_attention_layers=1,
        num_key_heads=1,
        num_value_heads=3,
        key_dim=5,
        value_dim=7,
        conv_width=conv_width,
        num_kv_heads=1,
        head_dim=6,
    )


def make_pool(
    conv_width: int = 4,
    max_rows: int = 6,
    fold_threshold: int = 0,
    num_slots: int = 3,
    num_pages: int = 30,
    dtype: torch.dtype = torch.float32,
) -> Pool:
    """A pool full of NaN whose pages are handed out backwards."""
    pool = Pool(
        shape_of(conv_width),
        num_slots=num_slots,
        num_pages=num_pages,
        max_pages_per_slot=10,
        max_rows=max_rows,
        dtype=dtype,
        device=torch.device("cpu"),
        fold_threshold=fold_threshold,
        page_order=reversed(range(num_pages)),
    )
    for name in STATE_TENSORS:
        for tensor in getattr(pool, name):
            tensor.fill_(float("nan"))
    return pool


class Driver:
    """A sequence whose row at position p has the same inputs in every run, unless it is fed as a wrong draft."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.shape = pool.shape
        self.slot, self.pages = pool.acquire(NUM_POSITIONS)
        generator = torch.Generator().manual_seed(7)
        shape, layers = self.shape, self.shape.num_gdn_layers

        def randn(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator)

        self._weights = [
            (
                randn(shape.num_channels, shape.conv_width),
                -randn(shape.num_value_heads).exp(),
                randn(shape.num_value_heads),
            )
            for _ in range(layers)
        ]
        width = shape.num_channels + shape.num_value_heads * (shape.value_dim + 2)
        dtype = pool.ring_x[0].dtype
        # [wrong or right, layer, position, columns]
        self._projected = randn(2, layers, NUM_POSITIONS, width).to(dtype)
        self._attention = randn(2, NUM_POSITIONS, 2 * shape.head_dim * (2 + shape.num_kv_heads)).to(dtype)
        self._norms = (randn(shape.head_dim), randn(shape.head_dim))
        angles = torch.arange(NUM_POSITIONS)[:, None] * torch.tensor([1.0, 0.1])
        self._rotary = (angles.cos(), angles.sin())

    @property
    def length(self) -> int:
        return self.pool.num_committed[self.slot]

    def prompt(self, num_rows: int) -> list[Tensor]:
        """Outputs of the next prompt rows, all committed."""
        out = self._run([True] * num_rows, is_prompt=True)
        self.pool.commit(self.slot, num_rows)
        return out

    def verify(self, num_right: int, num_wrong: int = 0) -> list[Tensor]:
        """Outputs of each layer over the next generated rows; nothing is committed."""
        return self._run([True] * num_right + [False] * num_wrong, is_prompt=False)

    def decode(self, num_rows: int = 1) -> list[Tensor]:
        """One row a step, each committed; outputs of each layer."""
        parts = []
        for _ in range(num_rows):
            parts.append(self.verify(1))
            self.pool.commit(self.slot, 1)
        return [torch.cat(layer) for layer in zip(*parts, strict=True)] if parts else []

    def state(self) -> dict[str, Tensor]:
        """Everything that later rows could see, folded."""
        pool, n = self.pool, self.length
        pool.fold(self.slot, OPS)
        at = torch.arange(n)
        rows = torch.tensor(self.pages)[at // PAGE_SIZE] * PAGE_SIZE + at % PAGE_SIZE
        history = torch.arange(max(0, n - self.shape.conv_width + 1), n) % pool.ring_x[0].shape[1]
        return {
            "ssm": torch.stack([layer[self.slot] for layer in pool.ssm]),
            "conv": torch.stack([layer[self.slot, history] for layer in pool.ring_x]),
            "keys": pool.k_cache[0].flatten(0, 1)[rows],
            "values": pool.v_cache[0].flatten(0, 1)[rows],
        }

    def _run(self, is_right: Sequence[bool], *, is_prompt: bool) -> list[Tensor]:
        pool, start = self.pool, self.length
        variants = torch.tensor([int(right) for right in is_right], dtype=torch.int64)
        positions = torch.arange(start, start + len(is_right))
        spec = RowSpec(self.slot, start, [0] * len(is_right), self.pages)
        batch = build_batch(*(((), (spec,)) if is_prompt else ((spec,), ())), None, pool)
        groups = batch.prompt if is_prompt else batch.generated
        out = []
        for layer in range(self.shape.num_gdn_layers):
            projected = self._projected[variants, layer, positions]
            out.append(self._gdn(projected, layer, groups, is_prompt))
        projected = self._attention[variants, positions]
        caches = (pool.k_cache[0], pool.v_cache[0])
        q = OPS.rotary_store(projected, *self._norms, *self._rotary, positions, batch.kv_index, *caches, 1e-6)
        attend = OPS.attention_prefill if is_prompt else OPS.attention_verify
        return [*out, attend(q, projected, *caches, groups)]

    def _gdn(self, projected: Tensor, layer: int, groups: Groups, is_prompt: bool) -> Tensor:
        pool = self.pool
        rings = (pool.ring_x[layer], pool.ring_k[layer], pool.ring_g[layer])
        state = (pool.ssm[layer], pool.num_folded[layer])
        if is_prompt:
            q, k, v, g, beta = OPS.conv_prefill(projected, *self._weights[layer], *rings, groups)
            return OPS.gdn_chunk(q, k, v, g, beta, *state, groups)
        q, v, beta = OPS.conv_verify(projected, *self._weights[layer], *rings, groups)
        recurrence = (pool.ring_k[layer], pool.ring_u[layer], pool.ring_g[layer])
        return OPS.gdn_verify(q, v, beta, *recurrence, *state, groups, pool.fold_threshold)


def assert_equal(
    got: Sequence[Tensor] | dict[str, Tensor], expected: Sequence[Tensor] | dict[str, Tensor]
) -> None:
    """Bit for bit, and without NaN."""
    names = list(expected) if isinstance(expected, dict) else range(len(expected))
    assert len(got) == len(expected)
    for name in names:
        assert torch.equal(got[name], expected[name]), f"{name} differs"
        assert not expected[name].isnan().any(), f"{name} holds NaN"
