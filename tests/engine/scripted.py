"""A target whose next token is a rule of all tokens before it, the engine around it, and drafters that know the rule."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from metrale import reference
from metrale.config import EngineConfig, SpeculativeConfig
from metrale.core import Sequence
from metrale.drafters.scripted import Script, ScriptedDrafter
from metrale.engine import engine as engine_module
from metrale.engine.engine import DrafterFactory, Engine
from metrale.kernels.groups import Groups
from metrale.kernels.ops import Ops
from metrale.model.batch import Batch
from metrale.model.config import ModelConfig
from metrale.model.loader import LoadedModel
from metrale.sampling.params import SamplingParams
from metrale.scheduler.scheduler import Event
from metrale.state.pool import Pool

VOCAB_SIZE = 50
EOS = 1
SECOND_EOS = 3
Rule = Callable[[tuple[int, ...]], int | None]
"""Tokens at positions 0 .. p -> the token at p + 1; None: the row's logits are NaN."""


def hashed(history: tuple[int, ...]) -> int:
    """A lively rule that no mistaken history agrees with for long; never an EOS."""
    return 4 + zlib.crc32(bytes(history)) % (VOCAB_SIZE - 4)


def digest(history: tuple[int, ...]) -> int:
    """24 bits, which float32 holds."""
    return zlib.crc32(bytes(history)) % (1 << 24)


def scripted(outputs: Mapping[tuple[int, ...], Seq[int | None]]) -> Rule:
    """By prompt: what the target says. Past a script's end, and for other histories, the lively rule."""

    def rule(history: tuple[int, ...]) -> int | None:
        for prompt, said in outputs.items():
            at = len(history) - len(prompt)
            if (
                0 <= at < len(said)
                and history[: len(prompt)] == prompt
                and history[len(prompt) :] == tuple(said[:at])
            ):
                return said[at]
        return hashed(history)

    return rule


class Target:
    """Keeps tokens where a model keeps keys: what a row sees it reads back through its group's pages.

    Like the real thing it reads nothing that was not written (a NaN there is an error), and a prompt chunk moves the slot's
    state in place. `batches` holds what was run.
    """

    def __init__(
        self, rule: Rule = hashed, *, vocab_size: int = VOCAB_SIZE, eos: tuple[int, ...] = (EOS,)
    ) -> None:
        self.rule = rule
        self.ops: Ops = reference.ops()
        self.config = ModelConfig(
            family="qwen3_5",
            is_multimodal=False,
            vocab_size=vocab_size,
            hidden_size=2,
            intermediate_size=2,
            layer_types=("linear_attention", "full_attention"),
            num_attention_heads=1,
            num_key_value_heads=1,
            head_dim=2,
            rotary_dim=2,
            rope_theta=10000.0,
            linear_num_key_heads=1,
            linear_num_value_heads=1,
            linear_key_head_dim=2,
            linear_value_head_dim=2,
            linear_conv_kernel_dim=3,
            rms_norm_eps=1e-6,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            moe_layers=(False, False),
            num_experts=0,
            num_experts_per_tok=0,
            moe_intermediate_size=0,
            shared_expert_intermediate_size=0,
            norm_topk_prob=True,
            num_mtp_layers=None,
            eos_token_ids=eos,
        )
        self.batches: list[Batch] = []
        spread = torch.randn(vocab_size, vocab_size, generator=torch.Generator().manual_seed(0))
        highest = spread.amax(dim=1)
        spread[range(vocab_size), range(vocab_size)] = highest + 1.0
        self._logits = spread

    def forward(self, batch: Batch, pool: Pool) -> Tensor:
        """Hidden rows [T, 2]: the next token of each row, and a digest of the tokens up to it."""
        self.batches.append(batch)
        pool.k_cache[0].flatten(0, 1)[batch.kv_index, 0, 0] = batch.token_ids.to(pool.k_cache[0].dtype)
        hidden: list[tuple[float, float]] = []
        for groups in (batch.generated, batch.prompt):
            for n, group in enumerate(groups.host):
                assert pool.num_committed[group.slot] == group.start
                if groups is batch.prompt:
                    self._advance(pool, group.slot, group.start, group.num_rows)
                tokens = read(pool.k_cache[0], groups, n, group.start + group.num_rows)
                for end in range(group.start + 1, group.start + group.num_rows + 1):
                    token = self.rule(tokens[:end])
                    hidden.append((torch.nan if token is None else token, digest(tokens[:end])))
        return torch.tensor(hidden).reshape(-1, 2)

    def logits(self, hidden: Tensor) -> Tensor:
        """[M, V]: the row's token is the likeliest by 1, the others are spread; NaN where the rule says None."""
        is_nan = hidden[:, 0].isnan()
        rows = self._logits[hidden[:, 0].nan_to_num().long()]
        return rows.masked_fill(is_nan[:, None], torch.nan)

    def _advance(self, pool: Pool, slot: int, start: int, num_rows: int) -> None:
        folded = pool.num_folded[0][slot]
        if start and int(folded[0, 0]) != start:
            raise ValueError("the slot's state stands elsewhere")
        folded.fill_(start + num_rows)


def read(cache: Tensor, groups: Groups, n: int, num_positions: int) -> tuple[int, ...]:
    """Tokens at positions 0 .. num_positions - 1 of group `n`, through its page table."""
    at = torch.arange(num_positions)
    page_size = cache.shape[1]
    rows = groups.page_table[n][at // page_size].long() * page_size + at % page_size
    tokens = cache.flatten(0, 1)[rows, 0, 0].tolist()
    assert all(token == token for token in tokens), "a position was read that nobody wrote"
    return tuple(map(int, tokens))


def make_engine(
    target: Target,
    *,
    depth: int | None = None,
    drafter: DrafterFactory | None = None,
    method: str = "ngram",
    head: Any = None,
    directory: Path = Path("/nowhere"),
    poisoned: bool = True,
    **options: Any,
) -> Engine:
    """An engine around a target; `depth` None is plain decode. Pools start as NaN."""
    spec = (
        None
        if depth is None
        else SpeculativeConfig(method, num_speculative_tokens=depth, prompt_lookup_min=1)
    )
    options = {"max_model_len": 256, "max_num_seqs": 4, "skip_tokenizer_init": True} | options
    config = EngineConfig("scripted", spec, backend="torch", **options)
    loaded = LoadedModel(target, head, has_mtp_tensors=head is not None)  # type: ignore[arg-type]
    with (
        mock.patch.object(engine_module, "resolve", return_value=directory),
        mock.patch.object(engine_module, "load_model", return_value=loaded),
    ):
        engine = Engine(config, drafter)
    if poisoned:
        for layer in (*engine.pool.k_cache, *engine.pool.v_cache):
            layer.fill_(torch.nan)
    return engine


def truth(target: Target, sequence: Sequence) -> list[int]:
    """What a greedy request will emit, up to its most tokens."""
    history = list(sequence.token_ids[: sequence.prompt_len])
    for _ in range(sequence.max_tokens):
        token = target.rule(tuple(history))
        if token is None:
            break
        history.append(token)
    return history[sequence.prompt_len :]


def drafting(
    target: Target, script: Script, answers: Callable[[Sequence], Seq[int]] | None = None
) -> DrafterFactory:
    """A drafter that proposes by script; by default its answers are those of a greedy request."""
    known: dict[tuple[int, ...], list[int]] = {}

    def greedy_answers(sequence: Sequence) -> list[int]:
        name = (sequence.max_tokens, *sequence.token_ids[: sequence.prompt_len])
        if name not in known:
            known[name] = truth(target, sequence)
        return known[name]

    return lambda loaded, pool, num_valid: ScriptedDrafter(answers or greedy_answers, script, num_valid)


def always_right(sequence: Sequence, limit: int) -> tuple[int, int]:
    return limit, limit


def always_wrong(sequence: Sequence, limit: int) -> tuple[int, int]:
    return limit, 0


def cycle(*steps: tuple[int, int]) -> Script:
    """Each sequence goes round (drafts, of which right), one a step."""
    taken: dict[Any, int] = {}

    def script(sequence: Sequence, limit: int) -> tuple[int, int]:
        number = taken[sequence.key] = taken.get(sequence.key, -1) + 1
        return steps[number % len(steps)]

    return script


def greedy(**options: Any) -> SamplingParams:
    return SamplingParams(temperature=0, **options)


def run(
    engine: Engine,
    requests: Seq[tuple[Seq[int], SamplingParams]],
    *,
    each_step: Callable[[list[Event]], None] = lambda events: None,
    may_fail: bool = False,
) -> list[Sequence]:
    """All requests at once, to their ends; their sequences in order (one sample each)."""
    ids = [engine.add_request(list(prompt), params) for prompt, params in requests]
    return finish(engine, ids, each_step=each_step, may_fail=may_fail)


def finish(
    engine: Engine,
    ids: Seq[int],
    *,
    each_step: Callable[[list[Event]], None] = lambda events: None,
    may_fail: bool = False,
) -> list[Sequence]:
    """Step until nothing is left to do; the sequences of these requests in order.

    The engine gets over a step that raises: unless a test means it to, that is where an assertion of ours would vanish.
    """
    ended: dict[int, Sequence] = {}
    for _ in range(1000):
        if not engine.has_work:
            break
        events = engine.step()
        for event in events:
            if event.finish_reason is not None:
                ended[event.sequence.request_id] = event.sequence
        each_step(events)
    assert not engine.has_work, "no progress"
    assert may_fail or not engine._warned, engine._warned
    assert engine.pool.slots.num_free == engine.pool.num_slots
    return [ended[i] for i in ids]


def emitted(sequence: Sequence) -> list[int]:
    return sequence.token_ids[sequence.prompt_len :]


# Requests of every kind: one token, a few, several prompt chunks

PROMPTS = [(5,), (6, 7, 8), tuple(range(4, 44)) * 2, (9, 9), tuple(range(40, 4, -1)) * 4]


def requests_of(max_tokens: int = 14) -> list[tuple[tuple[int, ...], SamplingParams]]:
    return [(prompt, greedy(max_tokens=max_tokens)) for prompt in PROMPTS]


def plain() -> list[list[int]]:
    return [emitted(s) for s in run(make_engine(Target(), max_num_seqs=8), requests_of())]
