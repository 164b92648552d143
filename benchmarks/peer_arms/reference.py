"""What every answer is held against: ``generate`` in float32, greedy, one prompt at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from osd.serve.ties import tie_bound
from peer_arms.in_transformers import generate
from peer_arms.measured import Prompt
from router.app.arms import ReplayEngine

TIES = {"float32": tie_bound(torch.float32), "bfloat16": tie_bound(torch.bfloat16)}
"""Largest gap of the float32 scores at a first difference that counts as a near tie, by the arms' dtype."""


@dataclass
class Reference:
    """The reference's answers, and how close its decision was where another arm's answer parts from it.

    Args:
        engine: On whose thread everything runs.
        folder: The target's folder.
    """

    engine: ReplayEngine
    folder: Path
    answers: dict[int, tuple[int, ...]] = field(default_factory=dict)
    _gaps: dict[tuple[int, int, int], float] = field(default_factory=dict)
    _model: Any = None

    def answer(self, prompts: Sequence[Prompt], max_tokens: int) -> None:
        """Answer the prompts; untimed."""
        eos = sorted(self.engine.eos_token_ids)
        for prompt in prompts:
            work = partial(self._generate, prompt.ids, max_tokens, eos)
            self.answers[prompt.index] = self.engine.compute(work)

    def gap(self, prompt: Prompt, tokens: Sequence[int]) -> float | None:
        """Score of the reference's token minus the arm's, where they first differ.

        ``None`` if the answers are equal; infinite where one merely ends before the other.
        """
        ours = self.answers[prompt.index]
        place = first_difference(ours, tokens)
        if place is None:
            return None
        if place >= min(len(ours), len(tokens)):
            return float("inf")
        key = (prompt.index, place, tokens[place])
        if key not in self._gaps:
            text = (*prompt.ids, *ours[:place])
            self._gaps[key] = self.engine.compute(partial(self._gap, text, ours[place], tokens[place]))
        return self._gaps[key]

    def _generate(self, ids: Sequence[int], max_tokens: int, eos: list[int]) -> tuple[int, ...]:
        return generate(self._loaded(), [ids], max_tokens, eos, {})[0].tokens

    def _gap(self, text: Sequence[int], ours: int, theirs: int) -> float:
        with torch.inference_mode():
            scores = self._loaded()(torch.tensor([list(text)]), use_cache=False, logits_to_keep=1).logits
        return float(scores[0, -1, ours] - scores[0, -1, theirs])

    def _loaded(self) -> Any:
        if self._model is None:
            from transformers import AutoModelForCausalLM

            self._model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32).eval()
        return self._model


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """The first place at which two answers differ, ``None`` for equal ones."""
    for place, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return place
    return None if len(left) == len(right) else min(len(left), len(right))


def equal_outputs(gaps: Mapping[int, float | None], bound: float) -> dict[str, Any]:
    """Share and number of answers equal to the reference's, and how the others part from it.

    Args:
        gaps: By prompt: ``None`` for an equal answer, else the gap at the first difference.
        bound: Largest gap of a near tie.
    """
    differing = [gap for gap in gaps.values() if gap is not None]
    near = [gap for gap in differing if gap <= bound]
    others = sorted(gap for gap in differing if gap > bound)
    return {
        "share": (len(gaps) - len(differing)) / len(gaps) if gaps else None,
        "equal": len(gaps) - len(differing),
        "prompts": len(gaps),
        "near_ties": len(near),
        "near_tie_bound": bound,
        "other_differences": len(others),
        "largest_gap": max((gap for gap in differing if gap != float("inf")), default=None),
    }
