"""The lossless check: every token of an answer must be the target's own choice.

One plain Hugging Face forward over prompt and answer gives the target's scores at every position. For
greedy answers the check shares no code with the engine: neither its forward pass, nor its cache, nor its
verification. For sampled ones it applies the drafter-invariant rule with the request's own seed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from drafts.errors import IntegrityError
from osd.serve.noise import RequestNoise
from osd.serve.ties import judge, tie_bound
from osd.types import FinishReason, SamplingParams
from router.app.arms import ReplayEngine
from router.app.inflight import Served
from router.bodies.api import Completion


@dataclass
class Verification:
    """Counts of the check; ``mismatched`` counts requests, ``ties``, ``borders`` and ``tokens`` count tokens.

    A tie is a token whose (perturbed) score lies within the bound of the choice's, a border one that is
    chosen once a token within the bound of a top-k, top-p or min-p border changes sides. Both are
    reported and no mismatch: rounding explains them (``docs/exactness.md``).
    """

    checked: int = 0
    mismatched: int = 0
    ties: int = 0
    borders: int = 0
    tokens: int = 0
    mismatches: list[dict[str, Any]] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """The ``verify`` part of a result; the first ten mismatches in detail."""
        return {
            "checked": self.checked,
            "mismatched": self.mismatched,
            "ties": self.ties,
            "borders": self.borders,
            "tokens": self.tokens,
            "ties_share": self.ties / self.tokens if self.tokens else 0.0,
            "mismatches": self.mismatches[:10],
        }


def spread(count: int, among: int) -> list[int]:
    """``count`` places spread evenly over ``range(among)``, all of them when there are not more."""
    if count >= among:
        return list(range(among))
    return [at * among // count for at in range(count)]


def verify(
    engine: ReplayEngine,
    served: Sequence[Served],
    count: int,
    max_tokens: int,
    on_checked: Callable[[int, int], None] = lambda done, total: None,
    temperature: float = 0.0,
) -> Verification:
    """Check ``count`` answered requests, spread evenly over the run in file order.

    Args:
        engine: What served them.
        served: The requests.
        count: How many to check.
        max_tokens: Their limit.
        on_checked: Told how many of how many are done.
        temperature: Theirs; above 0 the seed of each request gives its noise.
    """
    result = Verification()
    answered = sorted((s for s in served if s.completion is not None), key=lambda s: s.item.index)
    chosen = [answered[at] for at in spread(count, len(answered))]
    engine.set_mode(sources=(), learn=False, k=None)
    model = engine.reference()
    for done, item in enumerate(chosen, start=1):
        assert item.completion is not None
        _check_one(engine, model, item, item.completion, max_tokens, temperature, result)
        on_checked(done, len(chosen))
    return result


def _check_one(
    engine: ReplayEngine,
    model: Any,
    served: Served,
    completion: Completion,
    max_tokens: int,
    temperature: float,
    result: Verification,
) -> None:
    prompt = engine.prompt_ids(messages=served.item.messages)
    if len(prompt) != completion.prompt_tokens:
        raise IntegrityError(
            f"request {served.item.index}: {completion.prompt_tokens} != {len(prompt)} prompt tokens"
        )
    answer = completion.token_ids
    ending = _wrong_ending(completion, engine.eos_token_ids, max_tokens, engine.max_length)
    faults: list[dict[str, Any]] = [] if ending is None else [{"reason": ending}]
    if answer:
        scores = engine.compute(partial(_scores, model, (*prompt, *answer), len(answer)))
        bound = tie_bound(getattr(model, "dtype", torch.float32))
        params = SamplingParams.model_validate({"temperature": temperature, "seed": served.seed})
        noise = RequestNoise(served.seed, vocab_size=scores.shape[-1]) if temperature else None
        for position in _suspects(scores, answer, temperature):
            found = judge(scores[position], answer[position], params, noise, position, bound)
            result.ties += found.kind == "gap"
            result.borders += found.kind == "border"
            if found.kind == "different":
                reason = "not the sample of its seed" if temperature else "not the argmax"
                numbers = {"position": position, "token": answer[position], "argmax": found.chosen}
                faults.append({"reason": reason, **numbers, "gap": found.gap})
    result.checked += 1
    result.tokens += len(answer)
    if faults:
        result.mismatched += 1
        result.mismatches.append({"index": served.item.index, **faults[0]})


def _suspects(scores: torch.Tensor, answer: Sequence[int], temperature: float) -> Sequence[int]:
    """Positions to judge one by one: where a greedy token is not the maximum, every one of a sample."""
    if temperature:
        return range(len(answer))
    found: list[int] = torch.nonzero(scores.argmax(-1).cpu() != torch.tensor(answer)).flatten().tolist()
    return found


def _wrong_ending(completion: Completion, eos: frozenset[int], max_tokens: int, limit: int) -> str | None:
    """Why the end of an answer without stop strings is wrong, ``None`` if it is right.

    ``limit`` is the most tokens that prompt and answer may have together.
    """
    answer = completion.token_ids
    if any(token in eos for token in answer[:-1]):
        return "goes on past an end token"
    if len(answer) > max_tokens:
        return f"longer than {max_tokens} tokens"
    ended = bool(answer) and answer[-1] in eos
    if completion.finish_reason == FinishReason.STOP and not ended:
        return "stopped without an end token"
    if completion.finish_reason == FinishReason.TIMEOUT:
        return None
    if not ended and len(answer) < max_tokens and completion.prompt_tokens + len(answer) < limit:
        return f"ended before {max_tokens} tokens without an end token"
    return None


def _scores(model: Any, tokens: Sequence[int], last: int) -> torch.Tensor:
    """Scores ``[last, V]`` of the rows that choose the last ``last`` tokens, float32."""
    ids = torch.tensor([list(tokens)], device=model.device)
    keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
    with torch.inference_mode():
        output = model(ids, use_cache=False, **({"logits_to_keep": last + 1} if keeps else {}))
    scores: torch.Tensor = output.logits[0, -last - 1 : -1].float()
    return scores
