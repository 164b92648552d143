"""A share of the time, saved up, for trying what does not pay at present."""

from __future__ import annotations

from dataclasses import dataclass

SAVED_STEPS = 50
"""Steps whose allowance can be saved up, for what costs more than one step allows."""


@dataclass
class Allowance:
    """Milliseconds that may be spent.

    Attributes:
        share: Of the time of every step.
    """

    share: float
    _saved_ms: float = 0.0
    _most_ms: float = 0.0

    def earn(self, step_ms: float) -> None:
        """Add what a step of ``step_ms`` allows."""
        earned = self.share * step_ms
        self._most_ms = SAVED_STEPS * earned
        self._saved_ms = min(self._saved_ms + earned, self._most_ms)

    def afford(self, milliseconds: float) -> bool:
        """Take ``milliseconds``, if they are there.

        What costs more than can ever be saved up is granted when all is there, and paid off afterwards: else
        a dear source could never come back.
        """
        if self._saved_ms < min(milliseconds, self._most_ms):
            return False
        self._saved_ms -= milliseconds
        return True

    def correct(self, milliseconds: float) -> None:
        """Take what something cost beyond what was taken for it.

        It makes no more debt than can be saved up, and forgives none that is there.
        """
        self._saved_ms = max(self._saved_ms - milliseconds, min(self._saved_ms, -self._most_ms))
