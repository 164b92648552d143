"""A mixture over scripted sources, its clock, and a text that only verification knows."""

from __future__ import annotations

from collections.abc import Sequence

from drafts.kinds.base import DraftRow, MemorySource, NeuralSource
from drafts.mixture import Mixture
from drafts.proposal import Price, Proposal


class Clock:
    """A stand-in clock: it stands still unless a source takes time."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


class Oracle(MemorySource):
    """Knows the text but for every ``every``-th token; with ``shift`` it is never right."""

    name = "oracle"

    def __init__(self, text: Sequence[int], confidence: float, every: int = 0, shift: int = 0) -> None:
        self.text, self.confidence, self.every, self.shift = text, confidence, every, shift

    def guesses(self, row, path):
        at = len(row.tokens) + len(path)
        if at >= len(self.text):
            return []
        wrong = self.shift or (self.every and at % self.every == 0)
        return [(self.text[at] + 1000 if wrong else self.text[at], self.confidence)]


class Useless(NeuralSource):
    """A neural source that is never right; a call takes ``ms`` of the stand-in clock."""

    name = "useless"

    def __init__(self, clock: Clock, ms: float, confidence: float = 0.9) -> None:
        self.clock, self.ms, self.confidence, self.calls = clock, ms, confidence, 0

    def draft(self, rows, limits, extend, draw=False):
        self.calls += 1
        self.clock.seconds += self.ms / 1e3
        for index, limit in enumerate(limits):
            for depth in range(limit):
                if extend(index, [(5000 + depth, self.confidence)]) is None:
                    break


def serve(
    mixture: Mixture, text: Sequence[int], steps: int, price: Price, domain: str = "math", cap: int = 4
) -> list[Proposal]:
    """At most ``steps`` greedy steps of one request; the first token of ``text`` is its prompt."""
    row = DraftRow("r", domain, [text[0]], 1)
    proposals = []
    while len(proposals) < steps and len(row.tokens) < len(text):
        proposal = mixture.propose([row], [min(cap, len(text) - len(row.tokens))], price)[0]
        emitted = text[len(row.tokens) :][: len(proposal.path(text[len(row.tokens) :])) + 1]
        row.tokens.extend(emitted)
        mixture.observe([row], [proposal], [emitted])
        proposals.append(proposal)
    mixture.finish(row)
    return proposals
