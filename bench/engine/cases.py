"""What the engine benchmark times: every method at every dtype, thread count and batch width."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.engine.baseline import Baseline
from bench.harness import Case
from metrale import LLM, SamplingParams
from metrale.engine.backends import backend_ops
from metrale.errors import ConfigError

BASELINE = "transformers"
DRAFTERS = ("ngram", "mtp")


@dataclass(frozen=True)
class Method:
    """Plain decode (no drafts), a drafter with its number of drafts, or the baseline."""

    name: str
    num_drafts: int = 0

    @property
    def label(self) -> str:
        return f"{self.name} {self.num_drafts}" if self.num_drafts else self.name

    @property
    def speculative_config(self) -> dict[str, Any] | None:
        if not self.num_drafts:
            return None
        return {"method": self.name, "num_speculative_tokens": self.num_drafts}


@dataclass(frozen=True)
class Setting:
    """What each side may choose freely: a method is shown at its own best of these."""

    dtype: str
    num_threads: int

    @property
    def label(self) -> str:
        return f"{self.dtype}, {self.num_threads} thread{'s' if self.num_threads > 1 else ''}"


@dataclass(frozen=True)
class Key:
    """Names one timed case."""

    method: Method
    setting: Setting
    batch: int

    @property
    def label(self) -> str:
        return f"{self.method.label}, {self.setting.label}, batch {self.batch}"


@dataclass(frozen=True)
class Workload:
    """Prompts of one length in token ids, and how many tokens to add to each.

    Batch 1 serves the first `num_solo` prompts one after the other; a wider batch serves its prompts at once.
    """

    prompts: tuple[tuple[int, ...], ...]
    num_tokens: int
    num_solo: int

    def batches(self, batch: int) -> list[list[list[int]]]:
        if batch == 1:
            return [[list(prompt)] for prompt in self.prompts[: self.num_solo]]
        return [[list(prompt) for prompt in self.prompts[:batch]]]

    def num_new_tokens(self, batch: int) -> int:
        return self.num_tokens * sum(len(prompts) for prompts in self.batches(batch))


def methods(num_drafts: Sequence[int]) -> list[Method]:
    """Plain decode, then every drafter at every depth."""
    return [Method("plain"), *(Method(name, k) for name in DRAFTERS for k in num_drafts)]


class Engines:
    """One LLM per method and setting, made at first use and kept, so that no run pays for a start."""

    def __init__(self, model: str, backend: str, max_num_seqs: int) -> None:
        self._model = model
        self._backend = backend
        self._max_num_seqs = max_num_seqs
        self._engines: dict[tuple[Method, Setting], LLM] = {}

    def dtypes(self, wanted: Sequence[str]) -> list[str]:
        """Those of the wanted activation dtypes that the backend computes in; ConfigError: none."""
        ops = backend_ops(self._backend)
        known = {str(dtype).removeprefix("torch.") for dtype in ops.activation_dtypes}
        if known.isdisjoint(wanted):
            raise ConfigError(f"the {ops.name} backend computes in {', '.join(sorted(known))}")
        return [dtype for dtype in wanted if dtype in known]

    def get(self, method: Method, setting: Setting) -> LLM:
        if (method, setting) not in self._engines:
            self._engines[method, setting] = LLM(
                model=self._model,
                backend=self._backend,
                dtype=setting.dtype,
                max_num_seqs=self._max_num_seqs,
                speculative_config=method.speculative_config,
            )
        return self._engines[method, setting]

    def stats(self) -> Iterator[tuple[Method, Setting, Mapping[str, Any]]]:
        """The counters of every engine so far."""
        for (method, setting), llm in self._engines.items():
            yield method, setting, llm.stats()


def own_cases(
    engines: Engines,
    workload: Workload,
    settings: Sequence[Setting],
    batches: Sequence[int],
    num_drafts: Sequence[int],
) -> dict[Key, Case]:
    """Our cases. All methods of one setting and batch pass one gate: drafts may not change one token."""
    params = SamplingParams(temperature=0, max_tokens=workload.num_tokens, ignore_eos=True)

    def run_of(key: Key) -> Callable[[], Any]:
        def run() -> list[tuple[Any, ...]]:
            torch.set_num_threads(key.setting.num_threads)
            llm = engines.get(key.method, key.setting)
            outs = [
                out.outputs[0]
                for prompts in workload.batches(key.batch)
                for out in llm.generate(prompts, params, use_tqdm=False)
            ]
            return [(tuple(o.token_ids), o.text, o.finish_reason, o.stop_reason) for o in outs]

        return run

    keys = [Key(m, s, b) for s in settings for b in batches for m in methods(num_drafts)]
    return {key: Case(key.label, run_of(key), gate=(key.setting, key.batch)) for key in keys}


def baseline_cases(
    directory: Path, workload: Workload, settings: Sequence[Setting], batches: Sequence[int]
) -> dict[Key, Case]:
    """transformers' cases: the same prompts, the same number of tokens, no promise of our bits."""
    models = {dtype: Baseline(directory, getattr(torch, dtype)) for dtype in {s.dtype for s in settings}}

    def run_of(key: Key) -> Callable[[], Any]:
        def run() -> list[list[int]]:
            torch.set_num_threads(key.setting.num_threads)
            model = models[key.setting.dtype]
            batches = workload.batches(key.batch)
            return [ids for prompts in batches for ids in model.generate(prompts, workload.num_tokens)]

        return run

    keys = [Key(Method(BASELINE), s, b) for s in settings for b in batches]
    return {key: Case(key.label, run_of(key)) for key in keys}
