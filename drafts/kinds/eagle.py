"""``eagle``: a neural head on the target's hidden states, one trunk for all domains and one expert each.

Lazy: what was committed since the last proposal is read in one packed pass over all rows (keys and values
only), then one token per row and depth. Entries of speculated tokens lie behind the cache's length and are
simply overwritten, so the cache always equals one built from scratch on the true features (case A23).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import torch

from drafts.bank import ExpertBank, Rank
from drafts.compiled_head import compiled_head
from drafts.errors import CheckpointError
from drafts.head_cache import HeadCache
from drafts.head_forward import HeadForward, HeadPath, LibraryHead, Predicted, pending_of
from drafts.kinds.base import DraftRow, Draws, Extend, Guess, NeuralSource
from drafts.product import TimedProduct
from drafts.proposal import DraftDistribution
from drafts.transfer import sent
from drafts.trunk import Trunk


class EagleSource(NeuralSource):
    """Chains from the head, batched over rows.

    Args:
        trunk: The shared trunk.
        bank: The experts.
        embedding: The target's embedding ``[vocab, H]``.
        output_weight: The target's output matrix ``[vocab, H]``; its rows of the draft vocabulary are
            copied.
        window: Most pairs a position looks back on.
        max_depth: Deepest draft.
        width: Candidates named per position.
        sample_candidates: Sampled rows perturb this many most probable ids; the rest is given up.
        time_products: Choose matrix products by timing (off in tests, where sizes are tiny); they also serve
            learning, and prompts beside compiled passes.
        compile_passes: Run a depth as one compiled pass where trunk and machine allow it.

    Raises:
        CheckpointError: Trunk and target do not fit.
    """

    name: ClassVar[str] = "eagle"
    needs_features: ClassVar[bool] = True

    def __init__(
        self,
        *,
        trunk: Trunk,
        bank: ExpertBank,
        embedding: torch.Tensor,
        output_weight: torch.Tensor,
        window: int = 512,
        max_depth: int = 8,
        width: int = 4,
        sample_candidates: int = 256,
        time_products: bool = True,
        compile_passes: bool = True,
    ) -> None:
        trunk.check_fits("embedding", embedding)
        trunk.check_fits("output_weight", output_weight)
        self.trunk = trunk
        self.bank = bank
        self.embedding = embedding
        self.output = output_weight[trunk.token_ids.to(output_weight.device)].contiguous().float()
        self.window = window
        self.max_depth = max_depth
        self.width = min(width, len(trunk.token_ids))
        self.sample_candidates = min(sample_candidates, len(trunk.token_ids))
        library = LibraryHead(trunk, bank, embedding, self.output, self.width, window)
        compiled = compiled_head(library) if compile_passes else None
        if time_products:
            trunk.product = TimedProduct([*trunk.matrices(), self.output])
        self.forward: HeadForward = library if compiled is None else compiled
        self._ids: list[int] = trunk.token_ids.tolist()

    @classmethod
    def from_file(
        cls,
        path: Path,
        *,
        embedding: torch.Tensor,
        output_weight: torch.Tensor,
        feature_layers: Sequence[int],
        rank: Rank = 16,
        window: int = 512,
        max_depth: int = 8,
    ) -> EagleSource:
        """The source over a trunk's file and a fresh bank, on the embedding's device.

        Raises:
            CheckpointError: The file cannot be used, or its trunk reads other layers than
                ``feature_layers``.
        """
        trunk = Trunk.load(path).to(embedding.device)
        if trunk.shape.feature_layers != tuple(feature_layers):
            raise CheckpointError(
                f"{path.name}: trained on layers {trunk.shape.feature_layers}, "
                f"the target keeps {tuple(feature_layers)}"
            )
        return cls(
            trunk=trunk,
            bank=ExpertBank(trunk, rank),
            embedding=embedding,
            output_weight=output_weight,
            window=window,
            max_depth=max_depth,
        )

    @torch.inference_mode()
    def draft(
        self, rows: Sequence[DraftRow], limits: Sequence[int], extend: Extend, draw: bool = False
    ) -> None:
        """See :meth:`NeuralSource.draft`; rows without features stay silent."""
        alive: list[HeadPath] = []
        for at, (row, limit) in enumerate(zip(rows, limits, strict=True)):
            limit = min(limit, self.max_depth)
            if limit > 0 and _readable(row):
                alive.append(HeadPath(at, row, self._cache(row), self.bank.index(row.domain), limit))
        if not alive:
            return
        self.trunk.reach(max(len(path.row.tokens) for path in alive) + self.max_depth)
        found, depth = self.forward.read(alive, pending_of(alive)), 0
        while kept := self._extend(alive, found, depth, extend, draw):
            hidden = found.hidden
            if len(kept) < len(alive):
                hidden = hidden[sent(torch.tensor(kept), hidden.device)]
                alive = [alive[i] for i in kept]
            depth += 1
            found = self.forward.step(alive, hidden, depth)

    def unread(self, row: DraftRow) -> int:
        """See :meth:`NeuralSource.unread`: at most a window; nothing where it would be silent."""
        if not _readable(row):
            return 0
        cache = row.scratch.get(self.name)
        read = cache.next_pair if isinstance(cache, HeadCache) else 0
        return min(max(len(row.tokens) - 1 - read, 0), self.window)

    def _cache(self, row: DraftRow) -> HeadCache:
        """The row's cache, made on first sight."""
        cache = row.scratch.get(self.name)
        if not isinstance(cache, HeadCache):
            cache = row.scratch[self.name] = HeadCache(self.trunk, self.window)
        return cache

    def _extend(
        self, alive: Sequence[HeadPath], found: Predicted, depth: int, extend: Extend, draw: bool
    ) -> list[int]:
        """Offer each row's candidates; indices of the rows that go deeper."""
        kept: list[int] = []
        coupled = [i for i, path in enumerate(alive) if path.row.coupled]
        tops, perturbed = found.read_with(
            [self._coupled(alive[i].row, found.logits[i], depth) for i in coupled]
        )
        answers = dict(zip(coupled, perturbed, strict=True))
        for i, (path, top) in enumerate(zip(alive, tops, strict=True)):
            shares, picks = top[: self.width], [int(pick) for pick in top[self.width :]]
            if not 0.0 <= shares[0] <= 1.001:
                continue
            guesses: list[Guess]
            if i in answers:
                guesses = _named(answers[i])
            elif draw and path.row.draws:
                guesses = self._draw(path.row, found.logits[i], depth)
            elif path.row.temperature > 0:
                shaped = (found.logits[i] / path.row.temperature).log_softmax(-1)[picks].exp().tolist()
                guesses = [(self._ids[p], c) for p, c in zip(picks, shaped, strict=True)]
            else:
                guesses = [(self._ids[p], min(c, 1.0)) for p, c in zip(picks, shares, strict=True)]
            token = extend(path.at, guesses)
            if token is not None and depth + 1 < path.limit:
                path.token = token
                kept.append(i)
        return kept

    def _coupled(self, row: DraftRow, logits: torch.Tensor, depth: int) -> torch.Tensor:
        """The top of log q_T + noise, the noise being what verification will use (Daliri et al. 2408.07978).

        Siblings share it. The gap to the next candidate under the known noise tells more about a
        candidate's chance than q does, so that is the confidence.

        Returns:
            Tokens, then confidences, float64 [2 * siblings], not read by the host yet.
        """
        ids, _, perturbed = self._perturbed(row, logits, depth)
        best = perturbed.topk(min(self.width, len(perturbed)))
        confidence = (best.values - perturbed.logsumexp(-1)).exp()
        return torch.cat((ids[best.indices].double(), confidence))

    def _draw(self, row: DraftRow, logits: torch.Tensor, depth: int) -> list[Guess]:
        """Draws without replacement, by noise that verification does not share.

        The top of perturbed scores are such draws (Vieira 2014; Kool et al., arXiv 1903.06059).
        """
        ids, scaled, perturbed = self._perturbed(row, logits, depth)
        best = perturbed.topk(min(self.width, len(perturbed)))
        q = DraftDistribution(ids.numpy(force=True), scaled.softmax(-1).numpy(force=True))
        return Draws(ids[best.indices].tolist(), q)

    def _perturbed(
        self, row: DraftRow, logits: torch.Tensor, depth: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Ids of the most probable tokens, their scores at the row's temperature, and those with noise."""
        assert row.noise is not None
        top = logits.topk(self.sample_candidates)
        ids = self.trunk.token_ids[top.indices]
        scaled = top.values.double() / row.temperature
        return ids, scaled, scaled + row.noise.gumbel(row.output_length + depth, ids)

    def add_domain(self, domain: str, parent: str | None = None) -> None:
        """Give a domain an expert, a copy of ``parent``'s or the trunk unchanged."""
        self.bank.add(domain, parent)

    def drop_domain(self, domain: str) -> None:
        """Free a domain's expert."""
        self.bank.drop(domain)

    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        """Every domain's expert with the id table."""
        return {domain: self.bank.tensors(domain) for domain in self.bank.domains}

    def load_state(self, state: dict[str, dict[str, torch.Tensor]]) -> None:
        """Restore experts, adding domains as needed."""
        for domain, tensors in state.items():
            self.bank.add(domain)
            self.bank.load(domain, tensors)

    def describe(self, domain: str) -> dict[str, int | float | str]:
        """Size of the expert, in the bank and as it is packed for serving, and of the draft vocabulary."""
        known = domain in self.bank
        return {
            "expert_bytes": self.bank.bytes_per_expert if known else 0,
            "packed_bytes": self.forward.expert_bytes(self.bank.index(domain)) if known else 0,
            "rank": self.bank.rank,
            "draft_vocabulary": len(self._ids),
        }


def _readable(row: DraftRow) -> bool:
    """Whether there is a pair of feature and token to predict from."""
    return row.features is not None and len(row.tokens) > 1


def _named(answer: Sequence[float]) -> list[Guess]:
    """Guesses of a coupled row, from its tokens and then their confidences."""
    count = len(answer) // 2
    return [(int(token), c) for token, c in zip(answer[:count], answer[count:], strict=True)]
