"""The sampling noise of one request: counter-based, so that it depends on nothing that happens while serving.

Every uniform is a pure function of (seed, choice, output position, token id). A draft may therefore look at
the very noise that verification will use, and no order of calls, batch neighbour or draft swap can move a
sample (Daliri, Musco, Suresh, "Coupling without Communication and Drafter-Invariant Speculative Decoding",
arXiv 2408.07978).
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from osd.serve.device_noise import DeviceNoise, Wanted, prepare

_WORD = 2**64 - 1

TESTS = 64
"""Acceptance tests drawn at once for one position."""


def fresh_seed() -> int:
    """A seed of 63 random bits from the operating system, for a request that names none."""
    return secrets.randbits(63)


class RequestNoise:
    """Gumbel noise of one choice of one request; implements :class:`drafts.kinds.base.Noise`.

    The bits are Philox4x64-10 (Salmon et al., SC 2011) with key (seed, choice) and counter (block, position):
    numpy guarantees the raw stream of a bit generator, so it is the same with every numpy version and for
    every device. Token id ``i`` reads word ``i`` of its position, whatever the vocabulary's size.

    A position costs about 4 ns a token once; the last ``keep`` positions stay in memory (8 bytes a token
    each), because a rejected position is asked again in the next round.

    Args:
        seed: Any integer in ``[-2**63, 2**64)``; taken modulo ``2**64``.
        choice: Index of the choice when a request wants several (``n``).
        vocab_size: Words to draw at once. Ids beyond it work too, at the price of drawing again.
        keep: Positions kept.
        stream: Streams of one seed and choice are independent of one another.
    """

    def __init__(
        self, seed: int, choice: int = 0, vocab_size: int = 0, keep: int = 16, stream: int = 0
    ) -> None:
        self.seed = seed
        self.choice = choice
        self.stream = stream
        self.vocab_size = vocab_size
        self.keep = keep
        self._key = np.array([seed & _WORD, choice & _WORD], dtype=np.uint64)
        self._rows: OrderedDict[int, npt.NDArray[np.uint64]] = OrderedDict()

    @cached_property
    def acceptance(self) -> RequestNoise:
        """The stream that rejection sampling accepts by: word ``i`` of a position is its test ``i``."""
        return RequestNoise(self.seed, self.choice, TESTS, 4, stream=1)

    @cached_property
    def draft(self) -> RequestNoise:
        """The stream that drafts draw from where verification must not know their noise."""
        return RequestNoise(self.seed, self.choice, self.vocab_size, self.keep, stream=2)

    @cached_property
    def on_device(self) -> DeviceNoise:
        """The same noise, kept where the logits are."""
        return DeviceNoise(self.seed, self.choice, self.stream)

    def uniform(self, position: int) -> npt.NDArray[np.float64]:
        """Uniforms of all ``vocab_size`` tokens at ``position``, float64, in the open interval (0, 1)."""
        return _open_uniform(self._words(position, self.vocab_size)[: self.vocab_size])

    def gumbel(self, position: int, token_ids: torch.Tensor) -> torch.Tensor:
        """Standard Gumbel noise of ``token_ids`` (int64 [n]) at ``position``: float64 [n], same device.

        On a processor numpy's generator is eight times faster than torch's operators; elsewhere these spare
        the host two waits, and ids must be below ``vocab_size``. The uniforms are the same bits.
        """
        if token_ids.device.type != "cpu":
            prepare([Wanted(self.on_device, position, position)], self.vocab_size, token_ids.device)
            return self.on_device.row(position)[token_ids]
        ids = token_ids.numpy(force=True)
        words = self._words(position, int(ids.max(initial=-1)) + 1)[ids]
        noise: npt.NDArray[np.float64] = -np.log(-np.log(_open_uniform(words)))
        return torch.from_numpy(noise).to(token_ids.device)

    def _words(self, position: int, size: int) -> npt.NDArray[np.uint64]:
        row = self._rows.get(position)
        if row is None or len(row) < size:
            counter = np.array([0, position, self.stream, 0], dtype=np.uint64)
            bits = np.random.Philox(key=self._key, counter=counter)
            row = np.asarray(bits.random_raw(max(size, self.vocab_size)), dtype=np.uint64)
            self._rows[position] = row
            if len(self._rows) > self.keep:
                self._rows.popitem(last=False)
        self._rows.move_to_end(position)
        return row


def _open_uniform(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """Odd multiples of ``2**-53``: exact in float64 and symmetric in (0, 1).

    ``(k + 0.5) * 2**-53`` over 53-bit ``k`` would round to 1.0 at the top (and an infinite Gumbel); single
    precision returns 0 once in ``2**24`` draws, which is every 341st position of a 49,152-token vocabulary.
    """
    return ((words >> np.uint64(11)) | np.uint64(1)).astype(np.float64) * 2.0**-53
