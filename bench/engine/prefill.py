"""A prompt in 64-row chunks against the same rows fed one by one: what the chunked form is worth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table

from bench.engine.cases import Engines, Method, Setting
from bench.harness import Case, interleave
from metrale.model.build import RowSpec, build_batch


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
    """Times the model alone: no pick, no text. The two forms owe each other no bits, so there is no gate."""
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


def _run(engines: Engines, prompt: Sequence[int], setting: Setting, is_chunked: bool) -> Callable[[], None]:
    def run() -> None:
        torch.set_num_threads(setting.num_threads)
        engine = engines.get(Method("plain"), setting).engine
        model, pool = engine.model, engine.pool
        slot, pages = pool.acquire(len(prompt))
        try:
            if is_chunked:
                model.forward(build_batch((), [RowSpec(slot, 0, prompt, pages)], (), pool), pool)
                return
            for position, token_id in enumerate(prompt):
                model.forward(build_batch([RowSpec(slot, position, (token_id,), pages)], (), (), pool), pool)
                pool.commit(slot, 1)
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
