"""A prompt in 64-row chunks against the same rows fed one by one: what the chunked form is worth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from bench.engine.cases import Engines, Method, Setting
from bench.harness import Case, GateError, interleave
from metrale.model.build import RowSpec, build_batch

TOLERANCES = {"float32": 1e-4, "bfloat16": 5e-2}
"""Most relative difference between the two forms, by activation dtype."""


@dataclass(frozen=True)
class Prefill:
    """Tokens/s of one prompt at one setting, both ways."""

    dtype: str
    num_threads: int
    num_tokens: int
    chunked: float
    row_by_row: float

    @property
    def ratio(self) -> float:
        return self.chunked / self.row_by_row


def time_prefill(
    engines: Engines, prompt: Sequence[int], settings: Sequence[Setting], rounds: int, console: Console
) -> list[Prefill]:
    """Times the model alone: no pick, no text. The two forms owe each other no bits: their last hidden rows must be close.

    Raises GateError where they are not.
    """
    for setting in settings:
        _check(setting, *(_run(engines, prompt, setting, is_chunked=form)() for form in (True, False)))
    cases = [
        Case(f"prompt {name}, {setting.label}", _run(engines, prompt, setting, is_chunked=name == "chunked"))
        for setting in settings
        for name in ("chunked", "row by row")
    ]
    timings = interleave(cases, rounds, console)
    rates = [len(prompt) / timing.median for timing in timings]
    return [
        Prefill(setting.dtype, setting.num_threads, len(prompt), chunked, row_by_row)
        for setting, chunked, row_by_row in zip(settings, rates[::2], rates[1::2], strict=True)
    ]


def _check(setting: Setting, chunked: Tensor, row_by_row: Tensor) -> None:
    error = float((chunked - row_by_row).norm() / row_by_row.norm())
    if not error <= TOLERANCES[setting.dtype]:
        raise GateError(
            f"{setting.label}: chunks and single rows differ by {error:.1e}: no figure is reported"
        )


def _run(
    engines: Engines, prompt: Sequence[int], setting: Setting, *, is_chunked: bool
) -> Callable[[], Tensor]:
    """Work that returns the hidden row of the prompt's last token."""

    def run() -> Tensor:
        torch.set_num_threads(setting.num_threads)
        engine = engines.get(Method("plain"), setting).engine
        model, pool = engine.model, engine.pool
        slot, pages = pool.acquire(len(prompt))
        try:
            if is_chunked:
                batch = build_batch((), [RowSpec(slot, 0, prompt, pages)], (), pool)
                return model.forward(batch, pool)[-1].float()
            for position, token_id in enumerate(prompt):
                batch = build_batch([RowSpec(slot, position, (token_id,), pages)], (), (), pool)
                hidden = model.forward(batch, pool)
                pool.commit(slot, 1)
            return hidden[-1].float()
        finally:
            pool.release(slot, pages)

    return run


def table(found: Sequence[Prefill]) -> Table:
    out = Table(title="prompt rows, tokens/s", title_justify="left")
    out.add_column("setting")
    for name in ("tokens", "chunked", "row by row", "ratio"):
        out.add_column(name, justify="right")
    for p in found:
        out.add_row(
            Setting(p.dtype, p.num_threads).label,
            str(p.num_tokens),
            f"{p.chunked:.0f}",
            f"{p.row_by_row:.0f}",
            f"{p.ratio:.1f}",
        )
    return out
