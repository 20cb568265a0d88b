"""The phases: a shallow trunk, the whole trunk and its head together, then the head alone behind the frozen trunk."""

import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from tiny_training.chain import unroll
from tiny_training.config import Recipe
from tiny_training.corpus import Tokens, held_out_windows, training_batches
from tiny_training.losses import output_loss
from tiny_training.network import EAGER, Network, compile_operators
from tiny_training.optim import learning_rate_factor, make_optimizers, progress, set_learning_rate
from tiny_training.recall import recall_loss
from tiny_training.team import Team, share

SAVE_EVERY_SECONDS = 240.0
CHECK_EVERY_STEPS = 250
BAR_FORMAT = "{desc} {percentage:3.0f}%|{bar:20}| {postfix}"


@torch.no_grad()
def quick_check(network: Network, windows: Tensor) -> float:
    """Mean nats per token of the trunk on windows [N, T + 1]."""
    compiled, network.operators = network.operators, EAGER
    losses = [
        output_loss(network.trunk(rows[:, :-1]), network.unembedding, rows[:, 1:]).item()
        for rows in windows.split(2)
    ]
    network.operators = compiled
    return sum(losses) / len(losses)


def check_windows(tokens: Tokens, length: int, num_windows: int = 16) -> Tensor:
    """Held-out windows for quick checks, spread evenly over library and tests."""
    both = np.concatenate((tokens.held_out_library, tokens.held_out_tests))
    windows = held_out_windows(both, length + 1)
    return torch.from_numpy(windows[np.linspace(0, len(windows) - 1, num_windows).astype(int)])


class Progress:
    """A phase's place on its schedule, which survives a restart."""

    def __init__(self, name: str, steps: int, seconds: float, hold_until: float, recipe: Recipe) -> None:
        self.name = name
        self.steps, self.seconds = steps, seconds
        self.hold_until, self.warmup = hold_until, recipe.warmup
        self.step = 0
        self.batches = 0
        self.earlier_seconds = 0.0
        self.started = time.monotonic()

    @property
    def elapsed(self) -> float:
        return self.earlier_seconds + time.monotonic() - self.started

    @property
    def done(self) -> float:
        return progress(self.step, self.steps, self.elapsed, self.seconds)

    @property
    def factor(self) -> float:
        return learning_rate_factor(self.done, self.warmup, self.hold_until)

    @property
    def summary(self) -> dict[str, float]:
        return {"steps": self.step, "batches": self.batches, "seconds": self.elapsed}


def save(path: Path, team: Team, rank: int, phase: Progress, optimizers: list[torch.optim.Optimizer]) -> None:
    """Write every worker's part of a checkpoint; the old one stays until all parts of the new one are written."""
    state: dict[str, Any] = {
        "step": phase.step,
        "batches": phase.batches,
        "elapsed": phase.elapsed,
        "parameters": team.parameters if rank == 0 else None,
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
    }
    torch.save(state, path.with_suffix(f".{rank}.new"))
    team.meet()
    if rank == 0:
        for worker in range(team.num_workers):
            path.with_suffix(f".{worker}.new").replace(path.with_suffix(f".{worker}.pt"))


def restore(
    path: Path, team: Team, rank: int, phase: Progress, optimizers: list[torch.optim.Optimizer]
) -> None:
    """Take up the phase where `path` left it, if it is there."""
    if not path.with_suffix(f".{rank}.pt").exists():
        return
    state: dict[str, Any] = torch.load(path.with_suffix(f".{rank}.pt"))
    if rank == 0:
        for name, value in state["parameters"].items():
            team.parameters[name].data.copy_(value)
    for optimizer, content in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(content)
    phase.step, phase.batches, phase.earlier_seconds = state["step"], state["batches"], state["elapsed"]
    team.meet()


class Task(NamedTuple):
    """What a phase trains: loss_of gives losses by name, "loss" being the one to descend; check describes progress."""

    optimizers_of: Callable[[dict[str, nn.Parameter]], list[torch.optim.Optimizer]]
    batches: Iterator[np.ndarray]
    loss_of: Callable[[Tensor], dict[str, Tensor]]
    batches_per_step: Callable[[float], int]
    check: Callable[[], str]


def work(rank: int, team: Team, phase: Progress, task: Task, checkpoint: Path) -> None:
    """One worker's part of a phase. Worker 0 holds the clock and reports."""
    torch.set_num_threads(1)
    optimizers = task.optimizers_of(team.owned(rank))
    restore(checkpoint, team, rank, phase, optimizers)
    team.attach(rank)
    for _ in range(phase.batches):
        next(task.batches)
    saved = phase.elapsed
    bar = tqdm(total=1.0, desc=phase.name, mininterval=5.0, disable=rank > 0, bar_format=BAR_FORMAT)
    while True:
        if rank == 0:
            is_saving = phase.elapsed - saved > SAVE_EVERY_SECONDS or phase.done >= 1.0
            team.plan.copy_(torch.tensor([phase.done, phase.factor, float(is_saving)]))
        team.meet()
        done, factor, is_saving = team.plan.tolist()
        if is_saving:
            save(checkpoint, team, rank, phase, optimizers)
            saved = phase.elapsed
        if done >= 1.0:
            break
        set_learning_rate(optimizers, factor)
        count = task.batches_per_step(done)
        shown: dict[str, float] = {}
        for _ in range(count):
            losses = task.loss_of(share(torch.from_numpy(next(task.batches)), rank, team.num_workers))
            losses["loss"].backward()
            phase.batches += 1
            for name, value in losses.items():
                shown[name] = shown.get(name, 0.0) + value.item() / count
        norm = team.combine(rank, scale=1.0 / (count * team.num_workers), max_norm=1.0)
        if not math.isfinite(norm):
            raise FloatingPointError(f"{phase.name} step {phase.step}: gradient norm {norm}")
        for optimizer in optimizers:
            optimizer.step()
        team.clear(rank)
        phase.step += 1
        if rank == 0:
            figures = " ".join(f"{name} {value:.3f}" for name, value in shown.items())
            bar.update(phase.done - bar.n)
            bar.set_postfix_str(f"step {phase.step} {figures} {phase.elapsed:.0f} s", refresh=False)
            if phase.step % CHECK_EVERY_STEPS == 0:
                bar.write(f"{phase.name} step {phase.step} {phase.elapsed:.0f} s {figures} {task.check()}")
    bar.close()
    if rank == 0:
        print(f"{phase.name}: {phase.step} steps, {phase.elapsed:.0f} s, {task.check()}", flush=True)
        team.plan.copy_(torch.tensor([phase.step, phase.batches, phase.elapsed]))


def run_phase(
    phase: Progress, parameters: dict[str, nn.Parameter], task: Task, checkpoint: Path, workers: int
) -> None:
    """Train `parameters` in place until the phase is done."""
    team = Team(workers, parameters)
    team.run(work, (team, phase, task, checkpoint))
    step, batches, phase.earlier_seconds = team.plan.tolist()
    phase.step, phase.batches, phase.started = int(step), int(batches), time.monotonic()
    for parameter in parameters.values():
        parameter.grad = None


class TextPhase(NamedTuple):
    """A phase on real text. At head weight 0 the head is left alone."""

    progress: Progress
    seed: int
    head_weight: float
    batches_per_step: Callable[[float], int]


def shallow_phase(recipe: Recipe) -> TextPhase:
    """Phase 1: a shallow trunk, at a constant learning rate."""
    phase = Progress("shallow", recipe.shallow_steps, recipe.shallow_seconds, 1.0, recipe)
    return TextPhase(phase, recipe.seed, 0.0, lambda done: 1 if done < recipe.shallow_double_rows_from else 2)


def trunk_phase(recipe: Recipe) -> TextPhase:
    """Phase 2: the whole trunk, and the head's first draft."""
    phase = Progress("trunk", recipe.trunk_steps, recipe.trunk_seconds, recipe.trunk_hold_until, recipe)
    return TextPhase(phase, recipe.seed + 1, recipe.head_weight, lambda done: 2)


def train_on_text(
    network: Network,
    tokens: Tokens,
    recipe: Recipe,
    phase: TextPhase,
    checkpoint: Path,
    workers: int,
    is_compiled: bool,
) -> Progress:
    """Next-token loss of the trunk, plus a share of the head's first draft and, early on, of the recall loss."""
    length, head_weight = recipe.sequence_length, phase.head_weight
    parameters = {
        name: value
        for name, value in network.named_parameters()
        if head_weight > 0.0 or not name.startswith("mtp.")
    }
    windows = check_windows(tokens, length)
    network.operators = compile_operators() if is_compiled else EAGER

    def loss_of(ids: Tensor) -> dict[str, Tensor]:
        recall_weight = recipe.recall_weight * max(0.0, 1.0 - phase.progress.done / recipe.recall_until)
        entering: list[Tensor] = []
        hidden = network.trunk(ids[:, :length], entering)
        trunk = output_loss(hidden, network.unembedding, ids[:, 1 : length + 1])
        losses = {"loss": trunk, "trunk": trunk.detach()}
        if recall_weight > 0.0:
            recall = mean_recall_loss(network, entering, ids[:, :length])
            losses |= {"loss": trunk + recall_weight * recall, "recall": recall.detach()}
        if head_weight == 0.0:
            return losses
        some = math.ceil(len(ids) * recipe.head_rows_share)
        drafted = network.head(hidden[:some], ids[:some, 1 : length + 1])
        head = output_loss(drafted, network.unembedding, ids[:some, 2 : length + 2])
        return {**losses, "loss": losses["loss"] + head_weight * head, "head": head.detach()}

    task = Task(
        lambda owned: make_optimizers(
            owned, recipe.trunk_muon_lr, recipe.trunk_adamw_lr, recipe.weight_decay
        ),
        training_batches(tokens, recipe.rows, length + 2, recipe.library_share, phase.seed),
        loss_of,
        phase.batches_per_step,
        lambda: f"held-out {quick_check(network, windows):.4f}",
    )
    run_phase(phase.progress, parameters, task, checkpoint, workers)
    network.operators = EAGER
    return phase.progress


def mean_recall_loss(network: Network, entering: list[Tensor], ids: Tensor) -> Tensor:
    """recall_loss of every attention layer, on the first row of ids [B, T] alone: it is slow, and says enough."""
    length = ids.shape[1]
    layers = [layer for layer in network.model.layers if not layer.is_linear]
    losses = [
        recall_loss(layer, x[:1, :length], ids[:1], network.rope.at(0, length), network.sizes)
        for layer, x in zip(layers, entering, strict=True)
    ]
    return torch.stack(losses).mean()


def chain_losses(network: Network, ids: Tensor, depth: int) -> list[Tensor]:
    """Cross entropy of each chain step against the frozen trunk's distribution, for text ids [B, T]."""
    num_roots = ids.shape[1] - depth
    with torch.no_grad():
        hidden = network.trunk(ids)
        goal = (hidden @ network.unembedding.T).softmax(dim=-1)
    outputs = unroll(network, hidden[:, :num_roots], ids, depth)
    return [
        output_loss(output, network.unembedding, goal[:, 1 + step : 1 + step + num_roots])
        for step, output in enumerate(outputs)
    ]


def train_chain(network: Network, tokens: Tokens, recipe: Recipe, checkpoint: Path, workers: int) -> Progress:
    """Phase 3: the head learns the trunk's distributions along its own chains; the trunk is frozen."""
    depth = recipe.chain_depth
    phase = Progress("chain", recipe.chain_steps, recipe.chain_seconds, recipe.chain_hold_until, recipe)
    network.requires_grad_(False)
    network.mtp.requires_grad_(True)
    parameters = {name: value for name, value in network.named_parameters() if value.requires_grad}
    windows = check_windows(tokens, recipe.sequence_length, num_windows=16)

    def loss_of(ids: Tensor) -> dict[str, Tensor]:
        losses = chain_losses(network, ids, depth)
        weights = [recipe.chain_decay**step for step in range(depth)]
        total = sum(weight * loss for weight, loss in zip(weights, losses, strict=True)) / sum(weights)
        return {"loss": total, "first": losses[0].detach(), "last": losses[-1].detach()}

    @torch.no_grad()
    def check() -> str:
        losses = [torch.stack(chain_losses(network, rows[:, :-1], depth)) for rows in windows.split(2)]
        means = torch.stack(losses).mean(0)
        return "held-out " + " ".join(f"{value:.4f}" for value in means.tolist())

    task = Task(
        lambda owned: make_optimizers(owned, recipe.chain_muon_lr, recipe.chain_adamw_lr, weight_decay=0.0),
        training_batches(tokens, recipe.rows, recipe.sequence_length, recipe.library_share, recipe.seed + 2),
        loss_of,
        lambda done: 1,
        check,
    )
    run_phase(phase, parameters, task, checkpoint, workers)
    return phase
