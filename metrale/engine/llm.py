"""LLM: the public way in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from typing import Any

from tqdm import tqdm

from metrale.config import EngineConfig, SpeculativeConfig
from metrale.core import Sequence
from metrale.engine.engine import DrafterFactory, Engine
from metrale.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput, StreamChunk
from metrale.errors import RequestError
from metrale.sampling.params import SamplingParams
from metrale.telemetry.statistics import SpeculationStats

Prompt = str | Seq[int]


class LLM:
    """A model that generates text.

    Args:
        model: "tiny" (the embedded checkpoint), a local directory, or a Hub repository id.
        speculative_config: how to draft, e.g. {"method": "mtp", "num_speculative_tokens": 3}; None is plain decode. The
            output is the same bits either way.
        options: the other fields of `metrale.config.EngineConfig`.

    Raises ConfigError, which names the field and the fix.
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
        sequences: dict[int, list[Sequence]] = {}
        ids: list[int] = []
        num_left: dict[int, int] = {}
        try:
            for _, token_ids, request_params in requests:
                request_id = self.engine.add_request(token_ids, request_params)
                ids.append(request_id)
                num_left[request_id] = request_params.n
            with tqdm(total=len(ids), disable=not use_tqdm, desc="Generated", unit="request") as bar:
                while num_left:
                    for event in self.engine.step():
                        request_id = event.sequence.request_id
                        if event.finish_reason is None or request_id not in num_left:
                            continue
                        sequences.setdefault(request_id, []).append(event.sequence)
                        num_left[request_id] -= 1
                        if not num_left[request_id]:
                            del num_left[request_id]
                            bar.update()
        finally:
            for request_id in num_left:
                self.engine.abort(request_id)
        return [
            _output(request_id, prompt, sequences[request_id])
            for request_id, (prompt, _, _) in zip(ids, requests, strict=True)
        ]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[StreamChunk]:
        """Complete one prompt and yield what is new after each step.

        Raises RequestError before any work. Leaving the iterator early aborts the request; with several samples (n > 1)
        `index` tells them apart.
        """
        [(_, token_ids, request_params)] = self._requests([prompt], params)
        return self._stream(token_ids, request_params)

    def _stream(self, token_ids: list[int], params: SamplingParams) -> Iterator[StreamChunk]:
        request_id = self.engine.add_request(token_ids, params)
        num_left = params.n
        try:
            while num_left:
                for event in self.engine.step():
                    sequence = event.sequence
                    if sequence.request_id != request_id:
                        continue
                    num_left -= event.finish_reason is not None
                    yield StreamChunk(
                        event.new_text,
                        event.token_ids,
                        event.finish_reason,
                        sequence.stop_reason,
                        sequence.sample,
                        sequence.error,
                    )
        finally:
            if num_left:
                self.engine.abort(request_id)

    def stats(self) -> dict[str, Any]:
        """Counters of speculation over all requests so far, in the names of `SpeculationStats`."""
        return self.engine.scheduler.stats.as_dict()

    def default_params(self) -> SamplingParams:
        """What a request without parameters gets: the checkpoint's generation_config.json."""
        defaults = self.engine.defaults
        given = {name: getattr(defaults, name) for name in ("temperature", "top_p", "top_k", "min_p")}
        return SamplingParams(**{name: value for name, value in given.items() if value is not None})

    def _requests(
        self, prompts: Prompt | Seq[Prompt], params: SamplingParams | Seq[SamplingParams] | None
    ) -> list[tuple[str | None, list[int], SamplingParams]]:
        """(text, token ids, parameters) of each request, all checked."""
        many = _as_list(prompts)
        if params is None:
            params = self.default_params()
        each = [params] * len(many) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(many):
            raise RequestError(f"{len(each)} SamplingParams for {len(many)} prompts; give one, or one for each")
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

    def _token_ids(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            return list(prompt)
        if self.engine.tokenizer is None:
            raise RequestError("this engine has no tokenizer; give token ids")
        return self.engine.tokenizer.encode(prompt)


def _as_list(prompts: Any) -> list[Any]:
    """One prompt, as text or as ids, becomes a list of one."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Seq):
        raise RequestError(f"prompts must be text, token ids or a list of either, got {type(prompts).__name__}")
    is_one = bool(prompts) and all(isinstance(item, int) for item in prompts)
    return [prompts] if is_one else list(prompts)


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
