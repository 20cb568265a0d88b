"""A driver for one sequence on a model, without an engine: shuffled pages, a slot that is not the first."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from metrale.model.build import RowSpec, build_batch
from metrale.model.decoder import HybridModel
from metrale.model.mtp import MtpHead
from metrale.state.pool import PAGE_SIZE, Pool


class Solo:
    """One sequence: `prefill` its prompt, then `verify` rows and `commit` as many as are kept.

    The pool starts full of NaN, its pages are handed out shuffled, and the sequence sits in slot 1 of 2.
    """

    def __init__(
        self,
        model: HybridModel,
        *,
        with_mtp: bool = False,
        max_rows: int = 8,
        fold_threshold: int = 4,
        num_positions: int = 256,
        seed: int = 0,
    ) -> None:
        num_pages = 2 * -(-num_positions // PAGE_SIZE)
        order = list(range(num_pages))
        random.Random(seed).shuffle(order)
        self.model = model
        self.pool = Pool(
            model.config.state_shape(with_mtp=with_mtp),
            num_slots=2,
            num_pages=num_pages,
            max_pages_per_slot=num_pages // 2,
            max_rows=max_rows,
            dtype=model.activation_dtype,
            device=model.device,
            fold_threshold=fold_threshold,
            page_order=order,
        )
        for name in ("ssm", "ring_k", "ring_u", "ring_g", "ring_x", "k_cache", "v_cache"):
            for tensor in getattr(self.pool, name):
                tensor.fill_(float("nan"))
        self.pool.acquire(PAGE_SIZE)
        self.slot, self.pages = self.pool.acquire(num_positions)
        self.length = 0

    def prefill(self, token_ids: Sequence[int], *, chunk: int | None = None) -> Tensor:
        """Commit prompt rows, `chunk` (a multiple of 64) a step or all at once; their hidden rows [T, D]."""
        step = len(token_ids) if chunk is None else chunk
        parts = []
        for first in range(0, len(token_ids), step):
            spec = RowSpec(self.slot, self.length, token_ids[first : first + step], self.pages)
            parts.append(self.model.forward(build_batch((), (spec,), None, self.pool), self.pool))
            self.commit(len(spec.token_ids))
        return torch.cat(parts)

    def verify(self, token_ids: Sequence[int]) -> Tensor:
        """Hidden rows [T, D] of generated rows at the end; nothing is committed."""
        spec = RowSpec(self.slot, self.length, token_ids, self.pages)
        return self.model.forward(build_batch((spec,), (), None, self.pool), self.pool)

    def commit(self, num_rows: int) -> None:
        self.pool.commit(self.slot, num_rows)
        self.length += num_rows

    def decode(self, token_id: int) -> Tensor:
        """The hidden row [1, D] of one committed generated row."""
        hidden = self.verify([token_id])
        self.commit(1)
        return hidden

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> tuple[list[int], Tensor]:
        """`num_tokens` greedy tokens after a prompt, and the logits [num_tokens, V] that they were taken from."""
        hidden = self.prefill(prompt)[-1:]
        token_ids: list[int] = []
        rows = []
        for _ in range(num_tokens):
            rows.append(self.model.logits(hidden))
            token_ids.append(int(rows[-1].argmax()))
            hidden = self.decode(token_ids[-1])
        return token_ids, torch.cat(rows)

    def head_rows(
        self, head: MtpHead, start: int, token_ids: Sequence[int], hidden: Tensor, *, prompt: bool
    ) -> Tensor:
        """The head's output [T, D] for rows at `start`: hidden row i is paired with `token_ids[i]`."""
        spec = RowSpec(self.slot, start, token_ids, self.pages)
        groups = ((), (spec,)) if prompt else ((spec,), ())
        batch = build_batch(*groups, None, self.pool)
        return head.forward(batch.token_ids, hidden, batch, self.pool)
