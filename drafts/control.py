"""Chooses k: which grown nodes are verified, what that was expected to gain, and what it gained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from drafts import speculation
from drafts.depths import DepthAcceptance
from drafts.goodput import worthwhile_nodes
from drafts.pacing import Pacing
from drafts.proposal import EMPTY, Price, Proposal
from drafts.speculation import Choice, SpeculationBook

MEMORY = 0.01
"""Weight of one step in the share of time that speculation saves."""

FIRST_STEPS = 100
"""Steps before that share is known."""


@dataclass(frozen=True)
class Drawn:
    """What the sources grew for one row.

    Attributes:
        ranked: Its nodes, most probable first.
        call_ms: Its share of neural calls.
    """

    ranked: Proposal
    call_ms: float = 0.0


@dataclass
class Control:
    """Speculation length and tree width by expected tokens per second, explained.

    Acceptance alone is not the signal: a node is verified if its chance times one token exceeds what its
    milliseconds are worth at the long-run rate, for the rows that run now.

    Attributes:
        pacing: What a millisecond is worth, and whether asking pays.
        depths: Recent acceptance by domain and depth.
        book: What was chosen, expected and realised by domain.
    """

    pacing: Pacing = field(default_factory=Pacing)
    depths: DepthAcceptance = field(default_factory=DepthAcceptance)
    book: SpeculationBook = field(default_factory=SpeculationBook)
    _domains: list[str] = field(default_factory=list)
    _choices: list[Choice] = field(default_factory=list)
    _asked: int = 0
    _goodput: float = 0.0
    _plain_ms: float = 0.0
    _took_ms: float = 0.0
    _steps: int = 0

    @property
    def saved(self) -> float | None:
        """Share of time that speculation saves of late, against plain decoding of as many rows.

        Below 0 it costs more than it gains; ``None`` before enough steps were seen.
        """
        return 1.0 - self._took_ms / self._plain_ms if self._steps >= FIRST_STEPS else None

    def cut(self, domains: Sequence[str], drawn: Sequence[Drawn | None], price: Price) -> list[Proposal]:
        """Every row's nodes that pay over the whole batch (all of them where k is fixed).

        Args:
            domains: Domain of every row.
            drawn: What was grown for it; ``None`` where it was not asked.
            price: Of this step.
        """
        rows, goodput, fixed = len(domains), self.pacing.goodput(price), price.fixed_k is not None
        reaches = [
            [] if item is None else self.depths.reach(domain, item.ranked)
            for domain, item in zip(domains, drawn, strict=True)
        ]
        kept = [len(reach) for reach in reaches]
        total = sum(kept)
        if total and not fixed:
            kept, _ = worthwhile_nodes(reaches, price.step_ms, goodput)
            total = sum(kept)
        plain_ms, ask_ms = price.step_ms(rows), self.pacing.ask_ms(rows)
        node_ms = (price.step_ms(rows + total) - plain_ms) / max(total, 1)
        self._domains, self._choices, self._asked, self._goodput = list(domains), [], 0, goodput
        proposals: list[Proposal] = []
        for index, (item, reach, count) in enumerate(zip(drawn, reaches, kept, strict=True)):
            if item is None:
                ms = tokens = 0.0
                proposal = EMPTY
            else:
                proposal, tokens = item.ranked.first(count), sum(reach[:count])
                ms = node_ms * count + ask_ms + item.call_ms
                self._asked += 1
                if not fixed:
                    gain = tokens - goodput * node_ms * count
                    self.pacing.note_worth(
                        domains[index], rows, gain, goodput * ask_ms, goodput * item.call_ms
                    )
            proposals.append(proposal)
            self._choices.append(
                Choice(
                    nodes=count,
                    depth=max(proposal.depths, default=0),
                    tokens=1.0 + tokens,
                    ms=plain_ms / rows + ms,
                    plain_ms=plain_ms / rows,
                    reason="" if count else _silence(index, item, price),
                )
            )
        return proposals

    def settle(
        self,
        price: Price,
        nodes: int,
        emitted: Sequence[int],
        drafting_ms: float,
        calls_ms: float,
        *,
        counted: bool,
        branch_nodes: Sequence[int] | None = None,
    ) -> None:
        """Count a verified step.

        Args:
            price: What it was chosen at.
            nodes: Nodes that were verified.
            emitted: Tokens every row emitted.
            drafting_ms: Milliseconds of proposing and scoring, ``calls_ms`` of neural calls among them.
            branch_nodes: How many of every row's nodes were off its main chain.
            counted: False leaves the step out of the book, as some row's domain is gone.
        """
        rows = len(emitted)
        expected = price.step_ms(rows + nodes)
        self.pacing.note_step(rows, sum(emitted), expected + drafting_ms)
        self.pacing.note_asked(rows, self._asked, max(drafting_ms - calls_ms, 0.0))
        measured = None if price.measured_ms is None else price.measured_ms()
        pass_ms = expected if measured is None else measured
        self._note_saved(price.step_ms(rows) * sum(emitted) / rows, pass_ms + drafting_ms)
        if counted and len(self._choices) == rows:
            self.book.add(self._domains, self._choices, emitted, pass_ms, drafting_ms, branch_nodes)
        self._choices, self._asked = [], 0

    def spent(self, row: int) -> float:
        """What speculating was to add to a row's time in the present step, in tokens."""
        if row >= len(self._choices):
            return 0.0
        choice = self._choices[row]
        return self._goodput * (choice.ms - choice.plain_ms)

    def _note_saved(self, plain_ms: float, took_ms: float) -> None:
        self._steps += 1
        rate = max(MEMORY, 1.0 / self._steps)
        self._plain_ms += rate * (plain_ms - self._plain_ms)
        self._took_ms += rate * (took_ms - self._took_ms)

    def figures(self, domain: str) -> dict[str, Any]:
        """For the statistics of a domain."""
        return {**self.book.figures(domain), "acceptance_by_depth_now": self.depths.recent(domain)}

    def forget(self, domain: str) -> None:
        """Drop a domain."""
        self.pacing.forget(domain)
        self.depths.forget(domain)
        self.book.forget(domain)


def _silence(index: int, drawn: Drawn | None, price: Price) -> str:
    """Why a row proposes nothing."""
    if price.silenced and price.silenced[index]:
        return price.silenced[index]
    if price.fixed_k == 0:
        return speculation.FIXED
    if drawn is None:
        return speculation.NOT_ASKED
    return speculation.NO_GAIN if len(drawn.ranked) else speculation.NO_PROPOSAL
