"""Acceptance of a head on recorded answers, without the target: exact for greedy decoding.

A greedy chain is accepted up to its first wrong token, and while it is right it has been fed the true
tokens. So flags "argmax is the emitted token", taken with true tokens fed, tell exactly how long a chain
would have been accepted at every position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from drafts.bank import Expert, expert_logits
from drafts.trunk import Trunk
from osd.learn.unroll import Text, unroll


@dataclass(frozen=True)
class Simulated:
    """Figures of one label.

    Attributes:
        positions: Output positions examined.
        first_token: Share of positions where the first proposed token is the emitted one.
        by_depth: The same at depth d given that all before were right, d = 1 first.
        tau: Mean accepted length (bonus included) of greedy chains, by chain length 1, 2, …
    """

    positions: int
    first_token: float
    by_depth: tuple[float, ...]
    tau: tuple[float, ...]


def right_flags(
    trunk: Trunk,
    embedding: torch.Tensor,
    output: torch.Tensor,
    texts: Sequence[Text],
    steps: int,
    expert: Expert | None = None,
) -> list[torch.Tensor]:
    """Per text, bool ``[steps, outputs]``: at base a, step i, is the argmax the emitted token a + i?"""
    result = unroll(trunk, embedding, texts, steps, expert)
    flags: list[torch.Tensor] = []
    guesses = [expert_logits(trunk, output, hidden, expert).argmax(-1) for hidden in result.hidden]
    for row, text in enumerate(texts):
        mine = result.rows == row
        emitted = text.tokens[text.prompt_length :]
        right = torch.zeros(steps, len(emitted), dtype=torch.bool)
        for step, guess in enumerate(guesses):
            count = len(emitted) - step
            right[step, : max(count, 0)] = trunk.token_ids[guess[mine]][:count] == emitted[step:]
        flags.append(right)
    return flags


def chain_counts(right: torch.Tensor, k: int) -> tuple[int, int]:
    """Tokens and target passes of greedy chains of ``k`` over an answer whose first token prefill gave."""
    reach = right[:k].int().cumprod(0).sum(0).tolist()
    passes, position = 0, 1
    while position < len(reach):
        passes, position = passes + 1, position + min(int(reach[position]) + 1, len(reach) - position)
    return max(len(reach) - 1, 0), passes


def mean_accepted_length(flags: Sequence[torch.Tensor], k: int) -> float:
    """Tokens per target pass of greedy chains of ``k``; 0 where no answer needed a pass."""
    counts = [chain_counts(right, k) for right in flags]
    passes = sum(count for _, count in counts)
    return sum(tokens for tokens, _ in counts) / passes if passes else 0.0


def summarise(flags: Sequence[torch.Tensor]) -> Simulated:
    """Figures of a group of texts from their flags."""
    steps = flags[0].shape[0]
    by_depth: list[float] = []
    for depth in range(steps):
        reached = right = 0
        for flag in flags:
            count = max(flag.shape[1] - depth, 0)
            alive = flag[:depth].all(0)[:count] if depth else torch.ones(count, dtype=torch.bool)
            reached += int(alive.sum())
            right += int((flag[depth, :count] & alive).sum())
        by_depth.append(right / max(reached, 1))
    positions = sum(flag.shape[1] for flag in flags)
    tau = tuple(mean_accepted_length(flags, k) for k in range(1, steps + 1))
    return Simulated(positions, by_depth[0], tuple(by_depth), tau)


@torch.no_grad()
def answer_flags(
    trunk: Trunk,
    embedding: torch.Tensor,
    output: torch.Tensor,
    answers: Sequence[Text],
    steps: int = 4,
    batch: int = 16,
    expert: Expert | None = None,
) -> list[torch.Tensor]:
    """:func:`right_flags` of every answer, in the order given; batches hold answers of similar length."""
    flags: dict[int, torch.Tensor] = {}
    ordered = sorted(range(len(answers)), key=lambda at: len(answers[at].tokens))
    for start in range(0, len(ordered), batch):
        places = ordered[start : start + batch]
        texts = [answers[at] for at in places]
        flags.update(zip(places, right_flags(trunk, embedding, output, texts, steps, expert), strict=True))
    return [flags[at] for at in range(len(answers))]


def simulate(
    trunk: Trunk,
    embedding: torch.Tensor,
    output: torch.Tensor,
    answers: Sequence[Text],
    steps: int = 4,
    batch: int = 16,
    expert: Expert | None = None,
) -> dict[str, Simulated]:
    """Figures per label of ``answers`` (and ``"all"``) for chains up to ``steps``."""
    by_label: dict[str, list[torch.Tensor]] = {}
    flags = answer_flags(trunk, embedding, output, answers, steps, batch, expert)
    for answer, right in zip(answers, flags, strict=True):
        by_label.setdefault(getattr(answer, "label", ""), []).append(right)
        by_label.setdefault("all", []).append(right)
    return {label: summarise(group) for label, group in sorted(by_label.items())}
