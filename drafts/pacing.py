"""When to draft at all, and what a millisecond is worth: the long-run side of choosing k.

Whether *one more node* pays is decided in every step (:mod:`drafts.goodput`). That leaves what is spent
before there is a node: asking the sources. Where that does not pay, for a domain at a number of rows, only
as many rows are asked as a small allowance covers, so that speculation comes back when it would pay and
costs next to nothing until then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from drafts.allowance import Allowance
from drafts.proposal import Price

ALLOWANCE, CALL_ALLOWANCE = 0.005, 0.0025
"""Shares of the time that may go into asking memories, and into neural calls, where that does not pay. They
are apart, as memories are cheap and asked every few steps: nothing would ever be left for a call."""

FIRST_MS = 0.1
"""Milliseconds assumed of asking one row, before it was timed. The first time a source sees a request it
reads the whole prompt, so the first timings say little."""

PATIENCE, CALL_PATIENCE = 30, 100
"""Rows asked before it is concluded that asking does not pay, without and with neural calls: sources and
those who judge them learn meanwhile."""

MARGIN = 0.03
"""Tokens a row and step that asking has to gain before it pays: what a tree costs beyond drafting and its
nodes (masks, moving entries, what a busy processor forgets) is charged to nobody, and measured about that."""

BLIP = 2.0
"""A cost that exceeds its mean by this factor counts as that much, and half as fast as a lower one: what
disturbs a measurement adds time."""


@dataclass
class _Worth:
    """Tokens that asking gains over plain decoding, its time paid: without and with neural calls."""

    memories: float = 0.0
    all: float = 0.0
    count: int = 0


@dataclass
class Pacing:
    """Running means by number of rows: goodput, drafting time, and what asking is worth to a domain.

    Attributes:
        rate: Weight of one observation.
        calls_rate: The same where calls are charged, of which a request's first reads its whole prompt.
        goodput_rate: The same for goodput.
        allowance: What may be spent on asking memories where that does not pay.
        call_allowance: The same for neural calls.
    """

    rate: float = 0.1
    calls_rate: float = 0.02
    goodput_rate: float = 0.05
    _goodput: dict[int, float] = field(default_factory=dict)
    _ask_ms: dict[int, float] = field(default_factory=dict)
    _worth: dict[tuple[str, int], _Worth] = field(default_factory=dict)
    allowance: Allowance = field(default_factory=lambda: Allowance(ALLOWANCE))
    call_allowance: Allowance = field(default_factory=lambda: Allowance(CALL_ALLOWANCE))
    _turn: int = 0
    _tried: int = 0

    def goodput(self, price: Price) -> float:
        """What a millisecond is worth, in tokens: the long-run rate of steps with as many rows.

        Never less than plain decoding gives, which is always to be had.
        """
        plain = price.rows / max(price.step_ms(price.rows), 1e-6)
        return max(self._goodput.get(price.rows, plain), plain)

    @staticmethod
    def node_ms(price: Price) -> float:
        """Half the mean cost of the next eight nodes: below it a node is not even worth growing."""
        return max(price.step_ms(price.rows + 8) - price.step_ms(price.rows), 0.0) / 16

    def ask_ms(self, rows: int) -> float:
        """Milliseconds of asking one of ``rows`` rows, neural calls apart."""
        return self._ask_ms.get(rows, FIRST_MS)

    def whom(self, domains: Sequence[str], able: Sequence[bool], price: Price) -> list[bool]:
        """Which rows to ask: all where it pays, as many as the allowance covers elsewhere.

        Args:
            domains: Domain of every row.
            able: Whether a row may hold a proposal at all.
            price: Of this step.
        """
        step_ms = price.step_ms(price.rows)
        self.allowance.earn(step_ms)
        self.call_allowance.earn(step_ms)
        wanted = [may and self.pays(d, price.rows) for d, may in zip(domains, able, strict=True)]
        cost = self.ask_ms(price.rows)
        count = len(wanted)
        self._turn += 1
        self._tried = 0
        for offset in range(count):
            index = (self._turn + offset) % count
            if able[index] and not wanted[index] and self.allowance.afford(cost):
                wanted[index] = True
                self._tried += 1
        return wanted

    def pays(self, domain: str, rows: int) -> bool:
        """Whether asking the memories pays for a domain at this number of rows; assumed until known."""
        worth = self._worth.get((domain, rows))
        return worth is None or worth.count < PATIENCE or worth.memories >= MARGIN

    def pays_with_calls(self, domain: str, rows: int) -> bool:
        """Whether speculating pays even with all neural calls charged to it."""
        worth = self._worth.get((domain, rows))
        return worth is None or worth.count < CALL_PATIENCE or worth.all >= MARGIN

    def note_asked(self, rows: int, asked: int, milliseconds: float) -> None:
        """What asking ``asked`` rows took, neural calls apart."""
        if not asked:
            return
        old, each = self.ask_ms(rows), milliseconds / asked
        self.allowance.correct(self._tried * (each - old))
        rate = self.rate if each < old else 0.5 * self.rate
        self._ask_ms[rows] = old + rate * (min(each, BLIP * old) - old)

    def note_worth(self, domain: str, rows: int, gain: float, memory_cost: float, call_cost: float) -> None:
        """What asking one row was expected to gain when its nodes were chosen, and cost; all in tokens."""
        worth = self._worth.setdefault((domain, rows), _Worth())
        net, whole = gain - memory_cost, gain - memory_cost - call_cost
        worth.count += 1
        worth.memories += max(self.rate, 1.0 / worth.count) * (net - worth.memories)
        worth.all += max(self.calls_rate, 1.0 / worth.count) * (whole - worth.all)

    def note_step(self, rows: int, tokens: int, milliseconds: float) -> None:
        """Follow the goodput: ``tokens`` emitted in ``milliseconds`` of pass and drafting."""
        value = tokens / max(milliseconds, 1e-6)
        old = self._goodput.get(rows)
        self._goodput[rows] = value if old is None else old + self.goodput_rate * (value - old)

    def forget(self, domain: str) -> None:
        """Drop what was observed of a domain."""
        for key in [key for key in self._worth if key[0] == domain]:
            del self._worth[key]

    def figures(self) -> dict[int, dict[str, float]]:
        """By number of rows: goodput in tokens per millisecond, and milliseconds of asking a row."""
        return {
            rows: {"tokens_per_ms": value, "ask_ms": self.ask_ms(rows)}
            for rows, value in sorted(self._goodput.copy().items())
        }
