"""The interface of a draft kind: two verbs, ``propose`` and ``observe``, over rows of a batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch

from drafts.proposal import Proposal


class Noise(Protocol):
    """The Gumbel noise that verification will use for one request (Daliri et al. 2408.07978).

    A draft that perturbs its own distribution with the same noise guesses the sampled token itself,
    not merely a likely one.
    """

    def gumbel(self, position: int, token_ids: torch.Tensor) -> torch.Tensor:
        """Noise of ``token_ids`` ([n], int64) at output ``position`` (0 = first), float64 [n]."""
        ...


@dataclass
class DraftRow:
    """What a draft may see of one running request. Owned by the engine; read-only for drafts.

    Attributes:
        request_id: Unique while the request runs.
        domain: The domain whose expert and memory serve the request. May change once, from the base
            domain to the assigned one, when routing finishes after prefill has begun.
        tokens: Prompt and committed output. The last token is the *root* of the next proposal: it
            is committed, but the target has not processed it yet.
        prompt_length: Number of prompt tokens in ``tokens``.
        features: Target hidden states ``[positions, F]`` of the tokens processed so far; the first
            ``len(tokens) - 1`` rows are valid. ``None`` when no source needs them.
        temperature: The request's temperature; 0 means greedy.
        noise: The verification noise of a sampled request, ``None`` when greedy.
        scratch: Per-request state of sources, keyed by source name. A source creates its entry on
            first sight and the engine drops the whole row when the request ends.
        store: Whether the request's text may enter memories and buffers.
    """

    request_id: str
    domain: str
    tokens: list[int]
    prompt_length: int
    features: torch.Tensor | None = None
    temperature: float = 0.0
    noise: Noise | None = None
    store: bool = True
    scratch: dict[str, Any] = field(default_factory=dict)

    @property
    def output_length(self) -> int:
        """Committed output tokens so far, which is also the next output position."""
        return len(self.tokens) - self.prompt_length


class Source(ABC):
    """One kind of draft, serving every domain.

    A source never raises for a row it has nothing to say about: it returns ``EMPTY``. It keeps no
    per-request state outside ``DraftRow.scratch``, so nothing of one request can reach another
    except through what it deliberately learns.
    """

    name: ClassVar[str]
    needs_features: ClassVar[bool] = False
    is_neural: ClassVar[bool] = False
    """Neural sources cost model time per depth; the mixture asks them only where that pays."""

    @abstractmethod
    def propose(self, rows: Sequence[DraftRow], limits: Sequence[int]) -> list[Proposal]:
        """One proposal per row, of at most ``limits[i]`` nodes (0 = stay silent)."""

    def observe(self, row: DraftRow, emitted: Sequence[int]) -> None:  # noqa: B027
        """``emitted`` tokens have just been committed to ``row.tokens`` (already appended)."""

    def finish(self, row: DraftRow) -> None:  # noqa: B027
        """The request is complete; learn from its text if ``row.store`` allows it."""

    def add_domain(self, domain: str, parent: str | None = None) -> None:  # noqa: B027
        """Serve a new domain, inheriting from ``parent`` where the kind has state to inherit."""

    def drop_domain(self, domain: str) -> None:  # noqa: B027
        """Forget a domain's state."""

    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        """Persistent state per domain as tensors (for safetensors)."""
        return {}

    def load_state(self, state: dict[str, dict[str, torch.Tensor]]) -> None:  # noqa: B027
        """Restore what :meth:`state` returned."""

    def describe(self, domain: str) -> dict[str, int | float | str]:
        """Figures for the statistics of one domain, for example memory size in tokens and bytes."""
        return {}


class NeuralSource(Source):
    """A source that runs a model: each further depth costs time, so it is told what depth must earn."""

    is_neural: ClassVar[bool] = True

    @abstractmethod
    def propose_priced(
        self, rows: Sequence[DraftRow], limits: Sequence[int], floors: Sequence[float]
    ) -> list[Proposal]:
        """Like :meth:`propose`, deepening row i only while its product of confidences is above
        ``floors[i]``.
        """

    def propose(self, rows: Sequence[DraftRow], limits: Sequence[int]) -> list[Proposal]:
        """Proposals of full depth, whatever their confidence."""
        return self.propose_priced(rows, limits, [0.0] * len(rows))
