"""The controller's cost side: what a target pass costs by its rows and tokens, learned while running."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from drafts.errors import InvalidValueError

ROWS = (1, 2, 4, 8, 16, 32)
PER_ROW = (1, 2, 3, 5, 8, 16)
"""Grid of the corrections: rows of a pass, and tokens of each row."""

NOISE = 0.02
"""Variance of one pass's log-time around its expectation."""

DRIFT = 0.05
"""Variance by which the speed of the whole machine may change between two passes (log-time)."""

TRUST, LOOSE = 0.04, 0.25
"""Variance of the load-time shape (log-time): at the beginning, and after long not looking."""

KEEP = 0.998
"""Share of a correction that is left after a pass that told nothing about it."""

REACH = 1.5
"""Octaves of rows or tokens over which a correction carries to its neighbours."""

SURPRISE = 0.4
"""Log-time by which a pass may differ from expectation and count in full; beyond, ever less."""

LOOK_STEPS, LOOK_NODES, LOOK_MOST = 400, (1, 3, 7), 16
"""Passes of a number of rows without a proposal after which some nodes are priced as free until one was
verified: how many a row, in turns, and at most in all. A price that keeps all proposals away would never be
corrected otherwise."""

MOST_PER_ROW = 32
"""Tokens of a row up to which costs are told apart."""

Array = NDArray[np.float64]

_ROWS, _PER_ROW = np.log2(ROWS), np.log2(PER_ROW)


class StepCosts:
    """Milliseconds of a target pass as a function of its rows and of the tokens in it.

    Machines differ and the same machine changes speed from one minute to the next, so log-time is a sum
    of three: the *shape* (by token count, timed at load), the *drift* of the whole machine, and a
    *correction* by rows and tokens per row. Drift moves fast and corrections slowly, so a noisy minute is
    put down to drift, and only passes that differ from each other at the same time correct the shape. A
    Kalman filter over drift and corrections (a Gaussian process on a grid, forgetting as an
    Ornstein-Uhlenbeck process does) weighs all that. Decisions depend on shape and corrections alone.

    A shape timed while something else ran may be far too high for some counts, more than corrections can
    mend. Disturbances only add time, so a pass far faster than expected, between two as fast as expected,
    proves it, and lowers the shape.

    Args:
        measured: Milliseconds by token count, from :meth:`TargetModel.measure_costs`; at least one.
    """

    def __init__(self, measured: Mapping[int, float]) -> None:
        if not measured or any(count < 1 or not 0 < cost < float("inf") for count, cost in measured.items()):
            raise InvalidValueError("measured", dict(measured), "positive costs for counts of 1 or more")
        self._counts = np.array(sorted(measured), dtype=np.float64)
        self._shape = np.array([measured[count] for count in sorted(measured)], dtype=np.float64)
        near = np.exp(-np.abs(_ROWS[:, None, None, None] - _ROWS[:, None]) / REACH)
        near = near * np.exp(-np.abs(_PER_ROW[:, None, None] - _PER_ROW) / REACH)
        size = len(ROWS) * len(PER_ROW)
        kinship = near.reshape(size, size)
        self._state = np.zeros(1 + size)
        self._spread = np.zeros((1 + size, 1 + size))
        self._spread[0, 0] = 1.0
        self._spread[1:, 1:] = TRUST * kinship
        self._forgotten = (1.0 - KEEP**2) * LOOSE * kinship
        self._tables: dict[tuple[int, int], list[float]] = {}
        self._last: tuple[int, int, float] | None = None
        self._silent: dict[int, int] = {}
        self._looks = 0
        self._calm = False
        self._too_fast: tuple[int, float] | None = None
        self.passes: dict[int, int] = {}

    @property
    def drift(self) -> float:
        """Present speed of the machine relative to load time; 2 means half as fast."""
        return math.exp(self._state[0])

    @property
    def last_ms(self) -> float | None:
        """Milliseconds of the last pass at load-time speed, and bounded; ``None`` where prompts were read.

        One pass that the machine held up counts half as long again at most.
        """
        if self._last is None:
            return None
        rows, tokens, logarithm = self._last
        return self.ms(tokens, rows) * math.exp(logarithm)

    def ms(self, tokens: int, rows: int = 1) -> float:
        """Expected milliseconds of a pass over ``tokens`` tokens in ``rows`` rows, at load-time speed."""
        table = self._table(rows, 0)
        return table[min(max(tokens - rows, 0), len(table) - 1)]

    def price(self, rows: int, beside: int = 0) -> Callable[[int], float]:
        """Milliseconds of the coming pass by the number of tokens that decode in it.

        Args:
            rows: Rows that decode; a plain pass holds as many tokens.
            beside: Prompt tokens read in the same pass. What they cost is not the proposals' doing, but
                it changes what one more node costs.
        """
        table = self._table(rows, beside)
        if not beside and self._silent.get(rows, 0) >= LOOK_STEPS:
            free = min(rows * LOOK_NODES[self._looks % len(LOOK_NODES)], LOOK_MOST)
            table = [table[0]] * (free + 1) + table[free + 1 :]
        last = len(table) - 1
        return lambda tokens: table[min(max(tokens - rows, 0), last)]

    def record(self, rows: int, tokens: int, milliseconds: float, beside: int = 0) -> None:
        """One measured pass.

        Args:
            rows: Rows that decoded in it.
            tokens: Tokens of those rows.
            milliseconds: How long it took.
            beside: Prompt tokens in it; such a pass is another thing and teaches nothing.
        """
        self._last = None
        if not beside:
            self._count(rows, tokens)
        if beside or rows < 1 or tokens < rows or not 0 < milliseconds < math.inf:
            return
        at, share = self._seen(rows, tokens)
        self._forget()
        measured = math.log(milliseconds / float(self._at_load(np.array([tokens]))[0]))
        known = self._spread[:, at] @ share
        gap = measured - float(self._state[at] @ share)
        self._doubt_shape(rows, tokens, gap, milliseconds)
        noise = NOISE * max(1.0, (gap / SURPRISE) ** 2)
        gain = known / (float(known[at] @ share) + noise)
        self._state += gain * gap
        self._spread -= np.outer(gain, known)
        left = measured - float(self._state[at] @ share)
        self._last = (rows, tokens, min(max(left, -SURPRISE), SURPRISE))
        self.passes[rows] = self.passes.get(rows, 0) + 1
        self._tables.clear()

    def as_dict(self) -> dict[int, float]:
        """The shape as timed at load, milliseconds by token count."""
        return {int(count): float(cost) for count, cost in zip(self._counts, self._shape, strict=True)}

    def by_rows(self) -> dict[int, dict[int, float]]:
        """As believed now, for every number of rows that ran: milliseconds by tokens of a row."""
        return {
            rows: {each: self.ms(rows * each, rows) for each in PER_ROW}
            for rows in sorted(self.passes.copy())
        }

    def _count(self, rows: int, tokens: int) -> None:
        """Count passes without proposals, by their rows."""
        if tokens > rows:
            self._looks += self._silent.get(rows, 0) >= LOOK_STEPS
            self._silent[rows] = 0
        else:
            self._silent[rows] = self._silent.get(rows, 0) + 1

    def _doubt_shape(self, rows: int, tokens: int, gap: float, milliseconds: float) -> None:
        """Lower the shape where a pass was far faster than it says, once the next shows no faster machine."""
        calm = abs(gap) < SURPRISE
        if calm and self._too_fast is not None:
            self._lower(*self._too_fast)
        self._too_fast = None
        if self._calm and tokens > rows and gap < -SURPRISE:
            self._too_fast = (tokens, milliseconds / self.drift)
        self._calm = calm

    def _lower(self, count: int, milliseconds: float) -> None:
        """Let ``count`` tokens cost no more, fewer neither, and more in proportion to what they did.

        That may be too low for these, which the first such pass will tell.
        """
        ratio = milliseconds / float(self._at_load(np.array([count]))[0])
        if ratio < 1.0:
            fewer = np.minimum(self._shape, milliseconds)
            more = np.maximum(self._shape * ratio, milliseconds)
            self._shape = np.where(self._counts <= count, fewer, more)

    def _table(self, rows: int, beside: int) -> list[float]:
        """Milliseconds for ``rows``, ``rows + 1``, … decoding tokens; never falling."""
        key = (rows, beside)
        table = self._tables.get(key)
        if table is None:
            tokens = np.arange(rows, rows * MOST_PER_ROW + 1, dtype=np.float64)
            ms = self._at_load(tokens + beside)
            if beside:
                ms = ms - ms[0] + self._at_load(tokens[:1])[0]
            low, high, weight = _place(_ROWS, math.log2(rows))
            grid = self._state[1:].reshape(len(ROWS), len(PER_ROW))
            along = (1 - weight) * grid[low] + weight * grid[high]
            ms = ms * np.exp(np.interp(np.log2(tokens / rows), _PER_ROW, along))
            table = self._tables[key] = np.maximum.accumulate(ms).tolist()
        return table

    def _at_load(self, tokens: Array) -> Array:
        """The shape between and beyond the timed counts."""
        counts, shape = self._counts, self._shape
        slope = shape[0] / counts[0]
        if len(counts) > 1:
            slope = max((shape[-1] - shape[-2]) / (counts[-1] - counts[-2]), 0.0)
        found: Array = np.interp(tokens, counts, shape) + slope * np.maximum(tokens - counts[-1], 0.0)
        return found

    def _forget(self) -> None:
        """Let a moment pass: corrections fade towards the shape, and everything grows less certain."""
        self._state[1:] *= KEEP
        self._spread[1:, 1:] *= KEEP**2
        self._spread[1:, 1:] += self._forgotten
        self._spread[0, 1:] *= KEEP
        self._spread[1:, 0] *= KEEP
        self._spread[0, 0] += DRIFT

    @staticmethod
    def _seen(rows: int, tokens: int) -> tuple[list[int], Array]:
        """Which parts of the state a pass shows, the drift first, and their weights (linear in between)."""
        low, high, across = _place(_ROWS, math.log2(rows))
        left, right, along = _place(_PER_ROW, math.log2(tokens / rows))
        width = len(PER_ROW)
        at = [0] + [1 + row * width + column for row in (low, high) for column in (left, right)]
        share = [1.0, (1 - across) * (1 - along), (1 - across) * along, across * (1 - along), across * along]
        return at, np.array(share)


def _place(axis: Array, value: float) -> tuple[int, int, float]:
    """Neighbours of ``value`` on an ascending axis, and the weight of the upper one."""
    value = min(max(value, float(axis[0])), float(axis[-1]))
    high = min(max(int(np.searchsorted(axis, value)), 1), len(axis) - 1)
    below, above = float(axis[high - 1]), float(axis[high])
    return high - 1, high, (value - below) / (above - below)


def why_silent(cap: int | None, remaining: int, room: int) -> str:
    """Why a row may propose nothing; ``""`` where it may.

    Args:
        cap: The request's own limit on depth.
        remaining: Output tokens it may still emit; the last one is the target's own.
        room: Tokens that its slot can still take.
    """
    if cap == 0:
        return "request cap"
    if remaining <= 1:
        return "max_tokens left"
    return "" if room > 0 else "context left"
