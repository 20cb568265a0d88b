"""Inputs of the microbenchmarks: seeded, made on the device itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from metrale.kernels.groups import Groups

PAGE_SIZE = 16


class Random:
    """Seeded tensors on a device: the same at every run of the same order."""

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int = 0) -> None:
        self.device, self.dtype = device, dtype
        self._generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *size: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(size, generator=self._generator, device=self.device, dtype=dtype or self.dtype)

    def uniform(self, *size: int) -> Tensor:
        """float32 in [0, 1)."""
        return torch.rand(size, generator=self._generator, device=self.device)

    def units(self, *size: int) -> Tensor:
        """Vectors of length 1 along the last dimension."""
        return functional.normalize(self.normal(*size, dtype=torch.float32), dim=-1).to(self.dtype)

    def permutation(self, size: int) -> Tensor:
        return torch.randperm(size, generator=self._generator, device=self.device)


def groups_without_pages(triples: Sequence[tuple[int, int, int]], device: torch.device) -> Groups:
    return Groups.of(triples, torch.zeros(len(triples), 0, dtype=torch.int32, device=device))


@dataclass(frozen=True)
class GdnDims:
    """Heads and sizes of one Gated DeltaNet layer; the defaults are those of the 4 B to 80 B checkpoints."""

    key_heads: int = 16
    value_heads: int = 32
    key_dim: int = 128
    value_dim: int = 128
    conv_width: int = 4

    def __str__(self) -> str:
        return f"Hv {self.value_heads}, Hk {self.key_heads}, d {self.key_dim}"

    @property
    def num_channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def columns(self) -> int:
        return self.num_channels + self.value_heads * (self.value_dim + 2)

    @property
    def state_bytes(self) -> int:
        return 4 * self.value_heads * self.value_dim * self.key_dim


SMALL_GDN = GdnDims(2, 4, 32, 32)


def num_tiles(dims: GdnDims) -> int:
    """Parts of a head's state that fold on their own; one where there is no Triton to ask."""
    try:
        from metrale.kernels import gdn_verify
    except ImportError:
        return 1
    return gdn_verify.num_tiles(dims.key_dim, dims.value_dim)


@dataclass
class GdnInputs:
    """One layer's state of `num_sequences` sequences with `pending` rows each, and `new` projected rows."""

    dims: GdnDims
    num_sequences: int
    pending: int
    new: int
    random: Random
    start: int = 1024
    groups: Groups = field(init=False)

    def __post_init__(self) -> None:
        d, r, n = self.dims, self.random, self.num_sequences
        rows, ring = n * self.new, 2 * max(8, self.pending + self.new)
        self.num_rows = rows
        self.ring_k = r.units(n, ring, d.key_heads, d.key_dim)
        self.ring_u = 0.1 * r.normal(n, ring, d.value_heads, d.value_dim, dtype=torch.float32)
        self.ring_g = -0.5 * r.uniform(n, ring, d.value_heads)
        self.ring_x = r.normal(n, d.conv_width - 1 + 2 * self.new, d.num_channels)
        self.ssm = r.normal(n, d.value_heads, d.value_dim, d.key_dim, dtype=torch.float32).mul_(0.1)
        self.folded = self.start - self.pending
        self.num_folded = torch.full(
            (n, d.value_heads, num_tiles(d)), self.folded, dtype=torch.int32, device=r.device
        )
        self.projected = r.normal(rows, d.columns)
        self.conv = (
            r.normal(d.num_channels, d.conv_width, dtype=torch.float32),
            -r.uniform(d.value_heads),
            r.normal(d.value_heads, dtype=torch.float32),
        )
        self.q = (r.units(rows, d.key_heads, d.key_dim) * d.key_dim**-0.5).contiguous()
        self.v = r.normal(rows, d.value_heads, d.value_dim)
        self.beta = r.uniform(rows, d.value_heads)
        self.groups = groups_without_pages([(i, self.start, self.new) for i in range(n)], r.device)

    def unfold(self) -> None:
        """As if the last run had folded nothing."""
        self.num_folded.fill_(self.folded)

    def new_rows(self, ring: Tensor) -> Tensor:
        """The new rows of a ring, [N * new, ...]."""
        at = torch.arange(self.start, self.start + self.new, device=ring.device) % ring.shape[1]
        return ring[:, at].flatten(0, 1).contiguous()


@dataclass(frozen=True)
class AttentionDims:
    """Heads of one full-attention layer."""

    heads: int = 16
    kv_heads: int = 2
    dim: int = 256
    rotary_dim: int = 64

    def __str__(self) -> str:
        return f"{self.heads} q / {self.kv_heads} kv heads, d {self.dim}"

    @property
    def columns(self) -> int:
        return 2 * self.dim * (self.heads + self.kv_heads)


SMALL_ATTENTION = AttentionDims(4, 2, 32, 16)


class AttentionInputs:
    """Paged keys and values of sequences that are `context` positions long, their last `new` rows being those of the step.

    Pages are dealt out in a random order.
    """

    def __init__(
        self, dims: AttentionDims, num_sequences: int, context: int, new: int, random: Random
    ) -> None:
        r, n = random, num_sequences
        pages = -(-context // PAGE_SIZE)
        self.dims, self.new, self.start = dims, new, context - new
        self.page_table = r.permutation(n * pages).to(torch.int32).view(n, pages)
        self.k_cache = r.normal(n * pages, PAGE_SIZE, dims.kv_heads, dims.dim)
        self.v_cache = r.normal(n * pages, PAGE_SIZE, dims.kv_heads, dims.dim)
        self.projected = r.normal(n * new, dims.columns)
        self.q = r.normal(n * new, dims.heads, dims.dim)
        self.groups = Groups.of([(i, self.start, new) for i in range(n)], self.page_table)

    def only(self, i: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Groups]:
        """The operator's arguments for sequence `i` alone."""
        rows = slice(i * self.new, (i + 1) * self.new)
        groups = Groups.of([(0, self.start, self.new)], self.page_table[i : i + 1])
        return self.q[rows], self.projected[rows], self.k_cache, self.v_cache, groups
