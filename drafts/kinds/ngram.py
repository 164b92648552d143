"""``ngram``: the domain's memory of what the target said before, read with the request's own text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from operator import itemgetter
from typing import ClassVar

import torch

from drafts.config import NgramConfig
from drafts.cross import CrossAcceptance
from drafts.kinds.base import DraftRow, Guess, MemorySource
from drafts.memory import Memory, context_keys

View = tuple[dict[int, dict[int, float]], float, float]
"""Contexts with their followers' weights, a factor for the weights, and what a follower counts in T."""


@dataclass
class _OwnText:
    """Counts over one request's own prompt and output; ``counted`` tokens are in."""

    counted: int
    contexts: dict[int, dict[int, float]] = field(default_factory=dict)


class NgramSource(MemorySource):
    """Names the most probable next tokens under blended n-gram counts.

    The distribution of a context of order o is Witten-Bell's: (c(x) + T p'(x)) / (C + T) with C the
    weight and T the number of distinct followers seen, p' that of order o - 1 (Witten & Bell 1991).
    Three texts vote: the domain's memory, the request's own text (one occurrence there is worth
    several remembered answers), and, while the domain is young, the base domain's memory.

    Args:
        config: Orders, bounds and weights.
        base: Name of the base domain.
    """

    name: ClassVar[str] = "ngram"

    def __init__(self, config: NgramConfig | None = None, base: str = "base") -> None:
        self.config = config or NgramConfig()
        self.base = base
        self.cross = CrossAcceptance()
        self._memories: dict[str, Memory] = {}
        self.add_domain(base)

    def guesses(self, row: DraftRow, path: Sequence[int]) -> list[Guess]:
        """The most probable next tokens under the blend; none where the best is below ``config.floor``."""
        if len(path) >= self.config.max_order:
            text = path[-self.config.max_order :]
        else:
            text = [*row.tokens[len(path) - self.config.max_order :], *path]
        found = self._blend(text, self._views(row))
        if not found or found[0][1] < self.config.floor:
            return []
        return [guess for guess in found if guess[1] >= 0.5 * self.config.floor]

    def finish(self, row: DraftRow) -> None:
        """Compare memories on the request's answer, then learn it in one pass, if it may be stored."""
        if row.store:
            self._compare(row)
            self.teach(row.domain, row.tokens, row.prompt_length)

    def teach(self, domain: str, tokens: Sequence[int], prompt_length: int) -> None:
        """Learn ``tokens[prompt_length:]``, for example to replay a newborn domain's pool.

        A domain that is not (or no longer) served learns nothing: requests may outlive their domain.
        """
        memory = self._memory(domain)
        if memory is not None:
            memory.learn(tokens, prompt_length)

    def score(self, domain: str, tokens: Sequence[int], prompt_length: int, depth: int = 4) -> float:
        """Tokens per target pass had the memory of ``domain`` alone drafted chains of ``depth``.

        Needs no target: verification is lossless, so the text tells what would have been accepted.
        The first output token comes from the prefill. 1.0 for texts too short to need a pass.
        """
        memory = self._memory(domain)
        views = [] if memory is None else [(memory.contexts, 1.0 / memory.unit, 1.0)]
        at, passes = prompt_length + 1, 0
        while at < len(tokens):
            chain = self._walk(tokens[max(0, at - self.config.max_order) : at], views, depth)
            truth = tokens[at : at + len(chain)]
            accepted = next(
                (i for i, (x, y) in enumerate(zip(chain, truth, strict=False)) if x != y), len(truth)
            )
            at += accepted + 1
            passes += 1
        return (len(tokens) - prompt_length - 1) / passes if passes else 1.0

    def add_domain(self, domain: str, parent: str | None = None) -> None:
        """Serve ``domain`` with an empty memory; :meth:`teach` fills it. A known domain keeps its own."""
        if self.config.shared and self._memories:
            return
        self._memories.setdefault(domain, self._empty())

    def purge(self, domain: str) -> None:
        """Empty a domain's memory; the one that all share where they do. An unknown domain has none."""
        name = self.base if self.config.shared else domain
        if name in self._memories:
            self._memories[name] = self._empty()

    def _empty(self) -> Memory:
        c = self.config
        return Memory(
            max_order=c.max_order,
            max_bytes=c.max_bytes,
            max_followers=c.max_followers,
            half_life_tokens=c.half_life_tokens,
        )

    def drop_domain(self, domain: str) -> None:
        """Forget a domain's memory; the base domain's stays."""
        self.cross.forget(domain)
        if domain != self.base:
            self._memories.pop(domain, None)

    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        """Every domain's memory as tensors."""
        return {domain: memory.state() for domain, memory in self._memories.items()}

    def domain_state(self, domain: str) -> dict[str, torch.Tensor]:
        """One domain's part of :meth:`state`, so that saving can go domain by domain; empty if unknown."""
        memory = self._memory(domain)
        return {} if memory is None else memory.state()

    def load_state(self, state: dict[str, dict[str, torch.Tensor]]) -> None:
        """Restore :meth:`state`; domains not served yet are added."""
        for domain, tensors in state.items():
            self.add_domain(domain)
            if domain in self._memories:
                self._memories[domain].load_state(tensors)

    def describe(self, domain: str) -> dict[str, int | float | str]:
        """Tokens learned, contexts, followers and bytes of a domain's memory."""
        memory = self._memory(domain)
        if memory is None:
            return {}
        return {
            "tokens": memory.tokens,
            "contexts": len(memory.contexts),
            "followers": memory.followers,
            "bytes": memory.bytes,
        }

    def _compare(self, row: DraftRow) -> None:
        """Ask the domain's memory, and one other's, for the token at a few positions of the answer.

        Each speaks for itself, without the request's own text; silence counts as wrong.
        """
        other = self.cross.another(row.domain, list(self._memories))
        if other is None or row.domain not in self._memories or row.output_length < 1:
            return
        ends = [row.prompt_length + at for at in self.cross.sample(row.output_length)]
        for name in (row.domain, other):
            memory = self._memories[name]
            views = [(memory.contexts, 1.0 / memory.unit, 1.0)]
            right = 0
            for end in ends:
                text = row.tokens[max(0, end - self.config.max_order) : end]
                right += self._walk(text, views, 1) == [row.tokens[end]]
            self.cross.add(name, row.domain, right, len(ends))

    def _memory(self, domain: str) -> Memory | None:
        return self._memories.get(self.base if self.config.shared else domain)

    def _views(self, row: DraftRow) -> list[View]:
        views: list[View] = []
        memory = self._memory(row.domain)
        if memory is not None:
            views.append((memory.contexts, 1.0 / memory.unit, 1.0))
        if self.config.own_weight > 0:
            views.append((self._own(row), self.config.own_weight, 1.0))
        base = self._memories[self.base]
        young = memory is None or memory.tokens < self.config.base_until_tokens
        if base is not memory and young and self.config.base_weight > 0:
            weight = self.config.base_weight
            views.append((base.contexts, weight / base.unit, weight))
        return views

    def _own(self, row: DraftRow) -> dict[int, dict[int, float]]:
        """Counts of the request's own text, brought up to date with what was committed since."""
        own = row.scratch.get(self.name)
        if not isinstance(own, _OwnText) or own.counted > len(row.tokens):
            own = row.scratch[self.name] = _OwnText(max(1, row.prompt_length - self.config.own_window))
        for end in range(own.counted, len(row.tokens)):
            token = row.tokens[end]
            for key in context_keys(row.tokens, end, self.config.max_order):
                followers = own.contexts.setdefault(key, {})
                followers[token] = followers.get(token, 0.0) + 1.0
        own.counted = len(row.tokens)
        return own.contexts

    def _walk(self, context: Sequence[int], views: Sequence[View], limit: int) -> list[int]:
        """The chain of best guesses, of at most ``limit`` tokens."""
        text = list(context)
        for _ in range(limit):
            found = self._blend(text, views)
            if not found or found[0][1] < self.config.floor:
                break
            text.append(found[0][0])
        return text[len(context) :]

    def _blend(self, text: Sequence[int], views: Sequence[View]) -> list[Guess]:
        """The most probable next tokens and their probabilities, longest order first.

        ``left`` is the probability that longer orders leave to shorter ones; once it is negligible,
        the rest is not read.
        """
        keys = list(context_keys(text, len(text), self.config.max_order))
        mixed: dict[int, float] = {}
        left = 1.0
        for key in reversed(keys[self.config.min_order - 1 :]):
            counts: dict[int, float] = {}
            distinct = 0.0
            for contexts, scale, novelty in views:
                followers = contexts.get(key)
                if followers is not None:
                    for token, weight in followers.items():
                        if token in counts:
                            counts[token] += scale * weight
                        else:
                            counts[token] = scale * weight
                            distinct += novelty
            if not counts:
                continue
            share = left / (sum(counts.values()) + distinct)
            for token, weight in counts.items():
                mixed[token] = mixed.get(token, 0.0) + share * weight
            left = share * distinct
            if left < 0.02:
                break
        best = nlargest(self.config.width, mixed.items(), key=itemgetter(1))
        return [(token, min(weight, 1.0)) for token, weight in best]
