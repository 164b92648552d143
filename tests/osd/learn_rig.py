"""A tiny head, and finished requests of a synthetic language."""

from __future__ import annotations

import time

import torch

from drafts.bank import ExpertBank
from osd.learn.head import EagleHead
from osd.types import (
    Assignment,
    FinishedRecord,
    FinishReason,
    GenerationRequest,
    Round,
    SamplingParams,
    TargetEvidence,
)
from tests.drafts.head_rig import IDS, SHAPE, matrices, tiny_trunk


def tiny_head(*domains: str) -> EagleHead:
    trunk = tiny_trunk()
    embedding, output = matrices()
    bank = ExpertBank(trunk, rank=8, capacity=2)
    for domain in domains:
        bank.add(domain)
    return EagleHead(trunk, bank, embedding, output[IDS])


def finished(
    seed: int,
    domain: str = "math",
    prompt: int = 5,
    output: int = 20,
    temperature: float = 0.0,
    features: torch.Tensor | None = None,
    shift: int = 3,
) -> FinishedRecord:
    """An answer whose next token is a fixed function of the token before: a head can learn it all.

    Languages of different ``shift`` contradict one another.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = IDS[torch.randint(0, len(IDS), (prompt,), generator=generator)].tolist()
    for _ in range(output):
        tokens.append(int(IDS[(int(tokens[-1]) * 7 + shift) % len(IDS)]))
    ids = torch.tensor(tokens[prompt:])[:, None].repeat(1, 4)
    ids[:, 1:] = torch.tensor([0, 2, 4])
    logprobs = torch.tensor([0.9, 0.04, 0.03, 0.02]).log().expand(output, 4).half()
    if features is None:
        table = torch.randn(50, SHAPE.feature_width, generator=torch.Generator().manual_seed(77))
        noise = torch.randn(prompt + output - 1, SHAPE.feature_width, generator=generator)
        features = (table[torch.tensor(tokens[:-1])] + 0.1 * noise).half()
    request = GenerationRequest(
        f"r{seed}", tuple(tokens[:prompt]), SamplingParams(temperature=temperature), arrived=time.monotonic()
    )
    return FinishedRecord(
        request=request,
        domain=domain,
        assignment=Assignment(domain),
        output_ids=tuple(tokens[prompt:]),
        finish=FinishReason.STOP,
        rounds=tuple(Round(2, 1, 2, 2, "eagle", 0) for _ in range(output // 2)),
        versions=(0,),
        evidence=TargetEvidence(ids.int(), logprobs),
        features=features,
        seconds=1.0,
        routing_wait=0.0,
        first_token_seconds=0.1,
        total_seconds=1.0,
    )
