"""The engine: requests in, events out, one step at a time."""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import ExitStack, contextmanager

import torch

from metrale.config import DEFAULT_KV_CACHE_BYTES, EngineConfig
from metrale.core import Sequence, SequenceKey, StepPlan
from metrale.drafters.base import Drafter
from metrale.drafters.guard import GuardedDrafter
from metrale.drafters.mtp import MtpDrafter
from metrale.drafters.ngram_drafter import NgramDrafter
from metrale.engine.backends import backend_ops
from metrale.engine.stop_text import StopText
from metrale.engine.tokenizer import Tokenizer
from metrale.errors import ConfigError, RequestError
from metrale.kernels.ops import Ops
from metrale.model.generation import GenerationDefaults
from metrale.model.loader import LoadedModel, load_model, resolve
from metrale.sampling.params import SamplingParams
from metrale.sampling.pipeline import pick
from metrale.scheduler.scheduler import Event, Scheduler, SchedulerConfig
from metrale.scheduler.step import Step
from metrale.state.pool import PAGE_SIZE, Pool
from metrale.telemetry.statistics import SpeculationStats

logger = logging.getLogger(__name__)

MAX_SAMPLES = 1 << 16

DrafterFactory = Callable[[LoadedModel, Pool, int], Drafter | None]


class Engine:
    """Owns the model, the pool and the scheduler. What it emits waits in `outbox` for whoever called `advance`.

    Args:
        config: what to load and how to run it.
        drafter: makes the drafter from (model, pool, number of valid ids) instead of `config.speculative_config`'s method,
            whose depth still holds (without one the drafter follows and is never asked); for tests and synthetic
            benchmarks.

    Raises ConfigError when the checkpoint or the configuration cannot be used.
    """

    def __init__(self, config: EngineConfig, drafter: DrafterFactory | None = None) -> None:
        self.config = config
        spec = config.speculative_config
        directory = resolve(config.model)
        ops = backend_ops(config.backend, config.device)
        dtype = ops.activation_dtypes[0] if config.dtype == "auto" else getattr(torch, config.dtype)
        with_mtp = spec is not None and spec.method == "mtp"
        with torch.inference_mode(False):  # tensors that may be written outside of it too
            loaded = load_model(directory, ops, dtype=dtype, with_mtp=with_mtp, device=ops.device_type)
        self.model = loaded.model
        self.tokenizer = None if config.skip_tokenizer_init else Tokenizer.from_directory(directory)
        self.defaults = GenerationDefaults.from_directory(directory, loaded.model.config)
        self.vocab_size = loaded.model.config.vocab_size
        self.num_valid = min(self.vocab_size, self.tokenizer.num_ids) if self.tokenizer else self.vocab_size
        with torch.inference_mode(False):
            self.pool, self.max_model_len = _make_pool(config, loaded, ops, dtype)
        made = (drafter or _make_drafter(config))(loaded, self.pool, self.num_valid)
        self.drafter = None if made is None else GuardedDrafter(made)
        self.scheduler = Scheduler(
            SchedulerConfig(
                config.max_num_batched_tokens,
                spec.num_speculative_tokens if spec else 0,
                spec.max_num_seqs_speculative if spec else 0,
            ),
            self.pool,
            self.drafter,
        )
        self._step = Step(
            self.model,
            self.pool,
            self.drafter,
            lambda logits, rows: pick(logits, rows, ops, self.num_valid),
            self.num_valid,
        )
        self._num_requests = 0
        self.outbox: deque[Event] = deque()
        self._applying: list[SequenceKey] = []  # committed, and perhaps not told yet
        self._aborts: list[int] = []
        self._is_stepping = False
        self._is_cut_off = False
        self._warned: set[str] = set()

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self._is_cut_off or bool(self._aborts)

    def add_request(self, prompt_ids: Seq[int], params: SamplingParams) -> int:
        """Queue a request and return its id. Raises RequestError, and queues nothing, for a prompt or parameter that
        cannot be served."""
        self.check(prompt_ids, params)
        request_id = self._num_requests
        self._num_requests += 1
        room = self.max_model_len - len(prompt_ids)
        seed = _drawn_seed(self.config.seed, request_id) if params.seed is None else params.seed
        for sample in range(params.n):
            sequence = Sequence(
                key=SequenceKey(request_id * MAX_SAMPLES + sample, 0),
                request_id=request_id,
                sample=sample,
                prompt_len=len(prompt_ids),
                token_ids=list(prompt_ids),
                params=params,
                seed=seed,
                max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
                stats=SpeculationStats(),
                eos_token_ids=frozenset() if params.ignore_eos else frozenset(self.defaults.eos_token_ids),
                stop_token_ids=frozenset(params.stop_token_ids or ()),
            )
            if self.tokenizer is not None:
                decoder = self.tokenizer.detokenizer(params.skip_special_tokens)
                sequence.text = StopText(decoder, params.stop_strings)
            self.scheduler.add(sequence)
        return request_id

    def check(self, prompt_ids: Seq[int], params: SamplingParams) -> None:
        """Raise RequestError, in one sentence, for what can never be served."""
        if not prompt_ids:
            raise RequestError("the prompt is empty; give at least one token")
        for token_id in prompt_ids:
            if not isinstance(token_id, int) or isinstance(token_id, bool):
                raise RequestError(f"token ids must be integers, got {token_id!r}")
            if not 0 <= token_id < self.num_valid:
                raise RequestError(f"token id {token_id!r} is outside the vocabulary of {self.num_valid} ids")
        if len(prompt_ids) >= self.max_model_len:
            raise RequestError(
                f"the prompt has {len(prompt_ids)} tokens, which leaves no room in max_model_len {self.max_model_len}"
            )
        if params.n > MAX_SAMPLES:
            raise RequestError(f"n must be at most {MAX_SAMPLES}, got {params.n}")
        if params.stop_strings and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer; give stop_token_ids instead")
        for token_id in params.stop_token_ids or ():
            if token_id >= self.num_valid:
                raise RequestError(
                    f"stop_token_ids: {token_id} is outside the vocabulary of {self.num_valid} ids"
                )

    def abort(self, request_id: int) -> None:
        """End every sample of a request with "abort"; the others go on. In the middle of a step, which a collected
        iterator or a signal handler may well call it from, it waits for the step's end."""
        self._aborts.append(request_id)
        if not self._is_stepping:
            self._settle()

    def step(self) -> list[Event]:
        """`advance`, and take what it emitted."""
        self.advance()
        events = list(self.outbox)
        self.outbox.clear()
        return events

    def advance(self) -> None:
        """Admit, plan, run, commit, and put events into `outbox`. Afterwards each scheduled sequence stands on committed
        rows only.

        A step that raises is run again without drafts, then sequence by sequence, so that a fault ends the
        requests that cause it, with finish reason "error", and no others. What an interrupt cut off is put right before
        the next step.
        """
        self._settle()
        self._is_stepping, self._is_cut_off = True, True
        try:
            with torch.inference_mode(), _without_autocast():
                self._serve()
        finally:
            self._is_stepping = False
        self._is_cut_off = False
        self._settle()

    def _settle(self) -> None:
        """What may only happen between two steps."""
        if self._is_cut_off:
            self._repair("an interrupt stopped this request in mid-step")
            self._is_cut_off = False
        while self._aborts:
            self._is_cut_off = True
            for event in self.scheduler.abort(self._aborts[0]):
                self._tell(event)
            del self._aborts[0]
            self._is_cut_off = False

    def _serve(self) -> None:
        self.scheduler.admit()
        plan = self.scheduler.plan()
        if not plan.groups:
            return
        try:
            self._attempt(plan)
        except Exception as error:
            self._warn_once("a step failed and is run again without drafts", error)
            self._recover({group.key: group.start + group.num_known for group in plan.groups})

    def _attempt(self, plan: StepPlan, *, drafting: bool = True) -> None:
        prepared = self._step.prepare(plan, self.scheduler.running, drafting=drafting)
        try:
            outcome = self._step.run(prepared)
        except BaseException:
            # A chunk advances its state in place: where it stopped is not known.
            self.scheduler.restart_prompts(group.key for group in plan.prompt)
            raise
        self._applying = [verdict.key for verdict in outcome.verdicts]
        try:
            self._step.commit(outcome)
            for event in self.scheduler.apply(outcome.verdicts):
                self._tell(event)
                self._applying.remove(event.sequence.key)
        except Exception as error:
            self._repair(f"{type(error).__name__}: {error}")
            raise
        self._applying = []

    def _tell(self, event: Event) -> None:
        """No interrupt falls between the two: the interpreter looks for one after a call."""
        append = self.outbox.append
        if event.finish_reason is not None:
            del self.scheduler.live[event.sequence.key]
        append(event)

    def _repair(self, error: str) -> None:
        for event in self.scheduler.repair(self._applying, error):
            self._tell(event)
        self._applying = []

    def _recover(self, goals: Mapping[SequenceKey, int]) -> None:
        """Run sequences without drafts until each has passed the position where it stood; on a fault, each alone.

        A prompt that starts over comes back to its goal in here, or it could fail there for ever.
        """
        try:
            while behind := self._behind(goals):
                self._attempt(self.scheduler.plan(only=behind, drafting=False), drafting=False)
        except Exception as error:
            behind = self._behind(goals)
            if len(behind) == 1:
                self._tell(self.scheduler.fail(behind[0], f"{type(error).__name__}: {error}"))
                return
            for key in behind:
                self._recover({key: goals[key]})

    def _behind(self, goals: Mapping[SequenceKey, int]) -> list[SequenceKey]:
        running = self.scheduler.running
        return [key for key, goal in goals.items() if key in running and running[key].num_committed < goal]

    def _warn_once(self, what: str, error: Exception) -> None:
        message = f"{what}: {type(error).__name__}: {error}"
        if message not in self._warned:
            self._warned.add(message)
            logger.warning(message, exc_info=error)


@contextmanager
def _without_autocast() -> Iterator[None]:
    """A caller's autocast would change dtypes in the middle of an operator."""
    with ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def _drawn_seed(engine_seed: int, ordinal: int) -> int:
    """64-bit seed of an unseeded request, from the engine's seed and the request's ordinal."""
    digest = hashlib.blake2b(f"{engine_seed}:{ordinal}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _make_drafter(config: EngineConfig) -> DrafterFactory:
    spec = config.speculative_config

    def make(loaded: LoadedModel, pool: Pool, num_valid: int) -> Drafter | None:
        if spec is None:
            return None
        if spec.method == "ngram":
            return NgramDrafter(spec.prompt_lookup_min, spec.prompt_lookup_max)
        assert loaded.head is not None
        return MtpDrafter(loaded.head, pool, num_valid)

    return make


def _make_pool(config: EngineConfig, loaded: LoadedModel, ops: Ops, dtype: torch.dtype) -> tuple[Pool, int]:
    """The pool and the longest sequence it can hold."""
    model = loaded.model.config
    has_head = loaded.head is not None
    most = model.max_position_embeddings
    wanted = most if config.max_model_len is None else config.max_model_len
    if wanted > most:
        raise ConfigError(f"max_model_len {wanted} is above the checkpoint's max_position_embeddings {most}")
    # Counted with the head where the checkpoint has one, in use or not: the longest sequence is part of the output.
    page_bytes = PAGE_SIZE * model.kv_bytes_per_token(
        itemsize=dtype.itemsize, with_mtp=loaded.has_mtp_tensors
    )
    pages_per_sequence = -(-wanted // PAGE_SIZE)
    num_pages = config.max_num_seqs * pages_per_sequence
    if page_bytes:
        num_pages = (config.kv_cache_memory_bytes or DEFAULT_KV_CACHE_BYTES) // page_bytes
    if num_pages < pages_per_sequence:
        if config.max_model_len is not None or num_pages < 1:
            raise ConfigError(
                f"a sequence of max_model_len {wanted} needs {pages_per_sequence * page_bytes} bytes of keys and values, "
                f"kv_cache_memory_bytes allows {num_pages * page_bytes}; raise it or lower max_model_len"
            )
        pages_per_sequence, wanted = num_pages, num_pages * PAGE_SIZE
    try:
        pool = Pool(
            model.state_shape(with_mtp=has_head),
            num_slots=config.max_num_seqs,
            num_pages=min(num_pages, config.max_num_seqs * pages_per_sequence),
            max_pages_per_slot=pages_per_sequence,
            max_rows=config.max_rows,
            dtype=dtype,
            device=torch.device(ops.device_type),
            fold_threshold=config.fold_threshold,
            num_tiles=ops.num_tiles(model.linear_key_head_dim, model.linear_value_head_dim),
        )
    except (RuntimeError, MemoryError) as error:
        raise ConfigError(
            f"no memory for the state of max_num_seqs {config.max_num_seqs} sequences at fold_threshold "
            f"{config.fold_threshold}; lower them (metrale info says what a sequence costs)"
        ) from error
    return pool, wanted
