"""``eagle``: a neural head on the target's hidden states, one trunk for all domains and one expert each.

Lazy: what was committed since the last proposal is read in one packed pass over all rows (keys and values
only), then one token per row and depth. Entries of speculated tokens lie behind the cache's length and are
simply overwritten, so the cache always equals one built from scratch on the true features (case A23).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from drafts.bank import ExpertBank
from drafts.errors import CheckpointError
from drafts.head_cache import HeadCache
from drafts.kinds.base import DraftRow, Draws, Extend, Guess, NeuralSource
from drafts.product import TimedProduct
from drafts.proposal import DraftDistribution
from drafts.trunk import Trunk


@dataclass
class _Path:
    """What one row has drafted so far."""

    at: int
    row: DraftRow
    cache: HeadCache
    slot: int
    limit: int
    token: int = -1


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
        time_products: Choose matrix products by timing (off in tests, where sizes are tiny).

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
    ) -> None:
        shape = trunk.shape
        for field, matrix in (("embedding", embedding), ("output_weight", output_weight)):
            if tuple(matrix.shape) != (shape.vocab_size, shape.hidden_size):
                raise CheckpointError(
                    f"{field}: shape {tuple(matrix.shape)}, but the trunk was trained for a target with "
                    f"{(shape.vocab_size, shape.hidden_size)}"
                )
        self.trunk = trunk
        self.bank = bank
        self.embedding = embedding
        self.output = output_weight[trunk.token_ids.to(output_weight.device)].contiguous().float()
        self.window = window
        self.max_depth = max_depth
        self.width = min(width, len(trunk.token_ids))
        self.sample_candidates = min(sample_candidates, len(trunk.token_ids))
        if time_products:
            trunk.product = TimedProduct([*trunk.matrices(), self.output])
        self._ids: list[int] = trunk.token_ids.tolist()

    @classmethod
    def from_file(
        cls,
        path: Path,
        *,
        embedding: torch.Tensor,
        output_weight: torch.Tensor,
        feature_layers: Sequence[int],
        rank: int = 16,
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
        alive: list[_Path] = []
        for at, (row, limit) in enumerate(zip(rows, limits, strict=True)):
            limit = min(limit, self.max_depth)
            if limit > 0 and row.features is not None and len(row.tokens) > 1:
                alive.append(_Path(at, row, self._cache(row), self.bank.index(row.domain), limit))
        if not alive:
            return
        hidden, attended = self._read(alive)
        for depth in range(max(path.limit for path in alive)):
            if depth:
                hidden, attended = self._step(alive, hidden, depth)
            slots = [path.slot for path in alive]
            hidden = self.bank.mlp(self.trunk.after_attention(hidden, attended), slots)
            logits = self.bank.logits(self.output, hidden, slots)
            kept = self._extend(alive, logits, depth, extend, draw)
            if not kept:
                break
            if len(kept) < len(alive):
                hidden = hidden[kept]
                alive = [alive[i] for i in kept]

    def _cache(self, row: DraftRow) -> HeadCache:
        """The row's cache, made on first sight."""
        cache = row.scratch.get(self.name)
        if not isinstance(cache, HeadCache):
            cache = row.scratch[self.name] = HeadCache(self.trunk, self.window)
        return cache

    def _read(self, paths: Sequence[_Path]) -> tuple[torch.Tensor, torch.Tensor]:
        """Read all pending pairs of all rows; residual and attention at each row's last pair."""
        tokens: list[int] = []
        features: list[torch.Tensor] = []
        positions: list[int] = []
        counts: list[int] = []
        for path in paths:
            end = len(path.row.tokens) - 1
            cache = path.cache
            if cache.next_pair >= end:
                cache.rewind(end - 1)
            if end - cache.next_pair > self.window:
                cache.next_pair, cache.length = end - self.window, 0
            assert path.row.features is not None
            features.append(path.row.features[cache.next_pair : end])
            tokens += path.row.tokens[cache.next_pair + 1 : end + 1]
            positions += range(cache.next_pair, end)
            counts.append(end - cache.next_pair)
        device = self.embedding.device
        self.trunk.reach(max(len(path.row.tokens) for path in paths) + self.max_depth)
        fused = self.trunk.fuse(torch.cat(features).to(self.output))
        embeds = self.embedding[torch.tensor(tokens, device=device)].to(self.output)
        inputs = self.trunk.layer_input(embeds, fused)
        at = torch.tensor(positions, device=device)
        keys, values = self.trunk.keys_values(inputs, at)
        last = torch.tensor(counts, device=device).cumsum(0) - 1
        queries = self.trunk.queries(inputs[last], at[last])
        attended: list[torch.Tensor] = []
        split = zip(
            paths, counts, torch.split(keys, counts), torch.split(values, counts), queries, strict=True
        )
        for path, count, k, v, q in split:
            path.cache.write(k, v)
            path.cache.commit(count)
            attended.append(path.cache.attend(q, 0))
        return fused[last], torch.stack(attended)

    def _step(
        self, alive: Sequence[_Path], hidden: torch.Tensor, depth: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One speculated token per row: its temporary entry, and attention over window and entries."""
        device = self.embedding.device
        positions = [len(path.row.tokens) - 2 + depth for path in alive]
        chosen, at = torch.tensor([[path.token for path in alive], positions], device=device).unbind()
        inputs = self.trunk.layer_input(self.embedding[chosen].to(self.output), hidden)
        queries, keys, values = self.trunk.queries_keys_values(inputs, at)
        attended: list[torch.Tensor] = []
        for i, path in enumerate(alive):
            path.cache.write(keys[i : i + 1], values[i : i + 1], depth - 1)
            attended.append(path.cache.attend(queries[i], depth))
        return hidden, torch.stack(attended)

    def _extend(
        self, alive: Sequence[_Path], logits: torch.Tensor, depth: int, extend: Extend, draw: bool
    ) -> list[int]:
        """Offer each row's candidates; indices of the rows that go deeper."""
        top = logits.topk(self.width, dim=-1)
        likely = (top.values - logits.logsumexp(dim=-1, keepdim=True)).exp()
        # One copy to the host a depth: float32 holds every id of a vocabulary below 2 ** 24.
        found = torch.cat((likely, top.indices.to(likely)), dim=-1).tolist()
        shares = [values[: self.width] for values in found]
        picks = [[int(index) for index in values[self.width :]] for values in found]
        kept: list[int] = []
        for i, path in enumerate(alive):
            if not 0.0 <= shares[i][0] <= 1.001:
                continue
            guesses: list[Guess]
            if path.row.coupled or (draw and path.row.draws):
                guesses = self._sample(path.row, logits[i], depth)
            elif path.row.temperature > 0:
                shaped = (logits[i] / path.row.temperature).log_softmax(-1)[top.indices[i]].exp().tolist()
                guesses = [(self._ids[p], c) for p, c in zip(picks[i], shaped, strict=True)]
            else:
                guesses = [(self._ids[p], min(c, 1.0)) for p, c in zip(picks[i], shares[i], strict=True)]
            token = extend(path.at, guesses)
            if token is not None and depth + 1 < path.limit:
                path.token = token
                kept.append(i)
        return kept

    def _sample(self, row: DraftRow, logits: torch.Tensor, depth: int) -> list[Guess]:
        """The top of log q_T + noise, the noise being what verification will use (Daliri et al. 2408.07978).

        Siblings share it. The gap to the next candidate under the known noise tells more about a
        candidate's chance than q does, so that is the confidence. Noise that verification does not share
        makes the same tokens draws without replacement (Vieira 2014; Kool et al., arXiv 1903.06059).
        """
        assert row.noise is not None
        top = logits.topk(self.sample_candidates)
        noise = row.noise.gumbel(row.output_length + depth, self.trunk.token_ids[top.indices])
        scaled = top.values.double() / row.temperature
        perturbed = scaled + noise.to(logits.device)
        best = perturbed.topk(min(self.width, len(perturbed)))
        if not row.noise_is_shared:
            ids = self.trunk.token_ids[top.indices].numpy(force=True)
            drawn = [self._ids[pick] for pick in top.indices[best.indices].tolist()]
            return Draws(drawn, DraftDistribution(ids, scaled.softmax(-1).numpy(force=True)))
        confidence = (best.values - perturbed.logsumexp(-1)).exp().tolist()
        return [
            (self._ids[pick], c)
            for pick, c in zip(top.indices[best.indices].tolist(), confidence, strict=True)
        ]

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
        """Size of the expert and of the draft vocabulary."""
        return {
            "expert_bytes": self.bank.bytes_per_expert if domain in self.bank else 0,
            "rank": self.bank.rank,
            "draft_vocabulary": len(self._ids),
        }
