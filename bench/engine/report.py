"""From timings to what a reader sees: rows, a table, a plot."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from bench.engine.cases import BASELINE, DRAFTERS, Key, Workload
from bench.engine.prefill import Prefill
from bench.harness import Timing


@dataclass(frozen=True)
class Row:
    """One method at one batch width, at its best setting. Ratios are None where the baseline was not run."""

    method: str
    num_drafts: int
    batch: int
    dtype: str
    num_threads: int
    tokens_per_second: float
    spread: float
    over_plain: float | None
    over_transformers: float | None
    mean_acceptance_length: float | None


@dataclass(frozen=True)
class Measured:
    """One timed case with its figures, every setting kept."""

    key: Key
    tokens_per_second: float
    spread: float


def measured(timings: Mapping[Key, Timing], workload: Workload) -> list[Measured]:
    return [
        Measured(key, workload.num_new_tokens(key.batch) / timing.median, timing.spread)
        for key, timing in timings.items()
    ]


def best_rows(cases: Sequence[Measured], acceptance: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """Each method at its fastest setting, against plain decode and transformers at theirs."""
    best: dict[tuple[int, str], Measured] = {}
    for m in cases:
        case = m.key.batch, m.key.method.label
        if case not in best or m.tokens_per_second > best[case].tokens_per_second:
            best[case] = m

    def over(m: Measured, other: str) -> float | None:
        reference = best.get((m.key.batch, other))
        return m.tokens_per_second / reference.tokens_per_second if reference else None

    return [
        Row(
            method=m.key.method.name,
            num_drafts=m.key.method.num_drafts,
            batch=batch,
            dtype=m.key.setting.dtype,
            num_threads=m.key.setting.num_threads,
            tokens_per_second=m.tokens_per_second,
            spread=m.spread,
            over_plain=over(m, "plain"),
            over_transformers=over(m, BASELINE),
            mean_acceptance_length=acceptance.get(label, {}).get("mean_acceptance_length"),
        )
        for (batch, label), m in best.items()
    ]


def table(rows: Sequence[Row], title: str) -> Table:
    out = Table(title=title, title_justify="left")
    out.add_column("batch", justify="right")
    out.add_column("method")
    out.add_column("best at")
    for name in ("tokens/s", "spread", "x plain", "x transformers", "acceptance length"):
        out.add_column(name, justify="right")

    def ratio(value: float | None) -> str:
        return "" if value is None else f"{value:.2f}"

    batch = rows[0].batch if rows else None
    for row in sorted(rows, key=lambda r: r.batch):
        if row.batch != batch:
            out.add_section()
            batch = row.batch
        out.add_row(
            str(row.batch),
            f"{row.method} {row.num_drafts}" if row.num_drafts else row.method,
            f"{row.dtype}, {row.num_threads} thread{'s' if row.num_threads > 1 else ''}",
            f"{row.tokens_per_second:.0f}",
            f"{row.spread:.0%}",
            ratio(row.over_plain),
            ratio(row.over_transformers),
            ratio(row.mean_acceptance_length),
        )
    return out


def as_json(
    rows: Sequence[Row],
    cases: Sequence[Measured],
    acceptance: Mapping[str, Mapping[str, Any]],
    prefill: Sequence[Prefill],
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    return {
        **settings,
        "best": [asdict(row) for row in rows],
        "all": [
            {**asdict(m.key), "tokens_per_second": m.tokens_per_second, "spread": m.spread} for m in cases
        ],
        "acceptance": acceptance,
        "prefill": [asdict(p) for p in prefill],
    }


def plot(rows: Sequence[Row], acceptance: Mapping[str, Mapping[str, Any]], path: Path) -> bool:
    """Tokens/s over drafts, a panel for each batch width; then the share of rounds that kept each position.

    Returns False, and draws nothing, where matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        return False
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    batches = sorted({row.batch for row in rows})
    figure, axes = plt.subplots(
        1, len(batches) + 1, figsize=(5 * (len(batches) + 1), 4), layout="constrained"
    )
    for axis, batch in zip(axes, batches, strict=False):
        here = [row for row in rows if row.batch == batch]
        plain = [(0, row.tokens_per_second) for row in here if row.method == "plain"]
        for name in DRAFTERS:
            points = plain + [(row.num_drafts, row.tokens_per_second) for row in here if row.method == name]
            axis.plot(*zip(*sorted(points), strict=True), marker="o", label=name)
        for row in here:
            if row.method == BASELINE:
                axis.axhline(row.tokens_per_second, color="grey", linestyle="--", label=BASELINE)
        axis.set(title=f"batch {batch}", xlabel="drafts", ylabel="tokens/s", ylim=(0, None))
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.legend()
    axis = axes[-1]
    for name in DRAFTERS:
        deepest = [label for label in acceptance if label.startswith(f"{name} ")]
        if deepest:
            rates = acceptance[max(deepest, key=lambda label: int(label.split()[1]))][
                "acceptance_by_position"
            ]
            axis.plot(range(1, len(rates) + 1), rates, marker="o", label=name)
    axis.set(title="accepted, of rounds that drafted", xlabel="draft position", ylim=(0, 1))
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return True
