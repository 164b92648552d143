"""An engine over a tiny target, with drafts that say what a test wants them to say."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import cache
from typing import Any

import torch

from drafts.kinds.base import DraftRow, MemorySource, Source
from drafts.mixture import Mixture
from osd.serve.controller import StepCosts
from osd.serve.engine import Engine, EngineSettings
from osd.serve.load import build_target
from osd.serve.row import Outcome, Submission
from osd.serve.target import PassRow
from osd.types import Assignment, FinishedRecord, GenerationRequest, SamplingParams, TokenLogprob
from tests.tiny import VOCAB, tiny_model

LIMIT = 8
"""Most tokens a script is asked for."""


class WidePassesAreFree(StepCosts):
    """Prices at which proposals always pay, so that what a test sees does not hang on the machine's speed."""

    def __init__(self) -> None:
        super().__init__({1: 1000.0, 256: 1001.0})

    def record(self, rows: int, tokens: int, milliseconds: float, beside: int = 0) -> None:
        pass


class LetterTokenizer:
    """Every id is one character, so text and tokens can be compared by eye."""

    all_special_ids = (0, 1, 2)

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return "".join(chr(0x100 + i) for i in ids if i not in self.all_special_ids)


class Forced(MemorySource):
    """Proposes from a script: ``script(row, limit)`` returns the tokens to propose in this step."""

    name = "forced"

    def __init__(self, script: Callable[[DraftRow, int], Sequence[int]]) -> None:
        self.script = script

    def guesses(self, row, path):
        if not path:
            row.scratch[self.name] = list(self.script(row, LIMIT))
        tokens = row.scratch[self.name]
        if list(path) != tokens[: len(path)] or len(path) >= len(tokens):
            return []
        return [(tokens[len(path)], 0.9)]


class Branching(Forced):
    """Names wrong tokens beside the scripted ones, so that every proposal is a tree.

    The scripted token comes last, and each position also names one of its neighbours.
    """

    def guesses(self, row, path):
        found = super().guesses(row, path)
        return [*(((token + 1) % VOCAB, 0.9) for token, _ in found), *found]


class Told:
    """An assigner that gives every request the domain it names, or ``base``."""

    def assign(self, request: GenerationRequest) -> Future[Assignment]:
        future: Future[Assignment] = Future()
        future.set_result(Assignment(request.domain or "base", 1.0, None, request.domain is not None))
        return future


@cache
def target(kind: str = "llama"):
    return build_target(tiny_model(kind), name=kind)


def make_engine(source: Source | None = None, kind: str = "llama", **changes: Any) -> Engine:
    settings = EngineSettings(
        prefill_chunk=changes.pop("prefill_chunk", 16),
        fixed_k=changes.pop("fixed_k", 4),
        evidence_k=changes.pop("evidence_k", 0),
        prefix_cache_tokens=changes.pop("prefix_cache_tokens", 0),
        max_tokens_in_flight=changes.pop("max_tokens_in_flight", None),
        request_timeout=changes.pop("request_timeout", None),
    )
    drafter = changes.pop("drafter", None)
    if drafter is None and source is not None:
        drafter = Mixture({source.name: source})
    options: dict[str, Any] = {"slots": 4, "max_length": 256, "assigner": Told(), **changes}
    return Engine(
        target=options.pop("target", None) or target(kind),
        tokenizer=options.pop("tokenizer", None) or LetterTokenizer(),
        costs=options.pop("costs", None) or WidePassesAreFree(),
        drafter=drafter,
        settings=settings,
        **options,
    )


class Client:
    """Submits to an engine and drives it, auditing the books after every step."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.outcomes: dict[str, Outcome] = {}
        self.texts: dict[str, str] = {}
        self.logprobs: dict[str, list[TokenLogprob]] = {}

    def submit(
        self,
        name: str,
        prompt: Sequence[int],
        domain: str | None = None,
        store: bool = True,
        arrived: float = 0.0,
        **sampling: Any,
    ) -> None:
        params = SamplingParams(**{"max_tokens": 24, **sampling})
        request = GenerationRequest(
            name, tuple(prompt), params, domain=domain, store=store, arrived=arrived or time.monotonic()
        )
        self.texts[name] = ""
        self.logprobs[name] = []

        def on_tokens(text: str, ids: tuple[int, ...], logprobs: tuple[TokenLogprob, ...]) -> None:
            assert len(logprobs) == (0 if params.logprobs is None else len(ids))
            self.texts[name] += text
            self.logprobs[name] += logprobs

        def on_done(outcome: Outcome) -> None:
            self.outcomes[name] = outcome

        self.engine.intake.put(Submission(request, on_tokens, on_done))

    def run(self, steps: int = 10_000) -> dict[str, tuple[int, ...]]:
        for _ in range(steps):
            worked = self.engine.step()
            self.engine.check()
            if not worked and not self.engine.rows and not len(self.engine.intake):
                break
        return {name: outcome.record.output_ids for name, outcome in self.outcomes.items()}


def prompts(count: int, seed: int = 0, lengths: Sequence[int] = (5,)) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(3, VOCAB, (lengths[i % len(lengths)],), generator=generator).tolist()
        for i in range(count)
    ]


@torch.no_grad()
def greedy(prompt: Sequence[int], count: int, kind: str = "llama", stop: Sequence[int] = (2,)) -> list[int]:
    """The plain model's greedy answer by cache-free forwards: the reference for everything."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(target(kind).reference(torch.tensor([tokens])).logits[0, -1].argmax()))
        if tokens[-1] in stop:
            break
    return tokens[len(prompt) :]


def check_counters(record: FinishedRecord) -> None:
    """The counters of a record's rounds agree with one another and with its tokens."""
    assert sum(r.emitted for r in record.rounds) == len(record.output_ids)
    for item in record.rounds:
        assert 0 <= item.accepted <= item.proposed
        assert item.accepted <= item.tested <= item.accepted + 1
        assert item.emitted <= item.accepted + 1


def check_kept(record: FinishedRecord, prompt: Sequence[int]) -> None:
    """Evidence (eight a position) and features of a record are the target's own on its final text."""
    tokens = [*prompt, *record.output_ids]
    with torch.no_grad():
        logits = target().reference(torch.tensor([tokens])).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1).topk(8)
    assert torch.equal(record.evidence.top_ids.long(), expected.indices)
    torch.testing.assert_close(record.evidence.top_logprobs.float(), expected.values, atol=5e-3, rtol=5e-3)
    cache = target().make_cache(1, 64, keep_features=True)
    cache.acquire()
    target().forward(cache, [PassRow(0, 0, tokens[:-1])])
    torch.testing.assert_close(
        record.features.float(), cache.features[0, : len(tokens) - 1], atol=2e-2, rtol=2e-2
    )
