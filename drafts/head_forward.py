"""One depth of the draft head over a batch of rows: the interface, and the library's way to run it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch

from drafts.bank import ExpertBank
from drafts.head_cache import HeadCache
from drafts.kinds.base import DraftRow
from drafts.transfer import sent
from drafts.trunk import Trunk


@dataclass
class HeadPath:
    """What one row has drafted so far.

    Attributes:
        at: The row's index in the batch.
        row: The row.
        cache: Its draft cache.
        slot: Its expert's slot in the bank.
        limit: Most depths.
        token: The token drafted last.
    """

    at: int
    row: DraftRow
    cache: HeadCache
    slot: int
    limit: int
    token: int = -1


@dataclass(frozen=True)
class Predicted:
    """What the head says about the next token of R rows.

    Attributes:
        hidden: ``[R, H]``, read by the next depth.
        logits: ``[R, V]``; valid until the next depth is run.
        top: Per row the probabilities of the most probable ids, in order, then their indices into the draft
            vocabulary; a tensor ``[R, 2 * width]`` where the host has not read it yet.
    """

    hidden: torch.Tensor
    logits: torch.Tensor
    top: list[list[float]] | torch.Tensor

    def read_with(self, others: Sequence[torch.Tensor]) -> tuple[list[list[float]], list[list[float]]]:
        """``top`` and others, all of one length, on the host: one wait for all that is still elsewhere."""
        if not isinstance(self.top, torch.Tensor):
            return self.top, torch.stack(list(others)).tolist() if others else []
        if not others:
            return self.top.tolist(), []
        width = self.top.shape[1]
        flat: list[float] = torch.cat((self.top.double().flatten(), *others)).tolist()
        rows = [flat[at : at + width] for at in range(0, self.top.numel(), width)]
        size = len(others[0])
        return rows, [flat[at : at + size] for at in range(self.top.numel(), len(flat), size)]


def merged(found: Sequence[Predicted], groups: Sequence[Sequence[int]]) -> Predicted:
    """Predictions for groups of rows, put into the order of the rows."""
    order = torch.tensor([row for group in groups for row in group]).argsort()
    lines = [line for part in found for line in part.read_with(())[0]]
    return Predicted(
        torch.cat([part.hidden for part in found])[order],
        torch.cat([part.logits for part in found])[order],
        [lines[at] for at in order.tolist()],
    )


@dataclass(frozen=True)
class Pending:
    """Pairs that were committed but not read yet, packed over rows.

    Attributes:
        tokens: The second token of every pair.
        features: Per row ``[pairs, F]``.
        positions: Of every pair.
        counts: Pairs per row, at least one each.
    """

    tokens: list[int]
    features: list[torch.Tensor]
    positions: list[int]
    counts: list[int]

    def of(self, rows: Sequence[int]) -> Pending:
        """The pairs of some of the rows."""
        ends = list(accumulate(self.counts))
        spans = [range(ends[row] - self.counts[row], ends[row]) for row in rows]
        return Pending(
            [self.tokens[at] for span in spans for at in span],
            [self.features[row] for row in rows],
            [self.positions[at] for span in spans for at in span],
            [self.counts[row] for row in rows],
        )


class HeadForward(Protocol):
    """Runs the head: first what is pending, then one token per row and depth."""

    def read(self, paths: Sequence[HeadPath], pending: Pending) -> Predicted:
        """Read the pending pairs into the caches and predict from each row's last."""
        ...

    def step(self, paths: Sequence[HeadPath], hidden: torch.Tensor, depth: int) -> Predicted:
        """Read each path's drafted token as pair ``depth`` behind the committed ones, and predict."""
        ...

    def expert_bytes(self, slot: int) -> int:
        """Memory of a form of an expert's deltas that this forward keeps beside the bank's."""
        ...


def pending_of(paths: Sequence[HeadPath]) -> Pending:
    """What is to be read; caches forget what is beyond their window or was committed anew."""
    tokens: list[int] = []
    features: list[torch.Tensor] = []
    positions: list[int] = []
    counts: list[int] = []
    for path in paths:
        end = len(path.row.tokens) - 1
        cache = path.cache
        if cache.next_pair >= end:
            cache.rewind(end - 1)
        if end - cache.next_pair > cache.window:
            cache.next_pair, cache.length = end - cache.window, 0
        assert path.row.features is not None
        features.append(path.row.features[cache.next_pair : end])
        tokens += path.row.tokens[cache.next_pair + 1 : end + 1]
        positions += range(cache.next_pair, end)
        counts.append(end - cache.next_pair)
    return Pending(tokens, features, positions, counts)


class LibraryHead:
    """The head by torch's operators, on any device.

    Args:
        trunk: The shared trunk.
        bank: The experts.
        embedding: The target's embedding ``[vocab, H]``.
        output: The target's output rows of the draft vocabulary, float32 ``[V, H]``.
        width: Candidates named per position.
        window: Most pairs a position looks back on.
    """

    def __init__(
        self,
        trunk: Trunk,
        bank: ExpertBank,
        embedding: torch.Tensor,
        output: torch.Tensor,
        width: int,
        window: int,
    ) -> None:
        self.trunk = trunk
        self.bank = bank
        self.embedding = embedding
        self.output = output
        self.width = width
        self.window = window

    def expert_bytes(self, slot: int) -> int:
        """None: it reads the bank."""
        return 0

    def read(self, paths: Sequence[HeadPath], pending: Pending) -> Predicted:
        """See :meth:`HeadForward.read`."""
        device = self.embedding.device
        fused = self.trunk.fuse(torch.cat(pending.features).to(self.output))
        tokens, at = sent(torch.tensor([pending.tokens, pending.positions]), device).unbind()
        inputs = self.trunk.layer_input(self.embedding[tokens].to(self.output), fused)
        keys, values = self.trunk.keys_values(inputs, at)
        counts = pending.counts
        last = sent(torch.tensor(counts), device).cumsum(0) - 1
        queries = self.trunk.queries(inputs[last], at[last])
        attended: list[torch.Tensor] = []
        split = zip(
            paths, counts, torch.split(keys, counts), torch.split(values, counts), queries, strict=True
        )
        for path, count, k, v, q in split:
            path.cache.write(k, v)
            path.cache.commit(count)
            attended.append(path.cache.attend(q, 0))
        return self._predict(paths, fused[last], torch.stack(attended))

    def step(self, paths: Sequence[HeadPath], hidden: torch.Tensor, depth: int) -> Predicted:
        """See :meth:`HeadForward.step`; the entry written is temporary."""
        device = self.embedding.device
        positions = [len(path.row.tokens) - 2 + depth for path in paths]
        chosen, at = sent(torch.tensor([[path.token for path in paths], positions]), device).unbind()
        inputs = self.trunk.layer_input(self.embedding[chosen].to(self.output), hidden)
        queries, keys, values = self.trunk.queries_keys_values(inputs, at)
        attended: list[torch.Tensor] = []
        for i, path in enumerate(paths):
            path.cache.write(keys[i : i + 1], values[i : i + 1], depth - 1)
            attended.append(path.cache.attend(queries[i], depth))
        return self._predict(paths, hidden, torch.stack(attended))

    def _predict(self, paths: Sequence[HeadPath], hidden: torch.Tensor, attended: torch.Tensor) -> Predicted:
        slots = [path.slot for path in paths]
        hidden = self.bank.mlp(self.trunk.after_attention(hidden, attended), slots)
        logits = self.bank.logits(self.output, hidden, slots)
        top = logits.topk(self.width, dim=-1)
        likely = (top.values - logits.logsumexp(dim=-1, keepdim=True)).exp()
        # One tensor, so that one copy brings it to the host: float32 holds every id below 2 ** 24.
        return Predicted(hidden, logits, torch.cat((likely, top.indices.to(likely)), dim=-1))
