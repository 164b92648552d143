"""The load-time probe: does the target, driven over slots, compute what the plain model computes?"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from osd.serve.quantize import is_quantised
from osd.serve.target import PassRow, TargetModel

logger = logging.getLogger(__name__)

_RELATIVE = {torch.float32: 1e-4, torch.float64: 1e-6}
_COARSE = 5e-2
"""In half precision, and with int8 inputs: the last bit of a sum may move one by a whole step."""

_LONGEST_WINDOW = 512
_TAIL = 12
"""Entries that the probe writes behind the prompt, rejected ones included."""

_LONG = 112
"""Tokens of a prompt that is read in two passes, each long enough for what only long passes do."""


@dataclass(frozen=True)
class ProbeResult:
    """How far the target is from the plain Hugging Face forward.

    Attributes:
        worst: Largest difference of a logit.
        allowed: Largest difference that rounding explains, relative to the largest logit.
        where: The step with the largest difference.
    """

    worst: float
    allowed: float
    where: str

    @property
    def ok(self) -> bool:
        """Whether the difference is rounding only."""
        return self.worst <= self.allowed  # False for NaN


def probe(target: TargetModel, seed: int = 0) -> ProbeResult:
    """Drive rows of unequal length through chunks, a chain partly kept, a tree and long passes, and compare.

    Every way a pass can go wrong over slots (shared positions, a mask that ignores rows, a state
    that cannot be rolled back, biases by distance) shows as a difference from a forward over the
    whole text without any cache. Random tokens serve, as only equality matters.

    Args:
        target: The target to test.
        seed: Of the random tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    window = getattr(target.reference.config.get_text_config(), "sliding_window", None)
    base = 12 + (window if window and window <= _LONGEST_WINDOW else 0)
    base = max(4, min(base, target.max_positions - _TAIL))
    text = torch.randint(target.vocab_size, (2, base + _TAIL), generator=generator).tolist()
    long = torch.randint(target.vocab_size, (_LONG,), generator=generator).tolist()[: target.max_positions]
    session = _Session(target, max(base + _TAIL, len(long)))
    cut = base // 2

    a, b = text[0], text[1]
    session.run("first chunk", [PassRow(0, 0, a[:cut])], [0])
    session.run(
        "second chunk beside a short row", [PassRow(0, cut, a[cut:base]), PassRow(1, 0, b[:3])], [0, 1]
    )
    session.cache.commit(0, base)
    session.run(
        "verification of two rows",
        [PassRow(0, base, a[base : base + 4]), PassRow(1, 3, b[3:5])],
        [0, 1],
    )
    session.cache.commit(0, base + 2)  # two of four kept
    del session.texts[0][base + 2 :]
    session.run("pass after a rejection", [PassRow(0, base + 2, a[-3:]), PassRow(1, 5, b[5:6])], [0, 1])

    start = base + 5
    tree = [a[0], a[1], a[2], a[3], b[0]]
    parents = (-1, -1, 0, 1)  # root, two children, one child each
    session.run_tree("tree", PassRow(0, start, tree, parents))
    session.cache.commit_path(0, start, [0, 2, 4])
    session.texts[0] += [tree[0], tree[2], tree[4]]
    session.run("pass after a tree", [PassRow(0, start + 3, b[-2:])], [0])

    cut = len(long) * 4 // 7
    session.run("long chunk", [PassRow(2, 0, long[:cut])], [2], typical=True)
    beside = PassRow(1, 6, b[6:8])
    session.run("long chunk behind another", [beside, PassRow(2, cut, long[cut:])], [1, 2], typical=True)
    return session.result()


class _Session:
    """Three rows under test, their committed texts, and the largest difference so far."""

    def __init__(self, target: TargetModel, room: int) -> None:
        self.target = target
        self.cache = target.make_cache(3, room, keep_features=False)
        for _ in range(self.cache.slots):
            self.cache.acquire()
        self.texts: list[list[int]] = [[], [], []]
        self.worst = 0.0
        self.where = "nothing"
        self.scale = 0.0

    def run(self, where: str, rows: Sequence[PassRow], slots: Sequence[int], typical: bool = False) -> None:
        """Run chains, compare every logit, and commit all tokens.

        ``typical`` judges a row's whole chunk by its root mean square error: in half precision the largest of
        many thousand differences says more about their number than about a fault, and one wrong token of a
        hundred still shows.
        """
        output = self.target.forward(self.cache, rows)
        for row, offset, slot in zip(rows, output.offsets, slots, strict=True):
            self.texts[slot] += row.tokens
            count = len(row.tokens)
            found, expected = output.logits[offset : offset + count], self._plain(self.texts[slot])[-count:]
            self._compare(where, found, expected, typical)
            self.cache.commit(slot, row.start + count)

    def run_tree(self, where: str, row: PassRow) -> None:
        """Run a tree and compare every node with a forward over its own path."""
        output = self.target.forward(self.cache, [row])
        assert row.parents is not None
        for node in range(len(row.tokens)):
            path, at = [node], node
            while at:
                at = row.parents[at - 1] + 1
                path.append(at)
            text = self.texts[row.slot] + [row.tokens[index] for index in reversed(path)]
            self._compare(where, output.logits[node : node + 1], self._plain(text)[-1:])

    def result(self) -> ProbeResult:
        """The verdict."""
        relative = (
            _COARSE if is_quantised(self.target.reference) else _RELATIVE.get(self.target.dtype, _COARSE)
        )
        return ProbeResult(self.worst, relative * self.scale, self.where)

    @torch.inference_mode()
    def _plain(self, text: Sequence[int]) -> Tensor:
        ids = torch.tensor([list(text)], device=self.target.device)
        logits: Tensor = self.target.reference(input_ids=ids, use_cache=False).logits[0]
        return logits.float()

    def _compare(self, where: str, found: Tensor, expected: Tensor, typical: bool = False) -> None:
        largest = float(expected.abs().max())
        if typical:
            difference = float((found - expected).norm() / expected.norm()) * largest
        else:
            difference = float((found - expected).abs().max())
        self.scale = max(self.scale, largest)
        if not difference <= self.worst:  # also NaN
            self.worst, self.where = difference, where
