"""What learning asks of a trainable draft, and the ``eagle`` head's answer (a draft model's: model_head)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Protocol

import torch
import torch.nn.functional as F

from drafts.bank import Expert, ExpertBank, expert_logits, expert_mlp
from drafts.trunk import Trunk


class TrainableHead(Protocol):
    """A draft whose experts are small tensors, over what can be said of a position without an expert.

    That is a hidden state where experts sit behind the attention, and the position's context where they
    reach every layer.
    """

    @property
    def needs_features(self) -> bool:
        """Whether ``encode`` reads the target's hidden states."""
        ...

    @property
    def context(self) -> int | None:
        """Last tokens of a text that ``encode`` reads, which bound the window; ``None`` for all."""
        ...

    @property
    def width(self) -> int:
        """Width ``W`` of what ``encode`` gives."""
        ...

    @property
    def trunk_fingerprint(self) -> str | None:
        """Fingerprint of the weights that what ``encode`` gives depends on; ``None`` where on none."""
        ...

    @property
    def together(self) -> int:
        """Positions of one record that are drawn at once, as they share most of their cost; 1 for none."""
        ...

    @property
    def token_ids(self) -> torch.Tensor:
        """Target ids of the draft vocabulary, int64 ``[V]``."""
        ...

    @property
    def vocab_size(self) -> int:
        """Size of the target's vocabulary."""
        ...

    def has(self, domain: str) -> bool:
        """Whether the domain has an expert that can learn."""
        ...

    def served(self, domain: str) -> Expert:
        """A copy of the expert the domain is served with, id table included."""
        ...

    def encode(
        self,
        tokens: Sequence[int],
        features: torch.Tensor | None,
        prompt_length: int,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        """Expert-independent ``[P, W]``, as it is stored, at the bases of output ``positions`` ``[P]``.

        ``features`` are the last ones of ``tokens[:-1]``; there may be fewer than tokens.
        """
        ...

    def logits(self, hidden: torch.Tensor, expert: Expert) -> torch.Tensor:
        """Logits ``[P, V]`` over the draft vocabulary of what ``encode`` gave; differentiable."""
        ...


class EagleHead:
    """The ``eagle`` head for learning: shares trunk and bank with the source that serves.

    Args:
        trunk: The trunk, frozen.
        bank: The experts being served.
        embedding: The target's embedding ``[vocab, H]``.
        output: The target's output rows of the draft vocabulary ``[V, H]``.
    """

    needs_features = True
    context = None
    together = 1

    def __init__(self, trunk: Trunk, bank: ExpertBank, embedding: torch.Tensor, output: torch.Tensor) -> None:
        self.trunk = trunk
        self.bank = bank
        self.embedding = embedding
        self.output = output
        self.token_ids = trunk.token_ids
        self.vocab_size = trunk.shape.vocab_size
        self.width = trunk.shape.hidden_size

    @cached_property
    def trunk_fingerprint(self) -> str:
        """The trunk's: all of it lies before an expert's own part, or beside it."""
        return self.trunk.fingerprint()

    def has(self, domain: str) -> bool:
        """Whether the bank holds an expert for the domain."""
        return domain in self.bank

    def served(self, domain: str) -> Expert:
        """The bank's deltas, copied."""
        return self.bank.tensors(domain)

    @torch.no_grad()
    def encode(
        self,
        tokens: Sequence[int],
        features: torch.Tensor | None,
        prompt_length: int,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        """Hidden after attention, float16, at pair ``prompt_length - 2 + position`` (case A28)."""
        assert features is not None
        trunk, device = self.trunk, self.embedding.device
        end = len(tokens) - 1
        first = end - len(features)
        trunk.reach(end)
        pairs = torch.arange(first, end, device=device)
        ids = torch.tensor(tokens[first + 1 : end + 1], device=device)
        fused = trunk.fuse(features.to(self.output))
        inputs = trunk.layer_input(self.embedding[ids].to(self.output), fused)
        keys, values = trunk.keys_values(inputs, pairs)
        wanted = positions.to(device) + prompt_length - 2
        at = wanted - first
        queries = trunk.queries(inputs[at], wanted)
        seen = (pairs[None] <= wanted[:, None])[None, None]
        attended = F.scaled_dot_product_attention(
            queries.transpose(0, 1)[None],
            keys.transpose(0, 1)[None],
            values.transpose(0, 1)[None],
            attn_mask=seen,
            enable_gqa=True,
        )
        return trunk.after_attention(fused[at], attended[0].transpose(0, 1).flatten(1)).half()

    def logits(self, hidden: torch.Tensor, expert: Expert) -> torch.Tensor:
        """MLP and output with the expert's deltas."""
        hidden = hidden.to(self.output.device).float()
        return expert_logits(self.trunk, self.output, expert_mlp(self.trunk, hidden, expert), expert)


def weights_of(expert: Expert) -> Expert:
    """An expert's learned tensors, without what travels with it (id table, fingerprint)."""
    return {name: tensor for name, tensor in expert.items() if tensor.is_floating_point()}
