"""Muon for matrices, AdamW for the rest, and a learning rate that decays fully on any machine."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

NEWTON_SCHULZ_STEPS = 4
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def orthogonalise(matrix: Tensor) -> Tensor:
    """Roughly U V^T of the singular value decomposition, by a quintic Newton-Schulz iteration in float32.

    Four steps instead of the usual five: singular values above a hundredth of the norm still end between 0.65 and 1.15.
    """
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / (x.norm() + 1e-7)
    linear, cubic, quintic = NEWTON_SCHULZ
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=cubic, alpha=quintic), x, beta=linear)
    return x.T if is_tall else x


class Muon(torch.optim.Optimizer):
    """Momentum, made orthogonal, with the update's RMS scaled to what AdamW's would be (0.2)."""

    def __init__(
        self, params: Iterable[nn.Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.0
    ):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                average = state.setdefault("average", torch.zeros_like(parameter))
                average.lerp_(parameter.grad, 1 - group["momentum"])
                update = orthogonalise(parameter.grad.lerp(average, group["momentum"]))
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-group["lr"] * 0.2 * max(parameter.shape) ** 0.5)


def make_optimizers(
    parameters: dict[str, nn.Parameter], muon_lr: float, adamw_lr: float, weight_decay: float
) -> list[torch.optim.Optimizer]:
    """Muon for the projections, AdamW for embeddings, vectors, convolutions and the narrow gates."""
    matrices, others = [], []
    for name, parameter in parameters.items():
        is_narrow = min(parameter.shape) < 16 or parameter.ndim != 2
        (others if is_narrow or "embed_tokens" in name else matrices).append(parameter)
    optimizers: list[torch.optim.Optimizer] = []
    if matrices:
        optimizers.append(Muon(matrices, lr=muon_lr, weight_decay=weight_decay))
    if others:
        optimizers.append(
            torch.optim.AdamW(others, lr=adamw_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
        )
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["base_lr"] = group["lr"]
    return optimizers


def progress(step: int, steps: int, elapsed: float, seconds: float) -> float:
    """How much of a phase is done, 0 to 1: by steps or by time, whichever is further."""
    return min(1.0, max(step / steps, elapsed / seconds))


def learning_rate_factor(done: float, warmup: float, hold_until: float) -> float:
    """Linear warm-up, constant, linear to zero at `done` = 1."""
    if done < warmup:
        return max(done, 0.01) / warmup if warmup > 0.01 else 1.0
    return 1.0 if done <= hold_until else (1.0 - done) / (1.0 - hold_until)


def set_learning_rate(optimizers: Iterable[torch.optim.Optimizer], factor: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["base_lr"] * factor
