"""What the soak runs on: a tiny target that can be poisoned, its tokenizer, drafts and router."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from drafts.bank import ExpertBank
from drafts.kinds.eagle import EagleSource
from drafts.kinds.lookup import LookupSource
from drafts.kinds.ngram import NgramSource
from drafts.mixture import Mixture
from drafts.registry import Registry
from drafts.trunk import HeadShape, Trunk
from drafts.versions import VersionFollower
from osd.serve.load import build_target
from osd.types import Assignment, GenerationRequest

VOCAB = 128
RAISES, NO_NUMBERS, FIRST = 3, 4, 5
"""A prompt that begins with ``RAISES`` breaks its pass, with ``NO_NUMBERS`` has NaN logits; the rest use
ids from ``FIRST`` on."""


class PoisonedTarget:
    """The tiny target; a prompt's first token may break its pass or its logits."""

    def __init__(self, plain: Any) -> None:
        self._plain = plain

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)

    def forward(self, cache: Any, rows: Any) -> Any:
        """The target's own pass, unless a row of it is poisoned."""
        begins = [row.tokens[0] if row.start == 0 else -1 for row in rows]
        if RAISES in begins:
            raise RuntimeError("a poisoned row")
        output = self._plain.forward(cache, rows)
        for row, begin, offset in zip(rows, begins, output.offsets, strict=True):
            if begin == NO_NUMBERS:
                output.logits[offset : offset + len(row.tokens) - row.logits_from] = float("nan")
        return output


class Told:
    """Gives every request the domain it names."""

    def assign(self, request: GenerationRequest) -> Future[Assignment]:
        """A verdict that is there at once."""
        future: Future[Assignment] = Future()
        future.set_result(Assignment(request.domain or "base"))
        return future


def tiny_target(seed: int) -> Any:
    """Three Llama layers of random weights, large enough that attention and position matter."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return PoisonedTarget(build_target(model, name="tiny"))


class Letters:
    """One character a token."""

    all_special_ids = (0, 1, 2)

    def decode(self, ids: list[int], **_: Any) -> str:
        """The letters of ``ids``."""
        return "".join(chr(0x100 + i) for i in ids if i > 2)


def tiny_drafts(model: Any, registry: Registry, seed: int) -> tuple[ExpertBank, Mixture]:
    """Lookup, n-gram and eagle drafts for the target, the eagle's versions followed in ``registry``."""
    shape = HeadShape(32, 48, 4, 2, 8, 1e-6, 10000.0, model.feature_layers, VOCAB)
    trunk = Trunk.fresh(shape, torch.arange(FIRST, VOCAB, 2), seed=seed)
    bank = ExpertBank(trunk, rank=2)
    eagle = EagleSource(
        trunk=trunk,
        bank=bank,
        embedding=model.embedding,
        output_weight=model.output_weight,
        time_products=False,
    )
    drafter = Mixture({"lookup": LookupSource(), "ngram": NgramSource(), "eagle": eagle})
    for domain in ("base", "math"):
        drafter.add_domain(domain)
    drafter.versions = VersionFollower(registry, bank)
    return bank, drafter
