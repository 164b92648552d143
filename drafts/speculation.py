"""What was speculated in each domain, what was expected of it, what came of it, and why it was not done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Self

NOT_ASKED = "asking does not pay"
NO_PROPOSAL = "no proposal"
NO_GAIN = "verifying does not pay"
FIXED = "fixed k"
"""Reasons why a step of a row was plain; the engine adds those of its limits."""

SIZES = (0, 1, 2, 3, 4, 6, 8, 12, 16)
"""Lower borders of the histogram of nodes per step."""


@dataclass(frozen=True)
class Choice:
    """What one step decided for one row.

    Attributes:
        nodes: Nodes proposed; ``depth`` is the deepest one's depth.
        tokens: Tokens expected to be emitted, the bonus token included.
        ms: The row's expected share of pass and drafting, milliseconds at load-time speed.
        plain_ms: Its share of a plain pass.
        reason: Why nothing was proposed; ``""`` where something was.
    """

    nodes: int
    depth: int
    tokens: float
    ms: float
    plain_ms: float
    reason: str = ""


@dataclass
class Speculated:
    """Counters of one domain; ``ms`` are at load-time speed, so that a slow minute does not weigh more."""

    steps: int = 0
    nodes: int = 0
    branch_nodes: int = 0
    depth: int = 0
    tokens: int = 0
    ms: float = 0.0
    plain_ms: float = 0.0
    expected_tokens: float = 0.0
    expected_ms: float = 0.0
    sizes: list[int] = field(default_factory=lambda: [0] * len(SIZES))
    reasons: dict[str, int] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, counters: Mapping[str, Any]) -> Self:
        """Restore ``vars()``; unknown names are left out."""
        made = cls(**{name: counters[name] for name in cls.__dataclass_fields__ if name in counters})
        made.sizes = [*map(int, made.sizes), *[0] * len(SIZES)][: len(SIZES)]
        made.reasons = {str(reason): int(count) for reason, count in made.reasons.items()}
        return made

    def since(self, before: Speculated) -> Speculated:
        """What was added after ``before``."""
        added = Speculated()
        names = ("steps", "nodes", "branch_nodes", "depth", "tokens", "ms", "plain_ms")
        for name in (*names, "expected_tokens", "expected_ms"):
            setattr(added, name, getattr(self, name) - getattr(before, name))
        added.sizes = [a - b for a, b in zip(self.sizes, before.sizes, strict=True)]
        added.reasons = {reason: n - before.reasons.get(reason, 0) for reason, n in self.reasons.items()}
        return added

    def add(self, choice: Choice, emitted: int, ms: float, branch_nodes: int = 0) -> None:
        """Count one step of one row, which emitted ``emitted`` tokens in its share ``ms`` of the time.

        ``branch_nodes`` of the verified nodes lay off the main chain.
        """
        self.steps += 1
        self.nodes += choice.nodes
        self.branch_nodes += branch_nodes
        self.depth += choice.depth
        self.tokens += emitted
        self.ms += ms
        self.plain_ms += choice.plain_ms
        self.expected_tokens += choice.tokens
        self.expected_ms += choice.ms
        self.sizes[max(at for at, least in enumerate(SIZES) if choice.nodes >= least)] += 1
        if choice.reason:
            self.reasons[choice.reason] = self.reasons.get(choice.reason, 0) + 1

    def figures(self) -> dict[str, Any]:
        """For the statistics; safe from any thread while the engine's goes on counting.

        ``k`` is the mean depth of a step's proposal (plain steps count 0) and ``nodes`` its mean size;
        ``speedup`` is tokens per millisecond over what plain decoding of as many rows is estimated to
        give. ``counters`` is what the rest is derived from.
        """
        steps = max(self.steps, 1)
        labels = [str(low) if high == low + 1 else f"{low}-{high - 1}" for low, high in pairwise(SIZES)]
        return {
            "steps": self.steps,
            "k": self.depth / steps,
            "nodes": self.nodes / steps,
            "steps_by_nodes": dict(zip([*labels, f"{SIZES[-1]}+"], self.sizes, strict=True)),
            "plain_share": self.sizes[0] / steps,
            "plain_because": {reason: count / steps for reason, count in dict(self.reasons).items()},
            "expected": self._outcome(self.expected_tokens, self.expected_ms),
            "realised": self._outcome(self.tokens, self.ms),
            "counters": {**vars(self), "sizes": list(self.sizes), "reasons": dict(self.reasons)},
        }

    def _outcome(self, tokens: float, ms: float) -> dict[str, float | None]:
        if not self.steps or ms <= 0.0:
            return {"tokens_per_step": None, "tokens_per_ms": None, "speedup": None}
        rate = tokens / ms
        return {
            "tokens_per_step": tokens / self.steps,
            "tokens_per_ms": rate,
            "speedup": rate * self.plain_ms / self.steps,
        }


@dataclass
class SpeculationBook:
    """:class:`Speculated` by domain."""

    _domains: dict[str, Speculated] = field(default_factory=dict)

    def add(
        self,
        domains: Sequence[str],
        choices: Sequence[Choice],
        emitted: Sequence[int],
        pass_ms: float,
        drafting_ms: float,
        branch_nodes: Sequence[int] | None = None,
    ) -> None:
        """Count one step of a batch.

        A pass's time is shared out as a plain pass's would be, and what it took beyond that by nodes.

        Args:
            domains: Domain of every row.
            choices: What was decided for it.
            emitted: Tokens it emitted; rows without any (that failed) are left out.
            pass_ms: The pass; ``drafting_ms`` is what proposing took.
            branch_nodes: Nodes off the main chain that were verified of every row; ``None`` for none.
        """
        plain = sum(choice.plain_ms for choice in choices)
        nodes = sum(choice.nodes for choice in choices)
        each = drafting_ms / max(len(choices), 1)
        branches = [0] * len(choices) if branch_nodes is None else branch_nodes
        for domain, choice, count, off in zip(domains, choices, emitted, branches, strict=True):
            if count:
                part = choice.nodes / nodes if nodes else 1.0 / len(choices)
                ms = max(choice.plain_ms + (pass_ms - plain) * part, 0.0) + each
                self._domains.setdefault(domain, Speculated()).add(choice, count, ms, off)

    def figures(self, domain: str) -> dict[str, Any]:
        """For the statistics of a domain."""
        return self._domains.get(domain, Speculated()).figures()

    def forget(self, domain: str) -> None:
        """Drop a domain's counters."""
        self._domains.pop(domain, None)

    def state(self) -> dict[str, dict[str, Any]]:
        """All counters, as JSON."""
        return {
            domain: {**vars(item), "sizes": list(item.sizes), "reasons": dict(item.reasons)}
            for domain, item in list(self._domains.items())
        }

    def load_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Restore :meth:`state`."""
        self._domains = {domain: Speculated.from_dict(counters) for domain, counters in state.items()}
