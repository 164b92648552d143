"""What of a prompt the router reads: all of a short one, and of a long one what is asked of it."""

from __future__ import annotations

import re
import unicodedata

LONG_WORDS = 56
"""Prompts of at most this many words are read whole."""

_HEAD_WORDS, _TAIL_WORDS = 32, 16
_EDGE_CHARS = 4000
_WORD = re.compile(r"\S+")
_DELIMITER = re.compile(r"[:\n](?=\s|$)")
_ELLIPSIS = " … "


def is_blank(text: str) -> bool:
    """Whether a text has nothing to read: only spaces, control, format or unassigned characters."""
    return all(unicodedata.category(c)[0] in "ZC" for c in text)


def views(text: str) -> tuple[str, ...]:
    """The one or two texts whose embeddings are averaged into the prompt's own.

    The first is the prompt's head and tail. A long prompt with a recognisable instruction has a
    second one, the instruction alone: a pasted document would otherwise outweigh the sentence that
    says what to do with it (summaries from five examples: recall 0.75 with the first view alone,
    1.00 with both). Both together survive a preamble or a story around the prompt, which the
    instruction view alone does not. At most a few dozen words are ever embedded, whatever the
    length of the prompt.
    """
    text = _edges(text.strip())
    words = list(_WORD.finditer(text))
    if len(words) <= LONG_WORDS:
        return (text,)
    head_tail = text[: words[_HEAD_WORDS - 1].end()] + _ELLIPSIS + text[words[-_TAIL_WORDS].start() :]
    instruction = _instruction(text, words)
    return (head_tail, instruction) if instruction else (head_tail,)


def _edges(text: str) -> str:
    """A huge text cut to its two ends, so that the work stays bounded."""
    return text if len(text) <= 2 * _EDGE_CHARS else f"{text[:_EDGE_CHARS]}\n{text[-_EDGE_CHARS:]}"


def _instruction(text: str, words: list[re.Match[str]]) -> str:
    """What precedes the head's last colon or line end, and a short last line; empty if neither."""
    head = text[: words[_HEAD_WORDS].start()]
    ends = [match.start() for match in _DELIMITER.finditer(head)]
    parts = [head[: ends[-1]].strip()] if ends else []
    lines = [line for line in text.splitlines() if line.strip()]
    if len(lines) > 1 and len(lines[-1].split()) <= LONG_WORDS // 2:
        parts.append(lines[-1].strip())
    return _ELLIPSIS.join(parts)
