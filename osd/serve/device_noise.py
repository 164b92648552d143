"""A request's noise kept where the logits are, so that drafting and verification look it up.

The generator takes some two hundred small operations however much it makes, so it makes a span of positions
for all requests of a pass in one go. A position is made once: the next drafts and their verification find it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from drafts.transfer import sent
from osd.serve.philox import gumbel_rows, signed

SPAN = 8
"""Positions made together for one request."""

AHEAD = 8
"""Positions beyond those of a pass that are made with it: about as far as the next drafts look."""

ROWS_AT_ONCE = 32
"""Positions computed together; bounds the memory that the generator works in (some 60 bytes a token each)."""


class DeviceNoise:
    """Gumbel noise of one stream on one device: spans of positions, those behind the text forgotten.

    Two to four spans stay, each of ``SPAN`` times 8 bytes a token.

    Args:
        seed: See :class:`osd.serve.noise.RequestNoise`, as ``choice`` and ``stream``.
    """

    def __init__(self, seed: int, choice: int, stream: int) -> None:
        self.seed = seed
        self.choice = choice
        self.stream = stream
        self.spans: dict[int, Tensor] = {}

    def row(self, position: int) -> Tensor:
        """Noise at a prepared position, float64 [vocabulary]."""
        return self.spans[position // SPAN][position % SPAN]

    def lacks(self, span: int, vocab_size: int, device: torch.device) -> bool:
        """Whether a span is not there yet."""
        known = self.spans.get(span)
        return known is None or known.shape[-1] < vocab_size or known.device != device


class Wanted(NamedTuple):
    """Positions ``first`` to ``last`` of one stream."""

    noise: DeviceNoise
    first: int
    last: int


def prepare(wanted: Sequence[Wanted], vocab_size: int, device: torch.device) -> None:
    """Make what is not there yet, for all streams together, without waiting for the device.

    Args:
        wanted: What :meth:`DeviceNoise.row` will be asked for. What lies more than a span before ``first`` is
            forgotten.
        vocab_size: Tokens of a position.
        device: Where the noise is wanted.
    """
    missing: list[tuple[DeviceNoise, int]] = []
    for noise, first, last in wanted:
        for old in [span for span in noise.spans if span < first // SPAN - 1]:
            del noise.spans[old]
        needed = range(first // SPAN, last // SPAN + 1)
        missing += [(noise, span) for span in needed if noise.lacks(span, vocab_size, device)]
    each = ROWS_AT_ONCE // SPAN
    for at in range(0, len(missing), each):
        part = missing[at : at + each]
        table = [
            (signed(noise.seed), signed(noise.choice), span * SPAN + offset, noise.stream)
            for noise, span in part
            for offset in range(SPAN)
        ]
        columns = sent(torch.from_numpy(np.array(table, dtype=np.int64).T.copy()), device)
        made = gumbel_rows(columns[:2], columns[2], columns[3], vocab_size)
        for (noise, span), rows in zip(part, made.reshape(len(part), SPAN, vocab_size), strict=True):
            noise.spans[span] = rows.clone()
