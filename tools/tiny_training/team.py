"""Data-parallel workers on one machine: one process per core, with parameters and gradients in shared memory.

One thread per process keeps a core busy through a whole step. Threads inside every operation would meet at thousands of
barriers per step, and wait at each for the slowest core when other programs run beside the training.
"""

import math
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from typing import Any

import torch
import torch.multiprocessing as multiprocessing
from torch import Tensor, nn

BARRIER_SECONDS = 900.0


class Team:
    """What workers share. Each parameter is owned by one worker, which alone updates it, for all."""

    def __init__(self, num_workers: int, parameters: dict[str, nn.Parameter]) -> None:
        self.num_workers = num_workers
        self.parameters = parameters
        for parameter in parameters.values():
            parameter.data.share_memory_()
        self.grads = [
            {name: torch.zeros_like(value).share_memory_() for name, value in parameters.items()}
            for _ in range(num_workers)
        ]
        self.plan = torch.zeros(3, dtype=torch.float64).share_memory_()
        self.squares = torch.zeros(num_workers, dtype=torch.float64).share_memory_()
        self.owners = self._share_out()
        self.context = multiprocessing.get_context("fork")
        self._barrier = self.context.Barrier(num_workers)

    def _share_out(self) -> dict[str, int]:
        """Owners by parameter, so that orthogonalising costs every worker about the same."""
        costs = {
            name: math.prod(value.shape) * min(value.shape) if value.ndim == 2 else value.numel()
            for name, value in self.parameters.items()
        }
        loads = [0] * self.num_workers
        owners = {}
        for name in sorted(costs, key=lambda name: -costs[name]):
            owners[name] = loads.index(min(loads))
            loads[owners[name]] += costs[name]
        return owners

    def owned(self, rank: int) -> dict[str, nn.Parameter]:
        return {name: value for name, value in self.parameters.items() if self.owners[name] == rank}

    def meet(self) -> None:
        """Wait for all workers."""
        self._barrier.wait(BARRIER_SECONDS)

    def attach(self, rank: int) -> None:
        """Let backward passes of this process add into the gradients that it shares."""
        for name, value in self.parameters.items():
            value.grad = self.grads[rank][name]

    def combine(self, rank: int, scale: float, max_norm: float) -> float:
        """Sum the owned gradients over all workers into .grad, times scale, clipped; the whole gradient's norm."""
        self.meet()
        square = 0.0
        owned = self.owned(rank)
        for name, value in owned.items():
            for other in range(self.num_workers):
                if other != rank:
                    value.grad.add_(self.grads[other][name])
            value.grad.mul_(scale)
            square += value.grad.square().sum().item()
        self.squares[rank] = square
        self.meet()
        norm = self.squares.sum().sqrt().item()
        if norm > max_norm:
            for value in owned.values():
                value.grad.mul_(max_norm / norm)
        return norm

    def clear(self, rank: int) -> None:
        """Zero this worker's gradients, once everyone has read them."""
        self.meet()
        for grad in self.grads[rank].values():
            grad.zero_()

    def run(self, work: Callable[..., None], arguments: Sequence[Any] = ()) -> None:
        """Run work(rank, *arguments) in every worker; raises when one fails."""
        workers = [
            self.context.Process(target=work, args=(rank, *arguments), daemon=True)
            for rank in range(self.num_workers)
        ]
        for worker in workers:
            worker.start()
        wait([worker.sentinel for worker in workers])
        for worker in workers:
            # a worker that failed leaves the others at a barrier
            worker.join(timeout=None if all(one.exitcode in (None, 0) for one in workers) else 5.0)
            if worker.is_alive():
                worker.terminate()
        codes = [worker.exitcode for worker in workers]
        if any(codes):
            raise RuntimeError(f"workers ended with exit codes {codes}")


def share(rows: Tensor, rank: int, num_workers: int) -> Tensor:
    """A worker's rows of a batch."""
    if len(rows) % num_workers:
        raise ValueError(f"rows: expected a multiple of {num_workers} workers, got {len(rows)}")
    return rows[rank::num_workers]
