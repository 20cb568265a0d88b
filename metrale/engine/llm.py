"""LLM: the public way in."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, field
from numbers import Integral
from threading import RLock
from typing import Any

from tqdm import tqdm

from metrale.config import EngineConfig, SpeculativeConfig
from metrale.core import Sequence
from metrale.engine.engine import DrafterFactory, Engine
from metrale.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput, StreamChunk
from metrale.errors import RequestError
from metrale.sampling.params import SamplingParams
from metrale.scheduler.scheduler import Event
from metrale.telemetry.statistics import SpeculationStats

Prompt = str | Seq[int]


@dataclass
class _Box:
    """Events of one open request that nobody has read yet; `num_running` samples whose end nobody has read."""

    num_running: int
    events: deque[Event] = field(default_factory=deque)


class LLM:
    """A model that generates text.

    Args:
        model: "tiny" (the embedded checkpoint), a local directory, or a Hub repository id.
        speculative_config: how to draft, e.g. {"method": "mtp", "num_speculative_tokens": 3}; None is plain decode. The
            output is the same bits either way.
        drafter: makes a drafter of your own in place of the method's, as `metrale.engine.engine.Engine` says.
        options: the other fields of `metrale.config.EngineConfig`.

    Raises ConfigError, which names the field and the fix. Threads may share an LLM: their requests run side by side.
    A process that forks should leave torch at one thread, or make the LLM after the fork.
    """

    def __init__(
        self,
        model: str = "tiny",
        *,
        speculative_config: Mapping[str, Any] | SpeculativeConfig | None = None,
        drafter: DrafterFactory | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(speculative_config, SpeculativeConfig):
            speculative_config = SpeculativeConfig.from_mapping(speculative_config)
        config = EngineConfig.from_options(model=model, speculative_config=speculative_config, **options)
        self.engine = Engine(config, drafter)
        self._boxes: dict[int, _Box] = {}
        # reentrant: an iterator that is collected in the middle of a step aborts its request from there
        self._lock = RLock()

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete the prompts, in order.

        Args:
            prompts: a string, a list of token ids, or a list of either.
            params: for all prompts, or one for each; None is the checkpoint's defaults.
            use_tqdm: show progress on standard error.

        Raises RequestError, before any work, for a prompt or parameter that cannot be served, and names its position.
        """
        requests = self._requests(prompts, params)
        with self._open([(token_ids, each) for _, token_ids, each in requests]) as ids:
            finished = self._finish_all(ids, use_tqdm)
        return [
            _output(request_id, prompt, finished[request_id])
            for request_id, (prompt, _, _) in zip(ids, requests, strict=True)
        ]

    def _finish_all(self, ids: list[int], use_tqdm: bool) -> dict[int, list[Sequence]]:
        """Run until every sample of the requests has ended; the sequences by request."""
        finished: dict[int, list[Sequence]] = {}
        with tqdm(total=len(ids), disable=not use_tqdm, desc="Generated", unit="request") as bar:
            for request_id in ids:
                done = finished.setdefault(request_id, [])
                for event in self._events(request_id):
                    if event.finish_reason is not None:
                        done.append(event.sequence)
                bar.update()
        return finished

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[StreamChunk]:
        """Complete one prompt and yield what is new after each step.

        Raises RequestError before any work. Leaving the iterator early aborts the request; with several samples (n > 1)
        `index` tells them apart.
        """
        if not _is_prompt(prompt):
            raise RequestError(f"a prompt must be text or a list of token ids, got {type(prompt).__name__}")
        [(_, token_ids, request_params)] = self._requests([prompt], params)
        return self._stream(token_ids, request_params)

    def _stream(self, token_ids: list[int], params: SamplingParams) -> Iterator[StreamChunk]:
        with self._open([(token_ids, params)]) as [request_id]:
            for event in self._events(request_id):
                has_ended = event.finish_reason is not None
                yield StreamChunk(
                    event.new_text,
                    event.token_ids,
                    event.finish_reason,
                    event.sequence.stop_reason if has_ended else None,
                    event.sequence.sample,
                    event.sequence.error if has_ended else None,
                    None if params.logprobs is None else event.logprobs,
                )

    @contextmanager
    def _open(self, requests: Seq[tuple[list[int], SamplingParams]]) -> Iterator[list[int]]:
        """Queue checked requests, each with a box for its events; whatever has not ended at the exit is aborted."""
        ids: list[int] = []
        try:
            for token_ids, params in requests:
                with self._lock:
                    ids.append(self.engine.add_request(token_ids, params))
                    self._boxes[ids[-1]] = _Box(params.n)
            yield ids
        finally:
            for request_id in ids:
                with self._lock:
                    box = self._boxes.pop(request_id, None)
                    if box is None or box.num_running:
                        self.engine.abort(request_id)

    def _events(self, request_id: int) -> Iterator[Event]:
        """A request's events until its last sample ends. Steps serve all open requests: what they emit goes to their boxes."""
        box = self._boxes[request_id]
        while box.num_running:
            while not box.events:
                with self._lock:
                    self._advance(box, request_id)
            event = box.events.popleft()
            box.num_running -= event.finish_reason is not None
            yield event

    def _advance(self, box: _Box, request_id: int) -> None:
        """A step, unless another thread's brought what this one waits for, and its events to their boxes."""
        if not self.engine.outbox and not box.events:
            if not self.engine.has_work:
                raise RuntimeError(
                    f"request {request_id} is lost: nothing is left to do and it has not ended"
                )
            self.engine.advance()
        self._deliver()

    def _deliver(self) -> None:
        """Events from the engine to their boxes; an interrupt loses none, for it falls after a call, and none is between."""
        outbox = self.engine.outbox
        while outbox:
            event = outbox[0]
            home = self._boxes.get(event.sequence.request_id)
            if home is None:
                del outbox[0]
                continue
            append = home.events.append
            del outbox[0]
            append(event)

    def stats(self) -> dict[str, Any]:
        """Counters of speculation over all requests so far, in the names of `SpeculationStats`."""
        return self.engine.scheduler.stats.as_dict()

    def default_params(self) -> SamplingParams:
        """What a request without parameters gets: the checkpoint's generation_config.json. RequestError where that asks
        for something that is not supported."""
        defaults = self.engine.defaults
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        given = {name: getattr(defaults, name) for name in names}
        try:
            return SamplingParams(**{name: value for name, value in given.items() if value is not None})
        except RequestError as error:
            raise RequestError(
                f"the checkpoint's generation_config.json: {error}; give SamplingParams"
            ) from error

    def _requests(
        self, prompts: Prompt | Seq[Prompt], params: SamplingParams | Seq[SamplingParams] | None
    ) -> list[tuple[str | None, list[int], SamplingParams]]:
        """(text, token ids, parameters) of each request, all checked."""
        many = _as_list(prompts)
        if params is None:
            params = self.default_params()
        if not isinstance(params, SamplingParams) and (
            not isinstance(params, Seq) or isinstance(params, str)
        ):
            raise RequestError(
                f"params must be SamplingParams, or a list of them, one for each prompt, got {type(params).__name__}"
            )
        each = [params] * len(many) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(many):
            raise RequestError(
                f"{len(each)} SamplingParams for {len(many)} prompts; give one, or one for each"
            )
        requests = []
        for position, (prompt, request_params) in enumerate(zip(many, each, strict=True)):
            try:
                if not isinstance(request_params, SamplingParams):
                    raise RequestError(f"params must be SamplingParams, got {type(request_params).__name__}")
                token_ids = self._token_ids(prompt)
                self.engine.check(token_ids, request_params)
            except RequestError as error:
                raise RequestError(f"prompt {position}: {error}") from error
            requests.append((prompt if isinstance(prompt, str) else None, token_ids, request_params))
        return requests

    def _token_ids(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            if self.engine.tokenizer is None:
                raise RequestError("this engine has no tokenizer; give token ids")
            return self.engine.tokenizer.encode(prompt)
        if not _is_prompt(prompt):
            raise RequestError(f"a prompt must be text or a list of token ids, got {type(prompt).__name__}")
        return [int(item) if _is_id(item) else item for item in prompt]


def _is_prompt(prompt: Any) -> bool:
    return isinstance(prompt, Seq) and not isinstance(prompt, bytes | bytearray | memoryview)


def _is_id(item: Any) -> bool:
    return isinstance(item, Integral) and not isinstance(item, bool)


def _as_list(prompts: Any) -> list[Any]:
    """One prompt, as text or as ids, becomes a list of one."""
    if isinstance(prompts, str):
        return [prompts]
    if not _is_prompt(prompts):
        raise RequestError(
            f"prompts must be text, token ids or a list of either, got {type(prompts).__name__}"
        )
    return [prompts] if prompts and all(map(_is_id, prompts)) else list(prompts)


def _output(request_id: int, prompt: str | None, sequences: list[Sequence]) -> RequestOutput:
    ordered = sorted(sequences, key=lambda sequence: sequence.sample)
    total = SpeculationStats.sum(sequence.stats for sequence in ordered)
    first = ordered[0]
    return RequestOutput(
        request_id=request_id,
        prompt=prompt,
        prompt_token_ids=tuple(first.token_ids[: first.prompt_len]),
        outputs=tuple(_completion(sequence) for sequence in ordered),
        metrics=RequestMetrics(total.as_dict()),
    )


def _completion(sequence: Sequence) -> CompletionOutput:
    return CompletionOutput(
        index=sequence.sample,
        text="".join(sequence.shown),
        token_ids=tuple(sequence.token_ids[sequence.prompt_len :]),
        logprobs=None if sequence.params.logprobs is None else tuple(sequence.logprobs),
        finish_reason=sequence.finish_reason,
        stop_reason=sequence.stop_reason,
        error=sequence.error,
    )
