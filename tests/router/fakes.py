"""An encoder without a model: texts that share words are similar."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from osd.types import Assignment, FinishedRecord, FinishReason, GenerationRequest, Round, SamplingParams
from router.mind.embed import Vector

DIMENSION = 96


class WordEncoder:
    """The normalised sum of one fixed random vector a word (96 dimensions)."""

    dimension = DIMENSION

    def __init__(self) -> None:
        self.calls: list[list[str]] = []

    def encode(self, texts: Sequence[str]) -> Vector:
        self.calls.append(list(texts))
        rows = np.stack(
            [sum((word_vector(w) for w in text.lower().split()), np.zeros(DIMENSION)) for text in texts]
        )
        norms = np.linalg.norm(rows, axis=1, keepdims=True)
        return (rows / np.maximum(norms, 1e-12)).astype(np.float32)


def word_vector(word: str) -> np.ndarray:
    seed = int.from_bytes(hashlib.blake2b(word.encode("utf-8", "replace"), digest_size=8).digest(), "big")
    return np.random.default_rng(seed).standard_normal(DIMENSION)


SUBJECTS = ["boat", "lamp", "tree", "coin", "glass", "horse", "river", "stone", "cloud", "bridge"]


def prompts(words: str, count: int, start: int = 0) -> list[str]:
    """Prompts of one kind: the shared words and a few of their own."""
    return [
        f"{words} {SUBJECTS[i % 10]} {SUBJECTS[(i * 3 + 1) % 10]} number{i}"
        for i in range(start, start + count)
    ]


def record(
    text: str,
    assignment: Assignment | None = None,
    *,
    request_id: str = "r",
    domain: str | None = None,
    named: str | None = None,
    store: bool = True,
    finish: FinishReason = FinishReason.STOP,
    rounds: tuple[Round, ...] = (),
    versions: tuple[int, ...] = (),
    seconds: float = 0.0,
) -> FinishedRecord:
    assignment = assignment or Assignment()
    return FinishedRecord(
        request=GenerationRequest(request_id, (1, 2, 3), SamplingParams(), text, domain=named, store=store),
        domain=domain or assignment.domain,
        assignment=assignment,
        output_ids=(4, 5),
        finish=finish,
        rounds=rounds,
        versions=versions,
        evidence=None,
        features=None,
        seconds=seconds,
        routing_wait=0.0,
        first_token_seconds=0.1,
        total_seconds=1.0,
    )
