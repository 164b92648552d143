"""What exactness is tested with: a target that remembers its logits by text, and a draft that is swapped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from drafts.mixture import Mixture
from drafts.version import Swap
from osd.serve.engine import Engine
from osd.serve.grammar import GrammarCompiler
from osd.serve.load import build_target
from osd.serve.noise import RequestNoise
from osd.serve.processor import LogitsProcessor, processes_logits
from osd.serve.strict_check import same_bits
from osd.serve.ties import Judgement, judge
from osd.types import SamplingParams
from tests.osd.engine_rig import Branching, Client, Forced, make_engine
from tests.tiny import VOCAB, tiny_model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
BOUNDS = {"float32": 1e-4, "bfloat16": 0.125}
"""What A14 allows here; below the general bound, since the tiny models' scores are below ten."""

UNPROCESSED = {
    name: SamplingParams.model_fields[name].get_default(call_default_factory=True)
    for name in (
        *("logit_bias", "min_tokens", "response_format"),
        *("repetition_penalty", "presence_penalty", "frequency_penalty"),
    )
}
"""Parameters under which scores are used as they are."""


@cache
def exact_target(numerics: str, dtype: str = "float32", kind: str = "llama") -> Any:
    return build_target(tiny_model(kind).to(DTYPES[dtype]), name=kind, numerics=numerics)


@cache
def text_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, as many as the tiny vocabulary holds; ASCII, of which JSON is made, first."""
    alphabet = sorted(
        pre_tokenizers.ByteLevel.alphabet(), key=lambda byte: (not byte.isascii(), byte != "Ġ", byte)
    )
    kept = alphabet[: VOCAB - 3]
    vocabulary = {token: at for at, token in enumerate(["<pad>", "<bos>", "<eos>", *kept])}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )


class Watched:
    """A target that keeps the logits of every text it was asked about, verified branches included."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.engine: Engine | None = None
        self.seen: dict[tuple[int, ...], list[torch.Tensor]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def forward(self, cache, rows):
        output = self._inner.forward(cache, rows)
        for row, offset in zip(rows, output.offsets, strict=True):
            owner = next(item for item in self.engine.rows if item.slot == row.slot)
            texts = [(*owner.draft.tokens[: row.start], row.tokens[0])]
            for node, token in enumerate(row.tokens[1:]):
                texts.append((*texts[node if row.parents is None else row.parents[node] + 1], token))
            for at, text in enumerate(texts[row.logits_from :]):
                self.seen.setdefault(text, []).append(output.logits[offset + at].clone())
        return output


class Publisher:
    """Stands for what follows versions: adopts a new one at each of the named steps."""

    def __init__(self, steps: Sequence[int]) -> None:
        self.steps = set(steps)
        self.step = self.version = 0

    def adopt(self) -> list[Swap]:
        self.step += 1
        if self.step not in self.steps:
            return []
        self.version += 1
        return [Swap("base", self.version - 1, self.version, "test")]

    def served(self, domain: str) -> int:
        return self.version


@dataclass
class Asked:
    """One request: prompt and parameters."""

    prompt: tuple[int, ...]
    sampling: dict[str, Any] = field(default_factory=dict)

    def key(self) -> tuple[Any, ...]:
        return self.prompt, repr(sorted(self.sampling.items()))


@dataclass
class Alone:
    """What a request gets alone, without drafts."""

    ids: tuple[int, ...]
    logits: dict[tuple[int, ...], torch.Tensor]


_alone: dict[tuple[Any, ...], Alone] = {}


def alone(asked: Asked, numerics: str, dtype: str = "float32") -> Alone:
    """The reference: its tokens and the logits of every position, by text."""
    key = (numerics, dtype, asked.key())
    if key not in _alone:
        engine, watched = watched_engine(None, numerics, dtype, fixed_k=0, slots=1)
        client = Client(engine)
        client.submit("a", asked.prompt, **asked.sampling)
        ids = client.run()["a"]
        _alone[key] = Alone(ids, {text: found[0] for text, found in watched.seen.items()})
    return _alone[key]


def watched_engine(
    source: Forced | Mixture | None,
    numerics: str,
    dtype: str = "float32",
    swaps: Sequence[int] = (),
    **changes: Any,
) -> tuple[Engine, Watched]:
    """An engine whose target is watched; ``swaps`` are the steps at which a lone source changes version."""
    watched = Watched(exact_target(numerics, dtype))
    drafter = source if isinstance(source, Mixture) else None
    if source is not None and drafter is None:
        drafter = Mixture({source.name: source}, versions=Publisher(swaps) if swaps else None)
    options = {"tokenizer": text_tokenizer(), "max_length": 320, **changes}
    engine = make_engine(drafter=drafter, target=watched, **options)
    watched.engine = engine
    return engine, watched


def marked(truth: dict[tuple[int, ...], Sequence[int]], marks: Sequence[str], tree: bool) -> Forced:
    """Proposes right (R) and wrong (W) tokens as ``marks`` says, step by step; every version another part."""

    def script(row, limit):
        answer = truth.get(tuple(row.tokens[: row.prompt_length]), ())
        at = row.output_length
        mark = marks[at % len(marks)]
        right = [answer[at + i] if at + i < len(answer) else 3 for i in range(len(mark.strip("-")))]
        return [t if m == "R" else (t + 1) % VOCAB for t, m in zip(right, mark, strict=False)][:limit]

    return (Branching if tree else Forced)(script)


def first_difference(
    asked: Asked, ids: Sequence[int], numerics: str, dtype: str
) -> tuple[int, Judgement] | None:
    """Where ``ids`` leaves the reference, judged by the reference's own logits there; ``None`` if nowhere.

    An answer that ends early agrees with the reference as far as it goes.
    """
    reference = alone(asked, numerics, dtype)
    for at, (token, expected) in enumerate(zip(ids, reference.ids, strict=False)):
        if token != expected:
            logits = reference.logits[(*asked.prompt, *reference.ids[:at])]
            params = SamplingParams(**asked.sampling)
            noise = RequestNoise(params.seed, vocab_size=VOCAB) if params.temperature else None
            logits = processed(logits, asked, reference.ids[:at])
            return at, judge(logits, token, params.model_copy(update=UNPROCESSED), noise, at, BOUNDS[dtype])
    return None


def processed(logits: torch.Tensor, asked: Asked, output: Sequence[int]) -> torch.Tensor:
    """Raw scores after ``output`` as the request's bias, penalties, least length and grammar leave them."""
    params = SamplingParams(**asked.sampling)
    if not processes_logits(params):
        return logits
    grammar = None
    if params.response_format is not None:
        grammar = GrammarCompiler(text_tokenizer(), VOCAB, {2}).compile(params.response_format)
    processor = LogitsProcessor(params, asked.prompt, {2}, VOCAB, grammar=grammar)
    for token in output:
        processor.advance(token)
    return processor.apply(logits)


def compare_bits(watched: Watched, reference: Alone) -> int:
    """How many readings of the reference's texts there were; all of them must be the same bits."""
    compared = 0
    for text, expected in reference.logits.items():
        for found in watched.seen.get(text, ()):
            assert same_bits(found, expected), f"logits differ after {len(text)} tokens"
            compared += 1
    return compared
