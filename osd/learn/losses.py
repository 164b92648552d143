"""Distillation losses between the target's sparse evidence and the head's logits; one function per loss.

The target's distribution p arrives as its top-K probabilities; what is missing, and what lies outside the
draft vocabulary, is the *tail*: one extra outcome. Against it stands the head's mass q outside the same
ids. So target mass outside the table is never renormalised away silently (case A21): the head is asked to
keep that much mass elsewhere, which keeps its confidence honest. Merging outcomes can only lower a
divergence (data processing inequality), so every value here is a lower bound of the full one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

FLOOR = 1e-5
"""Least probability inside a logarithm; bounds the gradient where the head puts nothing."""


@dataclass(frozen=True)
class SparseTarget:
    """The target's distribution at N positions, by index into the draft vocabulary.

    Attributes:
        index: int64 ``[N, K]``; -1 for ids outside the draft vocabulary.
        probs: float32 ``[N, K]``, 0 where ``index`` is -1.
        tail: float32 ``[N]``, all remaining mass.
    """

    index: torch.Tensor
    probs: torch.Tensor
    tail: torch.Tensor

    @classmethod
    def from_evidence(
        cls, top_ids: torch.Tensor, top_logprobs: torch.Tensor, to_draft: torch.Tensor
    ) -> SparseTarget:
        """Evidence ``[N, K]`` (ids, log-probabilities) by the map ``to_draft [vocab]`` (-1 = outside)."""
        index = to_draft[top_ids.long()]
        probs = torch.where(index >= 0, top_logprobs.float().exp(), 0.0)
        return cls(index, probs, (1.0 - probs.sum(-1)).clamp(0.0, 1.0))

    def rows(self, rows: torch.Tensor) -> SparseTarget:
        """The same for a selection of positions."""
        return SparseTarget(self.index[rows], self.probs[rows], self.tail[rows])


def _outcomes(logits: torch.Tensor, target: SparseTarget) -> tuple[torch.Tensor, torch.Tensor]:
    """p and q over the K + 1 outcomes (tail last), both ``[N, K + 1]``."""
    inside = target.index >= 0
    taken = logits.float().gather(-1, target.index.clamp_min(0))
    q = torch.where(inside, (taken - logits.float().logsumexp(-1, keepdim=True)).exp(), 0.0)
    q = torch.cat((q, (1.0 - q.sum(-1, keepdim=True)).clamp(0.0, 1.0)), dim=-1)
    return torch.cat((target.probs, target.tail[:, None]), dim=-1), q


def _kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """KL(p || q) per row, both floored; 0 where p is 0."""
    terms = p * (p.clamp_min(FLOOR).log() - q.clamp_min(FLOOR).log())
    return torch.where(p > 0, terms, 0.0).sum(-1)


def forward_kl(logits: torch.Tensor, target: SparseTarget) -> torch.Tensor:
    """KL(p || q) per position ``[N]``: covers all the target might say.

    The loss of OSD's online step (Liu et al. 2310.07177, section 4) and of EAGLE-3; it bounds the loss of
    acceptance by Pinsker's inequality and is the default.
    """
    inside = target.index >= 0
    z = logits.float()
    log_q = z.gather(-1, target.index.clamp_min(0)) - z.logsumexp(-1, keepdim=True)
    rest = (1.0 - torch.where(inside, log_q.exp(), 0.0).sum(-1)).clamp_min(FLOOR)
    p, tail = target.probs, target.tail
    listed = torch.where(inside, p * (p.clamp_min(FLOOR).log() - log_q), 0.0).sum(-1)
    return listed + tail * (tail.clamp_min(FLOOR).log() - rest.log())


def reverse_kl(logits: torch.Tensor, target: SparseTarget) -> torch.Tensor:
    """KL(q || p) per position ``[N]``: concentrates on one mode (OSD, section 4; MiniLLM 2306.08543)."""
    p, q = _outcomes(logits, target)
    return _kl(q, p)


def jensen_shannon(logits: torch.Tensor, target: SparseTarget) -> torch.Tensor:
    """Jensen-Shannon divergence per position ``[N]``: symmetric and bounded by ln 2 (GKD, 2306.13649)."""
    p, q = _outcomes(logits, target)
    middle = 0.5 * (p + q)
    return 0.5 * _kl(p, middle) + 0.5 * _kl(q, middle)


def total_variation(logits: torch.Tensor, target: SparseTarget) -> torch.Tensor:
    """TV(p, q) per position ``[N]``: 1 - TV is rejection sampling's acceptance itself (DistillSpec).

    Its gradient vanishes where the head is far off, so it suits polishing, not starting.
    """
    p, q = _outcomes(logits, target)
    return 0.5 * (p - q).abs().sum(-1)


def acceptance(logits: torch.Tensor, target: SparseTarget) -> torch.Tensor:
    """-log sum(min(p, q)) per position ``[N]``: the log of what rejection sampling accepts.

    As :func:`total_variation` it aims at acceptance itself, but its gradient grows as the overlap shrinks, so
    it also teaches a head that is far off.
    """
    p, q = _outcomes(logits, target)
    return -torch.minimum(p, q).sum(-1).clamp_min(FLOOR).log()


Loss = Callable[[torch.Tensor, SparseTarget], torch.Tensor]

LOSSES: dict[str, Loss] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "jensen_shannon": jensen_shannon,
    "total_variation": total_variation,
    "acceptance": acceptance,
}


def draft_index(token_ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Map ``[vocab_size]`` from target id to index in the draft vocabulary, -1 outside it."""
    table = torch.full((vocab_size,), -1, dtype=torch.int64, device=token_ids.device)
    table[token_ids] = torch.arange(len(token_ids), device=token_ids.device)
    return table
