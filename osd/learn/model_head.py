"""What a draft model's adapters learn from: the request's own tokens, read anew in every step.

Adapters sit in all layers, so nothing can be computed once as for the ``eagle`` head. The encoding of a
position is therefore its context itself; positions of one answer share one pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from drafts.adapters import FINGERPRINT
from drafts.bank import Expert
from drafts.errors import CheckpointError

if TYPE_CHECKING:
    from drafts.kinds.model import ModelSource

CONTEXT = 256
"""Last tokens of a text that are read in training."""


class ModelHead:
    """The draft models of a source for learning.

    Args:
        source: The source that serves them.
        tokens: Ids of the tokenizer, all of which a model may propose.
        vocab_size: Columns of the target's logits, which may be padded beyond ``tokens`` and say so of a
            position; ``tokens`` if not given.
    """

    needs_features = False
    context = CONTEXT
    together = 32
    width = CONTEXT
    trunk_fingerprint = None

    def __init__(self, source: ModelSource, tokens: int, vocab_size: int | None = None) -> None:
        self.source = source
        self.vocab_size = max(tokens, vocab_size or 0)
        self.token_ids = torch.arange(tokens, device=source.device)

    def has(self, domain: str) -> bool:
        """Whether the domain has an adapter, and its model is in memory."""
        draft = self.source.of(domain)
        return domain in self.source and draft is not None and draft.resident

    def served(self, domain: str) -> Expert:
        """The adapter, copied."""
        return self.source.tensors(domain)

    def encode(
        self,
        tokens: Sequence[int],
        features: torch.Tensor | None,
        prompt_length: int,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        """Contexts int32 ``[P, CONTEXT]`` of output ``positions``, from one common token on, then -1.

        The last token of a context is the one before the position (case A28).
        """
        first = max(0, len(tokens) - 1 - CONTEXT)
        text = torch.tensor(tokens[first : first + CONTEXT], dtype=torch.int32)
        lengths = (positions + prompt_length - first).clamp(max=CONTEXT)
        places = torch.arange(CONTEXT)
        padded = torch.nn.functional.pad(text, (0, CONTEXT - len(text)), value=-1)
        return torch.where(places[None] < lengths[:, None], padded, -1).int()

    def logits(self, hidden: torch.Tensor, expert: Expert) -> torch.Tensor:
        """Logits ``[P, tokens]`` after the contexts ``hidden [P, CONTEXT]``, under ``expert``.

        They lie where ``token_ids`` do, also those of a model on another device.
        """
        draft = self.source.by_fingerprint(expert[FINGERPRINT].cpu())
        if draft is None or draft.adapters is None:
            raise CheckpointError("adapter: the draft model it was trained on is not there any more")
        lengths = (hidden >= 0).sum(-1).tolist()
        found: dict[int, torch.Tensor] = {}
        for text, members in shared_texts(hidden, lengths):
            at = torch.tensor([lengths[row] - 1 for row in members], device=draft.model.device)
            ids = text.to(draft.model.device).long()[None]
            logits = draft.logits_at(expert, ids, at)
            found.update(zip(members, logits, strict=True))
        return torch.stack([found[row] for row in range(len(lengths))]).to(self.token_ids.device)


def shared_texts(contexts: torch.Tensor, lengths: Sequence[int]) -> list[tuple[torch.Tensor, list[int]]]:
    """Texts to read and the rows that each serves: a row whose context begins another's shares its pass."""
    texts: list[tuple[torch.Tensor, list[int]]] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        own = contexts[row, : lengths[row]]
        for text, members in texts:
            if torch.equal(text[: len(own)], own):
                members.append(row)
                break
        else:
            texts.append((own, [row]))
    return texts
