"""Who runs: admission, plans, and what a verdict does to a sequence."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator
from typing import Any, NamedTuple

from metrale.core import Sequence, SequenceKey, StepPlan, Verdict
from metrale.drafters.base import Drafter
from metrale.scheduler.depth import depth
from metrale.scheduler.plan import plan_step
from metrale.state.pool import Pool
from metrale.telemetry.statistics import SpeculationStats


class SchedulerConfig(NamedTuple):
    """The numbers that a plan depends on."""

    max_num_batched_tokens: int
    num_speculative_tokens: int
    max_num_seqs_speculative: int


class Event(NamedTuple):
    """What one sequence emitted in a step; `finish_reason` is None while it goes on."""

    sequence: Sequence
    token_ids: tuple[int, ...]
    logprobs: tuple[Any, ...]
    new_text: str
    finish_reason: str | None


class Scheduler:
    """Sequences wait in order of arrival and run in slots. A slot and all pages are taken at admission."""

    def __init__(self, config: SchedulerConfig, pool: Pool, drafter: Drafter | None) -> None:
        self.stats = SpeculationStats()
        self.running: dict[SequenceKey, Sequence] = {}
        self.live: dict[SequenceKey, Sequence] = {}  # whose end nobody was told of yet
        self._waiting: deque[Sequence] = deque()
        self._config = config
        self._pool = pool
        self._drafter = drafter
        self._num_steps = 0
        self._num_admitted = 0

    @property
    def has_work(self) -> bool:
        return bool(self.running or self._waiting)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self.live[sequence.key] = sequence
        self._waiting.append(sequence)

    def admit(self) -> None:
        """Give slots and pages to waiting sequences, in order, while there are both."""
        pool = self._pool
        while self._waiting and pool.slots.num_free:
            sequence = self._waiting[0]
            num_positions = sequence.prompt_len + sequence.max_tokens
            if pool.num_pages_for(num_positions) > pool.pages.num_free:
                return
            sequence.slot, sequence.pages = pool.acquire(num_positions)
            sequence.order = self._num_admitted
            self._num_admitted += 1
            self.running[sequence.key] = sequence
            self._waiting.popleft()

    def plan(self, only: Collection[SequenceKey] | None = None, drafting: bool = True) -> StepPlan:
        """The next step's rows, for all running sequences or for those in `only`."""
        config = self._config
        views = [s.view() for key, s in self.running.items() if only is None or key in only]
        num_running = len(self.running)
        most = config.num_speculative_tokens if drafting and self._drafter is not None else 0

        return plan_step(
            views,
            lambda view: depth(view, num_running, most, config.max_num_seqs_speculative).num_drafts,
            config.max_num_batched_tokens,
        )

    def apply(self, verdicts: Iterable[Verdict]) -> Iterator[Event]:
        """Append, count, emit, verdict by verdict; a finished sequence leaves its slot and pages."""
        self._num_steps += 1
        for verdict in verdicts:
            sequence = self.running[verdict.key]
            sequence.last_step = self._num_steps
            sequence.token_ids += verdict.token_ids
            sequence.logprobs += verdict.logprobs
            sequence.text = verdict.text
            sequence.shown.append(verdict.new_text)
            for stats in (sequence.stats, self.stats):
                stats.record(verdict.num_drafts, verdict.num_accepted, len(verdict.token_ids))
                stats.num_trimmed_tokens += verdict.num_trimmed
            if verdict.finish_reason == "error":
                sequence.error = sequence.error or "the model gave no valid token"
            if verdict.finish_reason is not None:
                self.finish(sequence, verdict.finish_reason, verdict.stop_reason)
            if verdict.token_ids or verdict.finish_reason:
                yield Event(
                    sequence, verdict.token_ids, verdict.logprobs, verdict.new_text, verdict.finish_reason
                )

    def restart_prompts(self, keys: Iterable[SequenceKey]) -> None:
        """Send sequences whose prompt chunk was interrupted back to position 0: the chunk advanced their state in place."""
        for key in keys:
            sequence = self.running[key]
            if sequence.num_committed < sequence.prompt_len:
                self._pool.reset(sequence.slot)
                sequence.num_committed = 0
                if self._drafter is not None:
                    self._drafter.restart(key)

    def fail(self, key: SequenceKey, error: str) -> Event:
        """End a running sequence with "error" and say why."""
        sequence = self.running[key]
        sequence.error = error
        new_text = _flush(sequence)
        self.finish(sequence, "error")
        return Event(sequence, (), (), new_text, "error")

    def finish(self, sequence: Sequence, reason: str, stop_reason: int | str | None = None) -> None:
        """End a sequence, running or waiting, and free what it holds."""
        sequence.finish_reason, sequence.stop_reason = reason, stop_reason
        if self.running.pop(sequence.key, None) is None:
            self._waiting.remove(sequence)
            return
        self._pool.release(sequence.slot, sequence.pages)
        sequence.slot, sequence.pages = -1, []
        if self._drafter is not None:
            self._drafter.release(sequence.key)

    def abort(self, request_id: int) -> list[Event]:
        """End every sample of a request with "abort"."""
        ended = [s for s in (*self.running.values(), *self._waiting) if s.request_id == request_id]
        events = []
        for sequence in ended:
            events.append(Event(sequence, (), (), _flush(sequence), "abort"))
            self.finish(sequence, "abort")
        return events

    def repair(self, broken: Collection[SequenceKey], error: str) -> Iterator[Event]:
        """Put right what was cut off at any point: `broken` sequences end with "error", as do those that are neither
        queued nor running; whoever runs keeps slot and pages, and all others are free."""
        for key in broken:
            self.running.pop(key, None)
        self._waiting = deque(s for s in self._waiting if s.key not in self.running and s.key not in broken)
        waiting = {sequence.key for sequence in self._waiting}
        lost = [s for key, s in self.live.items() if key not in self.running and key not in waiting]
        self._pool.reclaim([(s.slot, s.pages) for s in self.running.values()])
        for sequence in lost:
            if self._drafter is not None:
                self._drafter.release(sequence.key)
            sequence.slot, sequence.pages = -1, []
            sequence.finish_reason, sequence.stop_reason, sequence.error = "error", None, error
            yield Event(sequence, (), (), "", "error")


def _flush(sequence: Sequence) -> str:
    """Show the text that was held back for a stop string that will not come."""
    new_text: str = "" if sequence.text is None else sequence.text.flush()
    sequence.shown.append(new_text)
    return new_text
