"""Random requests and random schedules, and what a run of them leaves behind: outputs and committed state."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metrale.config import EngineConfig, SpeculativeConfig
from metrale.core import Sequence
from metrale.drafters.scripted import ScriptedDrafter
from metrale.engine.engine import DrafterFactory, Engine
from metrale.kernels.ops import Ops
from metrale.sampling.params import SamplingParams

PROMPT_LENGTHS = (1, 2, 3, 4, 5, 17, 63, 64, 65, 100, 127, 128, 129, 150)
STATE_TENSORS = ("ssm", "ring_k", "ring_u", "ring_g", "ring_x", "k_cache", "v_cache")


class Request(NamedTuple):
    prompt_ids: tuple[int, ...]
    params: SamplingParams


class Result(NamedTuple):
    """All that the identity covers; two runs are equal when these are."""

    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[Any, ...]
    finish_reason: str | None
    stop_reason: int | str | None
    state: Mapping[str, Tensor]


@dataclass(frozen=True)
class Schedule:
    """One way to run a list of requests."""

    method: str | None  # "scripted", "ngram", "mtp" or None
    num_speculative_tokens: int = 0
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 2048
    fold_threshold: int = 0
    arrivals: tuple[int, ...] = ()  # step at which each request arrives; () is all at once
    fault_every: int = 0  # an operator raises after about this many calls; 0: never
    seed: int = 0


@dataclass
class Fault:
    """Raises once in a while in the middle of a forward, at any operator of any layer."""

    every: int
    rng: random.Random
    left: int = field(init=False)
    count: int = 0

    def __post_init__(self) -> None:
        self.left = self.rng.randrange(1, 2 * self.every)

    def wrap(self, operator: Callable[..., Any]) -> Callable[..., Any]:
        def faulty(*args: Any, **kwargs: Any) -> Any:
            self.left -= 1
            if self.left <= 0:
                self.left = self.rng.randrange(self.every, 3 * self.every)
                self.count += 1
                raise RuntimeError("injected fault")
            return operator(*args, **kwargs)

        return faulty


def random_request(rng: random.Random, vocab_size: int, greedy: bool | None = None) -> Request:
    """A request at the edges: unit lengths, one-token outputs, stops that may or may not be met."""
    prompt = tuple(rng.randrange(1, vocab_size) for _ in range(rng.choice(PROMPT_LENGTHS)))
    is_greedy = rng.random() < 0.5 if greedy is None else greedy
    sampled: dict[str, Any] = {
        "temperature": rng.choice((0.3, 0.8, 1.0, 1.7)),
        "seed": rng.randrange(1 << 40),
    }
    sampled |= rng.choice(
        ({}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 20, "top_p": 0.9, "min_p": 0.02})
    )
    return Request(
        prompt,
        SamplingParams(
            **({"temperature": 0.0} if is_greedy else sampled),
            max_tokens=rng.choice((1, 2, 3, 7, 20, 33)),
            ignore_eos=rng.random() < 0.7,
            stop_token_ids=[rng.randrange(vocab_size) for _ in range(rng.choice((0, 0, 2)))],
            logprobs=rng.choice((None, 0, 3)),
        ),
    )


def random_schedule(rng: random.Random, num_requests: int, methods: tuple[str | None, ...]) -> Schedule:
    return Schedule(
        method=rng.choice(methods),
        num_speculative_tokens=rng.choice((0, 1, 2, 3, 5, 16)),
        max_num_seqs=rng.choice((1, 2, 3, 8)),
        max_num_batched_tokens=rng.choice((1, 2, 7, 64, 100, 2048)),
        fold_threshold=rng.choice((0, 8, 40)),
        arrivals=tuple(rng.randrange(12) for _ in range(num_requests)),
        fault_every=rng.choice((0, 0, 150)),
        seed=rng.randrange(1 << 30),
    )


def solo(
    model: Path, backend: str, dtype: str, requests: list[Request], method: str | None = None
) -> list[Result]:
    """The simplest configuration there is: each request alone, no drafts, everything folded at once."""
    results = []
    for request in requests:
        results += run(model, backend, dtype, [request], Schedule(method, 0, max_num_seqs=1))
    return results


def run(
    model: Path,
    backend: str,
    dtype: str,
    requests: list[Request],
    schedule: Schedule,
    answers: list[Result] | None = None,
) -> list[Result]:
    """The requests' results under a schedule; `answers` is what a scripted drafter drafts from."""
    rng = random.Random(schedule.seed)
    drafter = _scripted(requests, answers, rng) if schedule.method == "scripted" else None
    engine = Engine(_config(model, backend, dtype, schedule), drafter)
    poison(engine, rng)
    if schedule.fault_every:
        engine.model.ops = _faulty(engine.model.ops, Fault(schedule.fault_every, rng))
    return _drive(engine, requests, schedule)


def _drive(engine: Engine, requests: list[Request], schedule: Schedule) -> list[Result]:
    arrivals = schedule.arrivals or (0,) * len(requests)
    order = sorted(range(len(requests)), key=lambda i: arrivals[i])
    states: dict[int, Mapping[str, Tensor]] = {}
    finish = engine.scheduler.finish

    def finish_and_keep(sequence: Sequence, reason: str, stop_reason: int | str | None = None) -> None:
        states[sequence.request_id] = committed_state(engine, sequence)
        finish(sequence, reason, stop_reason)

    engine.scheduler.finish = finish_and_keep  # type: ignore[method-assign]
    ids: dict[int, int] = {}
    sequences: dict[int, Sequence] = {}
    num_steps = 0
    while order or engine.has_work:
        while order and (arrivals[order[0]] <= num_steps or not engine.has_work):
            i = order.pop(0)
            ids[engine.add_request(requests[i].prompt_ids, requests[i].params)] = i
        for event in engine.step():
            if event.finish_reason is not None:
                sequences[ids[event.sequence.request_id]] = event.sequence
        num_steps += 1
        assert num_steps < 20_000, "no progress"
    assert engine.pool.slots.num_free == engine.pool.num_slots
    return [_result(sequences[i], states[sequences[i].request_id]) for i in range(len(requests))]


def committed_state(engine: Engine, sequence: Sequence) -> Mapping[str, Tensor]:
    """Everything of a sequence's state that later rows could see, cloned."""
    pool, slot, n = engine.pool, sequence.slot, sequence.num_committed
    assert pool.num_committed[slot] == n
    ops = engine.model.ops
    if isinstance(ops, _FaultyOps):
        ops = ops.sound
    pool.fold(slot, ops)
    history = torch.arange(max(0, n - pool.shape.conv_width + 1), n) % pool.ring_x[0].shape[1]
    at = torch.arange(n)
    rows = torch.tensor(sequence.pages)[at // pool.page_size] * pool.page_size + at % pool.page_size
    num_trunk = engine.model.config.num_attention_layers
    return {
        "ssm": torch.stack([layer[slot] for layer in pool.ssm]),
        "conv": torch.stack([layer[slot, history] for layer in pool.ring_x]),
        "keys": torch.stack([layer.flatten(0, 1)[rows] for layer in pool.k_cache[:num_trunk]]),
        "values": torch.stack([layer.flatten(0, 1)[rows] for layer in pool.v_cache[:num_trunk]]),
        **_drafter_state(engine, sequence, rows, num_trunk),
    }


def _drafter_state(engine: Engine, sequence: Sequence, rows: Tensor, num_trunk: int) -> Mapping[str, Tensor]:
    """The head's cache rows, up to the last row whose next token the drafter was told of."""
    root = getattr(engine.drafter and engine.drafter.inner, "_roots", {}).get(sequence.key)
    if root is None:
        return {}
    known = rows[: root.position + 1]
    return {
        "head keys": engine.pool.k_cache[num_trunk].flatten(0, 1)[known],
        "head values": engine.pool.v_cache[num_trunk].flatten(0, 1)[known],
    }


def poison(engine: Engine, rng: random.Random) -> None:
    """Fill every pool with NaN, again at each release, and hand pages out in random order."""
    pool = engine.pool
    rng.shuffle(pool.pages._free)
    for name in STATE_TENSORS:
        for tensor in getattr(pool, name):
            tensor.fill_(float("nan"))
    release = pool.release

    def release_and_poison(slot: int, pages: list[int]) -> None:
        for name in STATE_TENSORS:
            for tensor in getattr(pool, name):
                tensor[pages if name.endswith("cache") else slot] = float("nan")
        release(slot, pages)

    pool.release = release_and_poison  # type: ignore[method-assign]


def assert_same(expected: list[Result], got: list[Result], *, with_head: bool = False) -> None:
    """Equal in every bit; the head's cache as far as both runs wrote it."""
    for i, (a, b) in enumerate(zip(expected, got, strict=True)):
        assert a[:5] == b[:5], f"request {i}: {a[:5]} became {b[:5]}"
        for name in ("ssm", "conv", "keys", "values"):
            assert torch.equal(a.state[name], b.state[name]), f"request {i}: {name} differs"
            assert not a.state[name].isnan().any(), f"request {i}: {name} holds NaN"
        if with_head and "head keys" in a.state and "head keys" in b.state:
            for name in ("head keys", "head values"):
                both = min(len(a.state[name]), len(b.state[name]))
                assert both and torch.equal(a.state[name][:both], b.state[name][:both]), (
                    f"request {i}: {name} differs"
                )


class _FaultyOps(Ops):
    sound: Ops


def _faulty(ops: Ops, fault: Fault) -> Ops:
    wrapped = {f.name: getattr(ops, f.name) for f in fields(Ops)}
    faulty = _FaultyOps(**{k: fault.wrap(v) if callable(v) else v for k, v in wrapped.items()})
    object.__setattr__(faulty, "sound", replace(ops))
    return faulty


def _scripted(requests: list[Request], answers: list[Result] | None, rng: random.Random) -> DrafterFactory:
    """Drafts any number of tokens of which any number are what the target will say."""
    assert answers is not None
    known = {_name(r.prompt_ids, r.params): a.token_ids for r, a in zip(requests, answers, strict=True)}

    def answer(sequence: Sequence) -> tuple[int, ...]:
        return known[_name(sequence.token_ids[: sequence.prompt_len], sequence.params)]

    def script(sequence: Sequence, limit: int) -> tuple[int, int]:
        num_drafts = rng.randint(0, limit)
        return num_drafts, rng.choice((0, num_drafts, rng.randint(0, num_drafts)))

    return lambda loaded, pool, num_valid: ScriptedDrafter(answer, script, num_valid)


def _name(prompt_ids: Any, params: SamplingParams) -> str:
    return f"{tuple(prompt_ids)} {params}"


def _config(model: Path, backend: str, dtype: str, schedule: Schedule) -> EngineConfig:
    spec = None
    if schedule.method is not None:
        method = "ngram" if schedule.method == "scripted" else schedule.method
        spec = SpeculativeConfig(
            method, num_speculative_tokens=schedule.num_speculative_tokens, prompt_lookup_min=1
        )
    return EngineConfig(
        str(model),
        spec,
        backend=backend,
        dtype=dtype,
        max_model_len=256,
        max_num_seqs=schedule.max_num_seqs,
        max_num_batched_tokens=schedule.max_num_batched_tokens,
        skip_tokenizer_init=not (model / "tokenizer.json").is_file(),
        fold_threshold=schedule.fold_threshold,
    )


def _result(sequence: Sequence, state: Mapping[str, Tensor]) -> Result:
    return Result(
        tuple(sequence.token_ids[sequence.prompt_len :]),
        "".join(sequence.shown),
        tuple(sequence.logprobs),
        sequence.finish_reason,
        sequence.stop_reason,
        state,
    )
