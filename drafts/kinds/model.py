"""``model``: a Hugging Face causal language model with the target's tokenizer as draft."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from drafts.config import ModelConfig
from drafts.errors import InvalidValueError
from drafts.kinds.base import DraftRow, Draws, Extend, Guess, NeuralSource
from drafts.proposal import DraftDistribution

logger = logging.getLogger(__name__)


def check_tokenizers(target: Any, draft: Any, field_name: str = "draft.path") -> None:
    """Raise unless every token id means the same string to both tokenizers (case A22).

    Equal sizes prove nothing: with another table of the same size every guess would be garbage.

    Raises:
        InvalidValueError: Names the first token id that differs.
    """
    ours = {index: token for token, index in target.get_vocab().items()}
    theirs = {index: token for token, index in draft.get_vocab().items()}
    for index in sorted(ours.keys() | theirs.keys()):
        if ours.get(index) != theirs.get(index):
            allowed = f"the target's tokenizer; token id {index} is {ours.get(index)!r} there"
            raise InvalidValueError(field_name, theirs.get(index), allowed)


class DraftModel:
    """A loaded draft model and its limits.

    Args:
        model: A ``PreTrainedModel`` with attention (a recurrent state cannot take back a rejection).
        vocab_size: Real vocabulary of the tokenizer; the output matrix may be padded beyond it.
        max_depth: Longest chain, in tokens.
        candidates: Tokens that compete under the noise of sampled requests.
        width: Candidates named per position.
        label: How messages name it.
    """

    def __init__(
        self,
        model: Any,
        vocab_size: int,
        *,
        max_depth: int = 6,
        candidates: int = 256,
        width: int = 3,
        label: str = "draft",
    ) -> None:
        embedded = model.get_input_embeddings().weight.shape[0]
        if embedded < vocab_size:
            raise InvalidValueError(
                "draft.path", label, f"a model that embeds {vocab_size} ids, not {embedded}"
            )
        if getattr(model, "_is_stateful", False):
            raise InvalidValueError("draft.path", label, "a model with attention only, no recurrent state")
        self.model = model.eval()
        self.vocab_size = vocab_size
        self.max_depth = max_depth
        self.candidates = min(candidates, vocab_size)
        self.width = width
        self.label = label
        config = model.config.get_text_config()
        self.max_positions = int(getattr(config, "max_position_embeddings", 0) or 2**31)
        self.exhausted = False
        names = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in names else {}

    @classmethod
    def load(cls, config: ModelConfig, target_tokenizer: Any) -> DraftModel:
        """Load the model at ``config.path``; its tokenizer must be the target's.

        Raises:
            InvalidValueError: It cannot be loaded, or its tokenizer or vocabulary does not fit.
        """
        cuda = torch.cuda.is_available()
        device = ("cuda" if cuda else "cpu") if config.device == "auto" else config.device
        dtype = config.dtype
        if dtype == "auto" and not device.startswith("cuda"):
            dtype = "float32"
        try:
            check_tokenizers(target_tokenizer, AutoTokenizer.from_pretrained(config.path))
            model = AutoModelForCausalLM.from_pretrained(config.path, dtype=dtype).to(device)
        except OSError as error:
            raise InvalidValueError("draft.path", config.path, f"a loadable model ({error})") from error
        return cls(
            model,
            len(target_tokenizer),
            max_depth=config.max_depth,
            candidates=config.candidates,
            label=config.path,
        )

    @torch.inference_mode()
    def next_logits(self, tokens: Sequence[int], cache: Any) -> torch.Tensor:
        """Feed ``tokens`` behind what ``cache`` holds; float32 logits ``[vocab_size]`` of the next token."""
        ids = torch.tensor([list(tokens)], device=self.model.device)
        output = self.model(input_ids=ids, use_cache=True, **{self._cache_name: cache}, **self._last_only)
        logits: torch.Tensor = output.logits[0, -1, : self.vocab_size].float()
        return logits


@dataclass
class _RowState:
    """One request's cache: the tokens it holds, of which the first ``committed`` are known to be final."""

    draft: DraftModel
    cache: Any = field(default_factory=DynamicCache)
    held: list[int] = field(default_factory=list)
    committed: int = 0

    def catch_up(self, tokens: Sequence[int]) -> torch.Tensor:
        """Drop what was rejected, read what was committed since; logits after the last token (case A23)."""
        same, limit = self.committed, min(len(self.held), len(tokens) - 1)
        while same < limit and self.held[same] == tokens[same]:
            same += 1
        same = min(same, limit)
        if same < len(self.held):
            self.cache.crop(same - len(self.held))
            del self.held[same:]
        logits = self.feed(tokens[same:])
        self.committed = len(tokens)
        return logits

    def feed(self, tokens: Sequence[int]) -> torch.Tensor:
        """Append ``tokens``; logits after the last one."""
        logits = self.draft.next_logits(tokens, self.cache)
        self.held.extend(tokens)
        return logits


class ModelSource(NeuralSource):
    """Chains of a draft model: one for all domains, or one that a domain brought along.

    Rows run one after another, each with its own cache. A row longer than the draft's context gets no
    proposal, with one warning (case A08); neither does one whose logits are not finite (case A18).

    Args:
        default: The draft of domains without their own; ``None`` leaves those without proposals.
    """

    name: ClassVar[str] = "model"

    def __init__(self, default: DraftModel | None = None) -> None:
        self.default = default
        self._own: dict[str, DraftModel] = {}

    def attach(self, domain: str, draft: DraftModel) -> None:
        """Draft for ``domain`` with ``draft`` from now on; running requests rebuild their caches."""
        self._own[domain] = draft

    def add_domain(self, domain: str, parent: str | None = None) -> None:
        """A child drafts with its parent's model."""
        if parent in self._own:
            self._own.setdefault(domain, self._own[parent])

    def drop_domain(self, domain: str) -> None:
        """Release the domain's own model."""
        self._own.pop(domain, None)

    def draft(
        self, rows: Sequence[DraftRow], limits: Sequence[int], extend: Extend, draw: bool = False
    ) -> None:
        """See :meth:`NeuralSource.draft`."""
        for index, (row, limit) in enumerate(zip(rows, limits, strict=True)):
            self._draft(index, row, limit, extend, draw)

    def describe(self, domain: str) -> dict[str, int | float | str]:
        """Name and size in bytes of the model that drafts for a domain."""
        draft = self._own.get(domain, self.default)
        if draft is None:
            return {}
        size = sum(p.numel() * p.element_size() for p in draft.model.parameters())
        return {"model": draft.label, "bytes": size}

    def _draft(self, index: int, row: DraftRow, limit: int, extend: Extend, draw: bool) -> None:
        draft = self._own.get(row.domain, self.default)
        if draft is None or limit <= 0 or not row.tokens:
            return
        limit = min(limit, draft.max_depth, self._room(draft, row))
        if limit <= 0:
            return
        state = row.scratch.get(self.name)
        if not isinstance(state, _RowState) or state.draft is not draft:
            state = row.scratch[self.name] = _RowState(draft)
        logits = state.catch_up(row.tokens)
        for depth in range(limit):
            if not bool(torch.isfinite(logits).all()):
                logger.warning("draft model %s gave non-finite logits; no proposal", draft.label)
                row.scratch.pop(self.name)
                return
            token = extend(index, _choose(draft, logits, row, depth, draw))
            if token is None or depth + 1 == limit:
                return
            logits = state.feed([token])

    @staticmethod
    def _room(draft: DraftModel, row: DraftRow) -> int:
        """Tokens that still fit the draft's position table; warns once when there are none."""
        room = draft.max_positions - len(row.tokens) + 1
        if room <= 0 and not draft.exhausted:
            draft.exhausted = True
            logger.warning(
                "draft model %s is silent beyond its context of %d tokens", draft.label, draft.max_positions
            )
        return room


def _choose(draft: DraftModel, logits: torch.Tensor, row: DraftRow, depth: int, draw: bool) -> list[Guess]:
    """The most probable tokens; the top under noise for rows that share verification's, or draw their own."""
    drawing = draw and row.draws
    scores, ids = logits, torch.arange(len(logits), device=logits.device)
    if row.temperature > 0:
        scores = logits.double() / row.temperature
    scaled = scores
    if row.coupled or drawing:
        assert row.noise is not None
        scaled, ids = scores.topk(draft.candidates)
        noise = row.noise.gumbel(row.output_length + depth, ids.cpu())
        scores = scaled + noise.to(scaled.device)
    best = scores.topk(min(draft.width, len(scores)))
    tokens = ids[best.indices].tolist()
    if drawing:
        q = DraftDistribution(ids.numpy(force=True), scaled.softmax(-1).numpy(force=True))
        return Draws(tokens, q)
    confidence = (best.values - scores.logsumexp(-1)).exp().clamp(max=1.0).tolist()
    return list(zip(tokens, confidence, strict=True))
