"""What a target lends the head that drafts for it; the one thing training needs of a loaded target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from drafts.errors import InvalidValueError
from drafts.trunk import HeadShape


@dataclass(frozen=True)
class Lent:
    """A target's frozen matrices and, where its layers are built like the head's, its last layer.

    Attributes:
        name: What the target was loaded from.
        shape: The head's dimensions; ``feature_layers`` are those the target keeps.
        layers: Decoder layers of the target.
        embedding: float32 ``[vocab, H]``.
        output: float32 ``[vocab, H]``.
        end_tokens: Tokens that end a text, ascending.
        last_layer: Weights of the target's last layer and final norm by the trunk's names, ``qkv`` being
            ``[(A + 2G) D, H]``; ``None`` where the layer is of another kind.
        obstacle: Why there is no ``last_layer``.
    """

    name: str
    shape: HeadShape
    layers: int
    embedding: torch.Tensor
    output: torch.Tensor
    end_tokens: tuple[int, ...]
    last_layer: Mapping[str, torch.Tensor] | None
    obstacle: str | None

    def reading(self, layers: Sequence[int] | None) -> Lent:
        """The same for a head that reads ``layers`` of those kept; ``None`` are all of them.

        Raises:
            InvalidValueError: No layer, one that is not kept, or not ascending.
        """
        kept = self.shape.feature_layers
        if layers is None:
            return self
        if not layers or list(layers) != [layer for layer in kept if layer in layers]:
            raise InvalidValueError("layers", list(layers), f"ascending, of those collected: {list(kept)}")
        return replace(self, shape=replace(self.shape, feature_layers=tuple(layers)))
