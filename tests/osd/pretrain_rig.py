"""Answers of a synthetic language, and what a target that might have given them lends."""

from __future__ import annotations

import torch

from osd.learn.pretrain_data import Answer
from osd.lent import Lent
from tests.drafts.head_rig import SHAPE, matrices
from tests.osd.learn_rig import finished


def answer(seed: int, prompt: int = 5, output: int = 4) -> Answer:
    record = finished(seed, prompt=prompt, output=output)
    assert record.features is not None
    assert record.evidence is not None
    return Answer(
        label="even" if seed % 2 else "odd",
        source="made up",
        tokens=torch.tensor([*record.request.prompt_ids, *record.output_ids]),
        prompt_length=prompt,
        features=record.features,
        top_ids=record.evidence.top_ids,
        top_logprobs=record.evidence.top_logprobs,
    )


def lent() -> Lent:
    embedding, output = matrices()
    return Lent("made up", SHAPE, 3, embedding, output, (48,), None, "it is made up")
