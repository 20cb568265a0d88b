"""The engine benchmark runs, reports, and refuses to report on a red gate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.engine import cases
from bench.engine.__main__ import main

SMALL = (
    "--drafts 2 --threads 1 --dtypes float32 --prompt-tokens 16 --new-tokens 6 --prefill-tokens 65 --rounds 1"
)


@pytest.fixture(autouse=True)
def without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.engine.__main__.is_available", lambda: False)


def test_it_reports_every_method(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([*SMALL.split(), "--out", str(tmp_path)])
    out = capsys.readouterr().out
    assert "transformers is not installed" in out
    found = json.loads((tmp_path / "engine.json").read_text(encoding="utf-8"))
    assert {(row["method"], row["num_drafts"], row["batch"]) for row in found["best"]} == {
        (method, drafts, batch)
        for method, drafts in (("plain", 0), ("ngram", 2), ("mtp", 2))
        for batch in (1, 8)
    }
    assert all(row["tokens_per_second"] > 0 for row in found["best"])
    assert len(found["acceptance"]["mtp 2"]["acceptance_by_position"]) == 2
    assert [p["num_tokens"] for p in found["prefill"]] == [65]


def test_a_wrong_token_leaves_no_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(cases.LLM):
        def generate(self, *arguments: Any, **options: Any) -> Any:
            outs = super().generate(*arguments, **options)
            if self.engine.config.speculative_config is not None:
                object.__setattr__(outs[0].outputs[0], "token_ids", (0,))
            return outs

    monkeypatch.setattr(cases, "LLM", Wrong)
    with pytest.raises(SystemExit, match="gives another output than plain"):
        main([*SMALL.split(), "--out", str(tmp_path)])
    assert list(tmp_path.iterdir()) == []
