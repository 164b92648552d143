"""The interface of a draft kind: two verbs, ``propose`` and ``observe``, over rows of a batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch

from drafts.proposal import EMPTY, POINT_MASS, ROOT, DraftDistribution, Proposal

Guess = tuple[int, float]
"""A candidate for the next token and the source's confidence in it, in [0, 1]."""

Extend = Callable[[int, Sequence[Guess]], "int | None"]
"""Takes the guesses for a row (by index) at its present path; gives the token to continue with, if any."""


class Draws(list[Guess]):
    """Guesses drawn one after another, none twice, in the order they were drawn.

    Their confidences depend on the draws before each and not on the token itself, so that trimming by
    confidence leaves the distribution as it is.

    Args:
        tokens: What was drawn.
        distribution: What the first was drawn from.
    """

    def __init__(self, tokens: Sequence[int], distribution: DraftDistribution) -> None:
        super().__init__()
        self.distributions: list[DraftDistribution] = []
        left: DraftDistribution | None = distribution
        open_share = 1.0
        for token in tokens:
            if left is None:
                break
            self.distributions.append(left)
            confidence = open_share * min(float(left.probabilities.max()), 1.0)
            self.append((token, confidence))
            open_share -= confidence
            left = left.without(token)


class Noise(Protocol):
    """The Gumbel noise that verification will use for one request (Daliri et al. 2408.07978).

    A draft that perturbs its own distribution with the same noise guesses the sampled token itself,
    not merely a likely one.
    """

    def gumbel(self, position: int, token_ids: torch.Tensor) -> torch.Tensor:
        """Noise of ``token_ids`` ([n], int64) at output ``position`` (first: 0): float64 [n], same device."""
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
        noise_is_shared: False where verification uses other noise (rejection sampling). A source that draws
            with ``noise`` then says what it drew from (:class:`Draws`), or names fixed tokens.
        scratch: Per-request state of sources, keyed by source name. A source creates its entry on
            first sight and the engine drops the whole row when the request ends.
        store: Whether the request's text may enter memories and buffers.
        sources: Sources that the request restricts its domain to, ``None`` for all of them; empty asks
            for no proposals.
    """

    request_id: str
    domain: str
    tokens: list[int]
    prompt_length: int
    features: torch.Tensor | None = None
    temperature: float = 0.0
    noise: Noise | None = None
    store: bool = True
    sources: tuple[str, ...] | None = None
    scratch: dict[str, Any] = field(default_factory=dict)
    noise_is_shared: bool = True

    @property
    def coupled(self) -> bool:
        """Whether drafts look at the very noise that verification will use."""
        return self.temperature > 0 and self.noise is not None and self.noise_is_shared

    @property
    def draws(self) -> bool:
        """Whether drafts have noise of their own to draw from."""
        return self.temperature > 0 and self.noise is not None and not self.noise_is_shared

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
        """One chain per row, of at most ``limits[i]`` nodes (0 = stay silent), from this source alone."""

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


class MemorySource(Source):
    """A source that costs no model time: it can be asked about any continuation, node by node."""

    @abstractmethod
    def guesses(self, row: DraftRow, path: Sequence[int]) -> list[Guess]:
        """Candidates, best first, for the token after ``row.tokens`` and ``path``; may be none."""

    def propose(self, rows: Sequence[DraftRow], limits: Sequence[int]) -> list[Proposal]:
        """The chain of best guesses per row."""
        return [self._chain(row, limit) for row, limit in zip(rows, limits, strict=True)]

    def _chain(self, row: DraftRow, limit: int) -> Proposal:
        tokens: list[int] = []
        confidence: list[float] = []
        while len(tokens) < limit and row.tokens:
            found = self.guesses(row, tokens)
            if not found:
                break
            tokens.append(found[0][0])
            confidence.append(found[0][1])
        return Proposal.chain(tokens, self.name, confidence, [POINT_MASS] * len(tokens)) if tokens else EMPTY


class NeuralSource(Source):
    """A source that runs a model, one token deeper at a time, along a path that the caller chooses.

    Each depth costs time, so the caller also decides when to stop.
    """

    is_neural: ClassVar[bool] = True

    @abstractmethod
    def draft(
        self, rows: Sequence[DraftRow], limits: Sequence[int], extend: Extend, draw: bool = False
    ) -> None:
        """Guess depth by depth for every row with ``limits[i] > 0``.

        Args:
            rows: The batch.
            limits: Most depths per row.
            extend: Called with a row's index and its guesses, best first; gives the token that is to be
                read next (from whatever source), or ``None`` when the row goes no deeper.
            draw: Rows with noise of their own (``DraftRow.draws``) get :class:`Draws`; without it they get
                their most probable tokens, as greedy rows do.
        """

    def unread(self, row: DraftRow) -> int:
        """Tokens of ``row`` that drafting for it would read for the first time now; 0 where that is free."""
        return 0

    def propose_priced(
        self,
        rows: Sequence[DraftRow],
        limits: Sequence[int],
        floors: Sequence[float],
        width: int = 1,
    ) -> list[Proposal]:
        """This source alone: row i deepens while its product of confidences is above ``floors[i]``.

        Every position has up to ``width`` siblings, of which the first is continued. Whether a node is
        there depends on its ancestors only, so drawn nodes are verified exactly by rejection sampling.
        """
        combs = [_Comb(self.name) for _ in rows]

        def extend(index: int, guesses: Sequence[Guess]) -> int | None:
            if not guesses:
                return None
            comb = combs[index]
            comb.add(rows[index], guesses, width)
            return guesses[0][0] if comb.reach > floors[index] else None

        self.draft(rows, limits, extend, draw=True)
        return [comb.proposal() for comb in combs]

    def propose(self, rows: Sequence[DraftRow], limits: Sequence[int]) -> list[Proposal]:
        """Chains of full depth, whatever their confidence."""
        return self.propose_priced(rows, limits, [0.0] * len(rows))


@dataclass
class _Comb:
    """A chain whose every node may have siblings without children."""

    source: str
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)
    distributions: list[DraftDistribution | None] = field(default_factory=list)
    end: int = ROOT
    reach: float = 1.0

    def add(self, row: DraftRow, guesses: Sequence[Guess], width: int) -> None:
        """One position more: the first ``width`` guesses follow the present end, the first is the new end."""
        first = len(self.tokens)
        for token, confidence in guesses[:width]:
            self.tokens.append(token)
            self.parents.append(self.end)
            self.confidence.append(confidence)
        added = len(self.tokens) - first
        if isinstance(guesses, Draws):
            self.distributions += guesses.distributions[:added]
        else:
            self.distributions += [None if row.coupled else POINT_MASS] * added
        self.end = first
        self.reach *= guesses[0][1]

    def proposal(self) -> Proposal:
        if not self.tokens:
            return EMPTY
        known = None if None in self.distributions else tuple(self.distributions)
        names = (self.source,) * len(self.tokens)
        return Proposal(tuple(self.tokens), tuple(self.parents), names, tuple(self.confidence), known)
