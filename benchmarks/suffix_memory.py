"""Suffix trees as a memory (SuffixDecoding, arXiv 2411.04975), to compare the back-off counts with.

Requests are served one after another by recorded answers: every request is scored before it is learned.
Own text (prompt and output so far) and earlier answers are two trees, as in the paper. ``_Suffix`` is a
plain one; ``_Arctic`` is Snowflake's, where the package ``arctic-inference`` (C++) can be imported.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, Protocol

from drafts.config import NgramConfig
from drafts.kinds.base import DraftRow
from drafts.kinds.ngram import NgramSource

Text = tuple[list[int], int]
"""Tokens of prompt and answer, and the prompt's length."""

LEAST = 0.1
"""Tokens less probable than this are not proposed, by any memory."""


class Memory(Protocol):
    """What a run needs of a memory that drafts chains."""

    def start(self, prompt: Sequence[int]) -> None:
        """A request begins."""

    def add(self, tokens: Sequence[int]) -> None:
        """Its answer goes on with ``tokens``."""

    def propose(self, text: Sequence[int], limit: int) -> Sequence[int]:
        """A chain of at most ``limit`` tokens after ``text``."""

    def finish(self, text: Sequence[int], prompt_length: int) -> None:
        """The request ended; its answer is learned."""

    def size(self) -> int:
        """Bytes of what was learned of finished requests."""


class _BackOff:
    """The project's memory with the request's own text, as it serves one domain."""

    def __init__(self, config: NgramConfig | None = None) -> None:
        self.source = NgramSource(config)

    def start(self, prompt: Sequence[int]) -> None:
        self.row = DraftRow("r", self.source.base, list(prompt), len(prompt))

    def add(self, tokens: Sequence[int]) -> None:
        self.row.tokens.extend(tokens)

    def propose(self, text: Sequence[int], limit: int) -> Sequence[int]:
        return self.source.propose([self.row], [limit])[0].tokens

    def finish(self, text: Sequence[int], prompt_length: int) -> None:
        self.source.finish(self.row)

    def size(self) -> int:
        return int(self.source.describe(self.source.base)["bytes"])


class _Node:
    """A context: how often it was seen, and what followed."""

    __slots__ = ("count", "next")

    def __init__(self) -> None:
        self.count = 0
        self.next: dict[int, _Node] = {}


class SuffixTree:
    """All substrings of up to ``depth`` tokens with their counts; a trie, not compressed."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.root = _Node()
        self._open: list[_Node] = []

    def begin(self) -> None:
        """The next token starts a new sequence."""
        self._open = []

    def extend(self, tokens: Sequence[int]) -> None:
        """Continue the present sequence."""
        for token in tokens:
            opened = []
            for node in [*self._open, self.root]:
                child = node.next.get(token)
                if child is None:
                    child = node.next[token] = _Node()
                child.count += 1
                opened.append(child)
            self._open = opened[1 - self.depth :]

    def best(self, text: Sequence[int], limit: int, factor: float) -> tuple[float, list[int]]:
        """The greatest sum of a chain's probabilities over all suffixes of ``text``, and that chain.

        A chain is at most ``factor`` times as long as the suffix it continues; of equals the longest wins.
        """
        found: tuple[float, list[int]] = 0.0, []
        for length in range(1, min(self.depth, len(text)) + 1):
            node: _Node | None = self.root
            for token in text[-length:]:
                node = node.next.get(token) if node is not None else None
            if node is None:
                break
            chain = _walk(node, min(limit, int(factor * length)))
            if chain[0] >= found[0]:
                found = chain
        return found

    def size(self) -> int:
        """Bytes of nodes and of their tables."""
        total, todo = 0, [self.root]
        while todo:
            node = todo.pop()
            total += sys.getsizeof(node) + sys.getsizeof(node.next) + sys.getsizeof(node.count)
            todo.extend(node.next.values())
        return total


class _Suffix:
    """Two suffix trees, of the own text and of earlier answers; the better chain wins."""

    def __init__(self, depth: int = 16, factor: float = 1.0) -> None:
        self.depth, self.factor = depth, factor
        self.learned = SuffixTree(depth)

    def start(self, prompt: Sequence[int]) -> None:
        self.own = SuffixTree(self.depth)
        self.own.extend(prompt)
        self.learned.begin()

    def add(self, tokens: Sequence[int]) -> None:
        self.own.extend(tokens)
        self.learned.extend(tokens)

    def propose(self, text: Sequence[int], limit: int) -> Sequence[int]:
        recent = text[-self.depth :]
        own, learned = (tree.best(recent, limit, self.factor) for tree in (self.own, self.learned))
        return own[1] if own[0] >= learned[0] else learned[1]

    def finish(self, text: Sequence[int], prompt_length: int) -> None:
        self.own = SuffixTree(self.depth)

    def size(self) -> int:
        return self.learned.size()


class _Arctic:
    """The suffix cache of ``arctic-inference``."""

    def __init__(self, depth: int = 64, factor: float = 1.0) -> None:
        from arctic_inference.suffix_decoding import SuffixDecodingCache

        self.factor, self.number = factor, 0
        self.cache: Any = SuffixDecodingCache(depth)

    def start(self, prompt: Sequence[int]) -> None:
        self.number += 1
        self.cache.start_request(self.number, list(prompt))

    def add(self, tokens: Sequence[int]) -> None:
        self.cache.add_active_response(self.number, list(tokens))

    def propose(self, text: Sequence[int], limit: int) -> Sequence[int]:
        draft = self.cache.speculate(
            self.number, text[-64:], limit, max_spec_factor=self.factor, min_token_prob=LEAST
        )
        return list(draft.token_ids)

    def finish(self, text: Sequence[int], prompt_length: int) -> None:
        self.cache.stop_request(self.number)

    def size(self) -> int:
        return int(self.cache._global_tree.estimate_memory())


def arms() -> dict[str, Memory]:
    """Fresh memories by name; chains as long as allowed, and no longer than the matched suffix."""
    found: dict[str, Memory] = {"back-off": _BackOff()}
    for name, factor in (("suffix", 4.0), ("suffix, match", 1.0)):
        found[name] = _Suffix(factor=factor)
        if find_spec("arctic_inference") is not None:
            found[f"arctic {name}"] = _Arctic(factor=factor)
    return found


def serve(memory: Memory, texts: Sequence[Text], depth: int) -> dict[str, float]:
    """τ of chains of ``depth``, microseconds of a proposal (mean and 95th percentile), bytes at the end."""
    tokens = passes = 0
    times: list[float] = []
    for text, prompt_length in texts:
        memory.start(text[:prompt_length])
        memory.add(text[prompt_length : prompt_length + 1])
        at = prompt_length + 1
        while at < len(text):
            seen = text[:at]
            begin = time.perf_counter()
            chain = memory.propose(seen, depth)
            times.append((time.perf_counter() - begin) * 1e6)
            step = text[at : at + 1 + right(chain, text[at:])]
            memory.add(step)
            at, tokens, passes = at + len(step), tokens + len(step), passes + 1
        memory.finish(text, prompt_length)
    return {
        "tau": tokens / max(passes, 1),
        "microseconds": statistics.fmean(times),
        "microseconds_p95": sorted(times)[int(0.95 * (len(times) - 1))],
        "bytes": memory.size(),
    }


def compare(texts: dict[str, list[Text]], depth: int) -> dict[str, dict[str, dict[str, float]]]:
    """:func:`serve` by label and memory, every request scored before it is learned."""
    return {
        label: {name: serve(memory, group, depth) for name, memory in arms().items()}
        for label, group in texts.items()
    }


def right(chain: Sequence[int], text: Sequence[int]) -> int:
    """How many leading tokens of ``chain`` the text repeats."""
    count = 0
    while count < min(len(chain), len(text)) and chain[count] == text[count]:
        count += 1
    return count


def _walk(node: _Node, limit: int) -> tuple[float, list[int]]:
    """The most frequent continuation of a context, while it is probable enough."""
    score, share, tokens = 0.0, 1.0, []
    while len(tokens) < limit and node.next:
        token, child = max(node.next.items(), key=lambda item: item[1].count)
        share *= child.count / node.count
        if share < LEAST:
            break
        score += share
        tokens.append(token)
        node = child
    return score, tokens
