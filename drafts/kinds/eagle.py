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
from drafts.kinds.base import DraftRow, NeuralSource
from drafts.product import TimedProduct
from drafts.proposal import EMPTY, Proposal
from drafts.trunk import Trunk


@dataclass
class _Chain:
    """A chain being drafted for one row."""

    at: int
    row: DraftRow
    cache: HeadCache
    slot: int
    limit: int
    floor: float
    tokens: list[int]
    confidence: list[float]
    reach: float = 1.0


class EagleSource(NeuralSource):
    """Chains from the head, batched over rows.

    Args:
        trunk: The shared trunk.
        bank: The experts.
        embedding: The target's embedding ``[vocab, H]``.
        output_weight: The target's output matrix ``[vocab, H]``; its rows of the draft vocabulary are
            copied.
        window: Most pairs a position looks back on.
        max_depth: Longest chain.
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
    def propose_priced(
        self, rows: Sequence[DraftRow], limits: Sequence[int], floors: Sequence[float]
    ) -> list[Proposal]:
        """Chains that deepen only while their estimated chance of whole acceptance is above ``floors[i]``."""
        proposals: list[Proposal] = [EMPTY] * len(rows)
        chains: list[_Chain] = []
        for at, (row, limit) in enumerate(zip(rows, limits, strict=True)):
            limit = min(limit, self.max_depth)
            if limit > 0 and row.features is not None and len(row.tokens) > 1:
                slot = self.bank.index(row.domain)
                chains.append(_Chain(at, row, self._cache(row), slot, limit, floors[at], [], []))
        if not chains:
            return proposals
        hidden, attended = self._read(chains)
        alive = chains
        for depth in range(max(chain.limit for chain in chains)):
            if depth:
                hidden, attended = self._step(alive, hidden, depth)
            slots = [chain.slot for chain in alive]
            hidden = self.bank.mlp(self.trunk.after_attention(hidden, attended), slots)
            logits = self.bank.logits(self.output, hidden, slots)
            kept = self._extend(alive, logits, depth)
            if not kept:
                break
            if len(kept) < len(alive):
                hidden = hidden[kept]
                alive = [alive[i] for i in kept]
        for chain in chains:
            if chain.tokens:
                proposals[chain.at] = Proposal.chain(chain.tokens, self.name, chain.confidence)
        return proposals

    def _cache(self, row: DraftRow) -> HeadCache:
        """The row's cache, made on first sight."""
        cache = row.scratch.get(self.name)
        if not isinstance(cache, HeadCache):
            cache = row.scratch[self.name] = HeadCache(self.trunk, self.window)
        return cache

    def _read(self, chains: Sequence[_Chain]) -> tuple[torch.Tensor, torch.Tensor]:
        """Read all pending pairs of all rows; residual and attention at each row's last pair."""
        tokens: list[int] = []
        features: list[torch.Tensor] = []
        positions: list[int] = []
        counts: list[int] = []
        for chain in chains:
            end = len(chain.row.tokens) - 1
            cache = chain.cache
            if cache.next_pair >= end:
                cache.rewind(end - 1)
            if end - cache.next_pair > self.window:
                cache.next_pair, cache.length = end - self.window, 0
            assert chain.row.features is not None
            features.append(chain.row.features[cache.next_pair : end])
            tokens += chain.row.tokens[cache.next_pair + 1 : end + 1]
            positions += range(cache.next_pair, end)
            counts.append(end - cache.next_pair)
        device = self.embedding.device
        self.trunk.reach(max(len(chain.row.tokens) for chain in chains) + self.max_depth)
        fused = self.trunk.fuse(torch.cat(features).to(self.output))
        embeds = self.embedding[torch.tensor(tokens, device=device)].to(self.output)
        inputs = self.trunk.layer_input(embeds, fused)
        at = torch.tensor(positions, device=device)
        keys, values = self.trunk.keys_values(inputs, at)
        last = torch.tensor(counts, device=device).cumsum(0) - 1
        queries = self.trunk.queries(inputs[last], at[last])
        attended: list[torch.Tensor] = []
        split = zip(
            chains, counts, torch.split(keys, counts), torch.split(values, counts), queries, strict=True
        )
        for chain, count, k, v, q in split:
            chain.cache.write(k, v)
            chain.cache.commit(count)
            attended.append(chain.cache.attend(q, 0))
        return fused[last], torch.stack(attended)

    def _step(
        self, alive: Sequence[_Chain], hidden: torch.Tensor, depth: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One speculated token per row: its temporary entry, and attention over window and entries."""
        device = self.embedding.device
        chosen = torch.tensor([chain.tokens[-1] for chain in alive], device=device)
        at = torch.tensor([len(chain.row.tokens) - 2 + depth for chain in alive], device=device)
        inputs = self.trunk.layer_input(self.embedding[chosen].to(self.output), hidden)
        queries, keys, values = self.trunk.queries_keys_values(inputs, at)
        attended: list[torch.Tensor] = []
        for i, chain in enumerate(alive):
            chain.cache.write(keys[i : i + 1], values[i : i + 1], depth - 1)
            attended.append(chain.cache.attend(queries[i], depth))
        return hidden, torch.stack(attended)

    def _extend(self, alive: Sequence[_Chain], logits: torch.Tensor, depth: int) -> list[int]:
        """Choose each row's next token; indices of the rows worth deepening."""
        best = logits.max(dim=-1)
        norm = logits.logsumexp(dim=-1)
        index, share = best.indices.tolist(), (best.values - norm).exp().tolist()
        kept: list[int] = []
        for i, chain in enumerate(alive):
            if not 0.0 <= share[i] <= 1.001:
                continue
            pick, confidence = index[i], min(share[i], 1.0)
            if chain.row.temperature > 0 and chain.row.noise is not None:
                pick = self._sample(chain.row, logits[i], depth)
                confidence = min(1.0, float((logits[i, pick] - norm[i]).exp()))
            chain.tokens.append(int(self._ids[pick]))
            chain.confidence.append(confidence)
            chain.reach *= confidence
            if chain.reach >= chain.floor and depth + 1 < chain.limit:
                kept.append(i)
        return kept

    def _sample(self, row: DraftRow, logits: torch.Tensor, depth: int) -> int:
        """argmax(log q_T + noise) with the noise verification will use (Daliri et al. 2408.07978)."""
        assert row.noise is not None
        top = logits.topk(self.sample_candidates)
        noise = row.noise.gumbel(row.output_length + depth, self.trunk.token_ids[top.indices])
        perturbed = top.values.double() / row.temperature + noise.to(logits.device)
        return int(top.indices[perturbed.argmax()])

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
