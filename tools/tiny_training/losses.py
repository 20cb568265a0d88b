"""Cross entropy of the tied output layer, in blocks, with its gradient made in the same pass."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

BLOCK_ROWS = 1024


class OutputCrossEntropy(Function):
    """Mean cross entropy of softmax(hidden @ weight.T) against token ids [N] or distributions [N, V].

    Blocks keep the logits in the cache: the whole [N, V] array is neither stored nor read again.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        needs_weight = ctx.needs_input_grad[1]
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight) if needs_weight else None
        total = hidden.new_zeros(())
        for start in range(0, len(hidden), BLOCK_ROWS):
            rows = slice(start, start + BLOCK_ROWS)
            block, goal = hidden[rows], target[rows]
            log_probs = F.log_softmax(block @ weight.T, dim=-1)
            if goal.ndim == 1:
                total -= log_probs.gather(1, goal[:, None]).sum()
                grad = log_probs.exp_()
                grad[torch.arange(len(goal)), goal] -= 1
            else:
                total -= (goal * log_probs).sum()
                grad = log_probs.exp_().sub_(goal)
            torch.mm(grad, weight, out=grad_hidden[rows])
            if needs_weight:
                grad_weight.addmm_(grad.T, block)
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.count = len(hidden)
        return total / len(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        scale = grad / ctx.count
        return grad_hidden * scale, None if grad_weight is None else grad_weight * scale, None


def output_loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Mean nats per position for hidden [..., H], weight [V, H], and target ids [...] or distributions [..., V]."""
    is_distribution = target.ndim == hidden.ndim
    rows = target.flatten(0, -2) if is_distribution else target.flatten()
    return OutputCrossEntropy.apply(hidden.flatten(0, -2), weight, rows)
