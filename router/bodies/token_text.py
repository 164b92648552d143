"""The bytes behind one token, for answers that list their tokens."""

from __future__ import annotations

import re
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

from osd.serve.detokenize import special_ids

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"
"""How SentencePiece vocabularies write a space."""


class TokenBytes:
    """Bytes of single tokens, such that the joined bytes of an output are those of its text.

    A token may hold a part of a character, so that it has bytes and no text of its own. Byte-level BPE
    (GPT-2) writes every byte as one printable character; SentencePiece vocabularies write spaces as U+2581
    and rare bytes as ``<0xNN>``. Their decoders drop a space at the very start of a text, which a single
    token cannot know: there the first token has one byte more than the text. Special tokens, which text
    leaves out, give their name.

    Args:
        tokenizer: A transformers tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self._added = {index: str(token.content) for index, token in added.items()}
        self.special = special_ids(tokenizer)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        by_byte = backend is not None and "ByteLevel" in repr(backend.decoder)
        self._bytes = {letter: byte for byte, letter in bytes_to_unicode().items()} if by_byte else None

    def __call__(self, token_id: int) -> bytes:
        """Bytes of a token; none for an id that the tokenizer does not know."""
        if token_id in self._added:
            return self._added[token_id].encode()
        piece = self._tokenizer.convert_ids_to_tokens(token_id) if token_id < len(self._tokenizer) else None
        if piece is None:
            return b""
        if self._bytes is not None and all(letter in self._bytes for letter in piece):
            return bytes(self._bytes[letter] for letter in piece)
        if (match := _BYTE_TOKEN.fullmatch(piece)) is not None:
            return bytes([int(match[1], 16)])
        return str(piece).replace(_SPACE, " ").encode()
