from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from router.bodies.token_text import TokenBytes
from tests.router.tiny_engine import byte_tokenizer

CORPUS = [
    "the harbour, the boat and the café",
    "naïve 漢字 🙂🙂 text  with\tspaces\n\n",
    "def f(x):\n    return x",
] * 9


def merged() -> Any:
    """Byte-level BPE with merges, as GPT-2's."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=["<|end|>"])
    inner.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|end|>")


def sentencepiece() -> Any:
    """Spaces as U+2581 and unknown bytes as ``<0xNN>``, as Llama 2's."""
    pieces = [
        "<unk>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "▁the",
        "a",
        "b",
        "t",
        "h",
        "e",
    ]
    merges = [("t", "h"), ("th", "e"), ("▁", "the")]
    vocabulary = {piece: at for at, piece in enumerate([*pieces, "th", "the"])}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", eos_token="</s>")


BYTE_LEVEL = [byte_tokenizer(), merged()]
SENTENCEPIECE = sentencepiece()


@pytest.mark.parametrize("tokenizer", BYTE_LEVEL, ids=["bytes", "merged"])
@given(text=st.text(st.characters(codec="utf-8"), max_size=40))
def test_a03_joined_bytes_of_tokens_are_those_of_the_text(tokenizer: Any, text: str) -> None:
    token_bytes = TokenBytes(tokenizer)
    ids = tokenizer(text)["input_ids"]
    assert b"".join(map(token_bytes, ids)) == text.encode()


@given(text=st.text(st.characters(codec="utf-8", exclude_characters="▁"), max_size=40))
def test_a03_sentencepiece_tokens_have_one_space_before_the_text(text: str) -> None:
    token_bytes = TokenBytes(SENTENCEPIECE)
    ids = SENTENCEPIECE(text, add_special_tokens=False)["input_ids"]
    assert b"".join(map(token_bytes, ids)) == (b" " + text.encode() if text else b"")


def test_special_tokens_give_their_name_and_unknown_ids_nothing() -> None:
    for tokenizer, name in ((BYTE_LEVEL[1], "<|end|>"), (SENTENCEPIECE, "</s>")):
        token_bytes = TokenBytes(tokenizer)
        assert token_bytes(tokenizer.eos_token_id) == name.encode()
        assert tokenizer.eos_token_id in token_bytes.special
        assert token_bytes(len(tokenizer) + 5) == b""


def test_most_tokens_of_a_trained_vocabulary_are_text() -> None:
    token_bytes = TokenBytes(BYTE_LEVEL[1])
    assert b" the" in {token_bytes(token) for token in range(len(BYTE_LEVEL[1]))}
