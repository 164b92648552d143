"""The arms of transformers: ``model.generate`` plain, with prompt lookup, and assisted."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from peer_arms.in_engine import rest
from peer_arms.measured import Answer, BlockRun, Prompt
from router.app.arms import ReplayEngine

LOOKUP_TOKENS = 10
"""``prompt_lookup_num_tokens``, the value that transformers' own guide uses."""


class Watch:
    """A stopping criterion that stops nothing: notes when each step ended and how long the text was."""

    def __init__(self) -> None:
        self.begin = time.perf_counter()
        self.steps: list[tuple[float, int]] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        """Note a step; nobody is finished on its account."""
        self.steps.append((time.perf_counter() - self.begin, input_ids.shape[1]))
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


@dataclass
class GenerateArm:
    """``model.generate`` over the engine's own reference model, on the engine's thread.

    Args:
        engine: Whose target it runs; at rest meanwhile.
        batch: Prompts a call, padded on the left; 1 answers them in turn.
        options: Further arguments of ``generate``.
        note: How it is run.
    """

    engine: ReplayEngine
    batch: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    note: str = ""

    def run(self, block: Sequence[Prompt], max_tokens: int) -> BlockRun:
        """Answer the block, ``batch`` prompts a call."""
        rest(self.engine)
        model, eos = self.engine.reference(), sorted(self.engine.eos_token_ids)
        answers: dict[int, Answer] = {}
        begin = time.perf_counter()
        for at in range(0, len(block), self.batch):
            group = block[at : at + self.batch]
            work = partial(generate, model, [p.ids for p in group], max_tokens, eos, self.options)
            for prompt, answer in zip(group, self.engine.compute(work), strict=True):
                answers[prompt.index] = answer
        return BlockRun(answers, time.perf_counter() - begin)

    def close(self) -> None:
        """Nothing to give back."""


def generate(
    model: Any, prompts: Sequence[Sequence[int]], max_tokens: int, eos: list[int], options: dict[str, Any]
) -> list[Answer]:
    """Greedy answers of one batch; in a batch, an answer is only at hand when all are."""
    longest = max(map(len, prompts))
    pad = eos[0] if eos else 0
    ids = torch.tensor([[pad] * (longest - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    watch = Watch()
    with torch.inference_mode():
        output = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=max_tokens,
            eos_token_id=eos or None,
            pad_token_id=pad,
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
            stopping_criteria=[watch],
            **options,
        )
    seconds = time.perf_counter() - watch.begin
    found = []
    for row in output[:, longest:].tolist():
        tokens = until(row, eos)
        passes = sum(1 for _, length in watch.steps if length - longest < len(tokens)) + 1
        found.append(Answer(tokens, seconds, watch.steps[0][0], min(passes, len(watch.steps))))
    return found


def until(tokens: Sequence[int], eos: Sequence[int]) -> tuple[int, ...]:
    """The tokens up to the first end token, which belongs to the answer; padding behind it does not."""
    ends = [place for place, token in enumerate(tokens) if token in eos]
    return tuple(tokens[: ends[0] + 1] if ends else tokens)


def first_layers(model: Any, count: int) -> Any:
    """A causal model of the first ``count`` layers, sharing every weight with ``model``."""
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = count
    with torch.device("meta"):
        small = type(model)(config)
    small.model.embed_tokens = model.model.embed_tokens
    small.model.layers = torch.nn.ModuleList(list(model.model.layers)[:count])
    small.model.norm = model.model.norm
    small.model.rotary_emb = model.model.rotary_emb
    small.lm_head = model.lm_head
    small.generation_config = copy.deepcopy(model.generation_config)
    return small.eval()


def transformers_arm(name: str, engine: ReplayEngine, concurrency: int, layers: int) -> GenerateArm:
    """The arm called ``name`` at a concurrency; ``layers`` are those of the assistant."""
    in_turn = "" if concurrency == 1 else "; one after the other, since transformers refuses larger batches"
    makers: dict[str, Callable[[], GenerateArm]] = {
        "generate": lambda: GenerateArm(
            engine,
            concurrency,
            note="model.generate, one after the other"
            if concurrency == 1
            else f"model.generate, static batches of {concurrency}, padded on the left",
        ),
        "prompt_lookup": lambda: GenerateArm(
            engine,
            options={"prompt_lookup_num_tokens": LOOKUP_TOKENS},
            note=f"model.generate, prompt_lookup_num_tokens={LOOKUP_TOKENS}{in_turn}",
        ),
        "assisted": lambda: GenerateArm(
            engine,
            options={"assistant_model": first_layers(engine.reference(), layers)},
            note=f"model.generate, the target's own first {layers} layers as assistant{in_turn}",
        ),
    }
    return makers[name]()
