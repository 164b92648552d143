"""The embedded engine over a tiny target whose tokens are bytes, with a router that needs no model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from osd.serve.load import build_target
from router.bodies.api import EngineOptions
from router.bodies.embedded import Engine
from router.config import PolydraftConfig
from tests.router.fakes import WordEncoder
from tests.tiny import tiny_model

SPECIAL = ("<pad>", "<bos>", "<eos>")
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
CONFIG: dict[str, Any] = {
    "target": {"model": "tiny", "device": "cpu"},
    "engine": {"slots": 4, "max_length": 256},
    "drafts": {"sources": ["lookup", "ngram"]},
    "domains": [
        {"name": "boats", "description": "boats", "examples": ["boat sail harbour", "boat anchor sail"]},
        {"name": "trees", "description": "trees", "examples": ["tree leaf forest", "tree root leaf"]},
    ],
}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, so that characters beyond ASCII are cut by token borders."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: at for at, token in enumerate([*SPECIAL, *alphabet])}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    names = dict(zip(("pad_token", "bos_token", "eos_token"), SPECIAL, strict=True))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, **names)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@contextmanager
def tiny_engine(**options: Any) -> Iterator[Engine]:
    """An engine of :data:`CONFIG`; ``options`` are those of :class:`EngineOptions`."""
    target = build_target(tiny_model("llama", vocab_size=len(SPECIAL) + 256), name="tiny")
    config = PolydraftConfig.model_validate(CONFIG)
    with (
        patch("router.mind.router.SentenceEncoder", lambda *_, **__: WordEncoder()),
        Engine(config, target, byte_tokenizer(), EngineOptions(**{"keep_state": False, **options})) as engine,
    ):
        yield engine
