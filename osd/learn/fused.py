"""Losses through a frozen output matrix, fused: the logits of a few rows at a time, never all.

Over 8k ids the logits are by far the widest tensor of a training step; written out and differentiated by
autograd they cost more memory traffic than all matrices together. The gradient of forward KL is known in
closed form; that of any other loss is taken while its rows are at hand.
"""

from __future__ import annotations

from typing import Any

import torch

from osd.learn.losses import FLOOR, LOSSES, SparseTarget

ROWS = 128
"""Rows per piece: their logits stay in cache."""


class _Stored(torch.autograd.Function):
    """A loss whose gradients in hidden and bias, its first two inputs, were taken on the way forward."""

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Scale the stored gradients."""
        grad_hidden, grad_bias = ctx.saved_tensors
        others = [None] * (len(ctx.needs_input_grad) - 2)
        return (grad_hidden * grads[0], grad_bias * grads[0], *others)


class _FusedForwardKL(_Stored):
    """Mean of :func:`osd.learn.losses.forward_kl` over rows; differentiable in hidden and bias."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        bias: torch.Tensor,
        weight: torch.Tensor,
        index: torch.Tensor,
        probs: torch.Tensor,
        tail: torch.Tensor,
    ) -> torch.Tensor:
        """Loss, and on the way the gradients.

        With S the head's mass on the listed ids, t the target's tail and P = 1 - t:
        ``dL/dz_k = q_k (P - t S / (1 - S)) + [k listed] (t q_k / (1 - S) - p_k)``.
        """
        count = hidden.shape[0]
        grad_hidden = torch.empty_like(hidden)
        grad_bias = torch.zeros_like(bias)
        loss = torch.zeros((), dtype=torch.float64)
        for start in range(0, count, ROWS):
            rows = slice(start, start + ROWS)
            z = (hidden[rows].to(weight.dtype) @ weight.T).float().add_(bias)
            inside, at = index[rows] >= 0, index[rows].clamp_min(0)
            log_q = z.gather(-1, at).sub_(norm := z.logsumexp(-1, keepdim=True))
            q = z.sub_(norm).exp_()
            p, t = probs[rows], tail[rows]
            taken = torch.where(inside, log_q.exp(), 0.0)
            rest = 1.0 - taken.sum(-1)
            floored = rest.clamp_min(FLOOR)
            loss += torch.where(inside, p * (p.clamp_min(FLOOR).log() - log_q), 0.0).sum()
            loss += (t * (t.clamp_min(FLOOR).log() - floored.log())).sum()
            pull = torch.where(rest > FLOOR, t / floored, 0.0)
            listed = torch.where(inside, pull[:, None] * taken - p, 0.0)
            grad = q.mul_((1.0 - t - pull * (1.0 - rest))[:, None]).scatter_add_(-1, at, listed)
            grad_bias += grad.sum(0)
            grad_hidden[rows] = (grad.to(weight.dtype) @ weight).to(hidden.dtype)
        ctx.save_for_backward(grad_hidden.div_(count), grad_bias.div_(count))
        return (loss / count).float()


def mean_forward_kl(
    hidden: torch.Tensor, bias: torch.Tensor, weight: torch.Tensor, target: SparseTarget
) -> torch.Tensor:
    """Mean forward KL of ``hidden [N, H] @ weight.T + bias`` against ``target``; ``weight`` is frozen."""
    loss: torch.Tensor = _FusedForwardKL.apply(  # type: ignore[no-untyped-call]
        hidden, bias, weight, target.index, target.probs, target.tail
    )
    return loss


class _FusedLoss(_Stored):
    """Mean of a loss of :data:`osd.learn.losses.LOSSES` over rows; differentiable in hidden and bias."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        bias: torch.Tensor,
        weight: torch.Tensor,
        target: SparseTarget,
        name: str,
    ) -> torch.Tensor:
        """Loss, and on the way the gradients."""
        count = hidden.shape[0]
        grad_hidden = torch.empty_like(hidden)
        grad_bias = torch.zeros_like(bias)
        total = torch.zeros((), dtype=torch.float64)
        order = torch.arange(count)
        for start in range(0, count, ROWS):
            rows = order[start : start + ROWS]
            with torch.enable_grad():
                z = (hidden[rows].to(weight.dtype) @ weight.T).float().add_(bias).requires_grad_(True)
                loss = LOSSES[name](z, target.rows(rows)).sum()
            (grad,) = torch.autograd.grad(loss, z)
            total += loss.detach()
            grad_bias += grad.sum(0)
            grad_hidden[rows] = (grad.to(weight.dtype) @ weight).to(hidden.dtype)
        ctx.save_for_backward(grad_hidden.div_(count), grad_bias.div_(count))
        return (total / count).float()


def mean_loss(
    name: str, hidden: torch.Tensor, bias: torch.Tensor, weight: torch.Tensor, target: SparseTarget
) -> torch.Tensor:
    """Mean of the loss ``name`` of ``hidden [N, H] @ weight.T + bias``; ``weight`` is frozen."""
    if name == "forward_kl":
        return mean_forward_kl(hidden, bias, weight, target)
    loss: torch.Tensor = _FusedLoss.apply(  # type: ignore[no-untyped-call]
        hidden, bias, weight, target, name
    )
    return loss
