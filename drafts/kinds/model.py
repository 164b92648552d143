"""``model``: a Hugging Face causal language model with the target's tokenizer as draft."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache

from drafts.adapters import AdapterBank
from drafts.bank import Expert
from drafts.chain_batch import ChainBatch, RowState
from drafts.config import ModelConfig
from drafts.draft_model import DraftModel
from drafts.errors import CheckpointError, InvalidValueError, UnknownNameError
from drafts.kinds.base import DraftRow, Draws, Extend, Guess, NeuralSource
from drafts.proposal import DraftDistribution
from drafts.residency import Residents

logger = logging.getLogger(__name__)

_LOADING = threading.Lock()
"""The library sets torch's default type, which is the process's, while it makes a model, and then what it
found: of two loads at once the later one would put back the earlier one's type for good."""


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


def check_files(config: ModelConfig, target_tokenizer: Any, offline: bool = True) -> bool:
    """Check a draft's tokenizer and sizes without its weights; False where its files are not on this machine.

    Raises:
        InvalidValueError: It does not fit the target, see :func:`check_tokenizers`.
    """
    try:
        _fitting(config, target_tokenizer, offline=True)
    except InvalidValueError:
        raise
    except (OSError, ValueError) as error:
        if Path(config.path).is_absolute():
            raise InvalidValueError("draft.path", config.path, f"a loadable model ({error})") from error
        return False
    return True


def _fitting(config: ModelConfig, target_tokenizer: Any, offline: bool) -> Any:
    """The library's config of a draft that fits the target by what is known without its weights."""
    tokenizer = AutoTokenizer.from_pretrained(config.path, local_files_only=offline)
    found = AutoConfig.from_pretrained(config.path, local_files_only=offline)
    check_tokenizers(target_tokenizer, tokenizer)
    size = found.get_text_config().vocab_size
    if size < len(target_tokenizer):
        allowed = f"a model that embeds {len(target_tokenizer)} ids, not {size}"
        raise InvalidValueError("draft.path", config.path, allowed)
    return found


def _read(path: str, dtype: str) -> Any:
    with _LOADING:
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype)


def _least_bytes(found: Any, dtype: str) -> int:
    """Memory of a model's weights without reading them; 0 where its config does not tell their type."""
    kept = found.dtype if dtype == "auto" else getattr(torch, dtype)
    if kept is None or getattr(found, "quantization_config", None) is not None:
        return 0
    with _LOADING, torch.device("meta"):
        shape = AutoModelForCausalLM.from_config(found, dtype=torch.float32)
    return int(sum(parameter.numel() for parameter in shape.parameters()) * kept.itemsize)


def load_draft(
    config: ModelConfig, target_tokenizer: Any, check_size: Callable[[int], None] | None = None
) -> DraftModel:
    """Load the model at ``config.path``; its tokenizer must be the target's.

    Args:
        config: The model.
        target_tokenizer: The target's tokenizer.
        check_size: Raises where a model of that many bytes has no room; asked before weights are read.

    Raises:
        InvalidValueError: It cannot be loaded, or its tokenizer, vocabulary or size does not fit.
    """
    cuda = torch.cuda.is_available()
    device = ("cuda" if cuda else "cpu") if config.device == "auto" else config.device
    dtype = config.dtype
    if dtype == "auto" and not device.startswith("cuda"):
        dtype = "float32"
    try:
        found = _fitting(config, target_tokenizer, offline=False)
        if check_size is not None:
            check_size(_least_bytes(found, dtype))
        model = _read(config.path, dtype).to(device)
    except InvalidValueError:
        raise
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise InvalidValueError("draft.path", config.path, f"a loadable model ({error})") from error
    return DraftModel(
        model,
        len(target_tokenizer),
        max_depth=config.max_depth,
        candidates=config.candidates,
        label=config.path,
        rank=config.rank,
        reread=lambda: [parameter.data for parameter in _read(config.path, dtype).parameters()],
    )


@dataclass
class _Path:
    """A row that drafts in this step."""

    at: int
    row: DraftRow
    state: RowState
    limit: int
    depth: int = 0
    token: int = -1


class ModelSource(NeuralSource):
    """Chains of a draft model: one for all domains, or one that a domain brought along.

    Rows of one model run together, each under its domain's adapter; models run one after another. A row
    longer than the draft's context gets no proposal, with one warning (case A08); neither does one whose
    logits are not finite (case A18).

    Args:
        default: The draft of domains without their own; ``None`` leaves those without proposals.
        max_resident_bytes: Most memory of all models' weights; of those that domains brought, the least
            recently used wait beyond it, and ``default`` stands in for them. ``None`` for no bound.
        base: The domain whose adapter ``default`` stands in with.
    """

    name: ClassVar[str] = "model"

    def __init__(
        self,
        default: DraftModel | None = None,
        max_resident_bytes: int | None = None,
        base: str = "base",
    ) -> None:
        self.default = default
        self.base = base
        self.residents = Residents(max_resident_bytes, 0 if default is None else default.nbytes)
        self._own: dict[str, DraftModel] = {}
        self._absent: set[str] = set()

    def attach(self, domain: str, draft: DraftModel) -> None:
        """Draft for ``domain`` with ``draft`` from now on; running requests rebuild their caches.

        Raises:
            InvalidValueError: It is larger than what may be resident.
        """
        self.residents.add(draft)
        self._leave(domain)
        self._own[domain] = draft

    def stand_in(self, domain: str) -> None:
        """Draft for ``domain`` as for the base domain, since its own model could not be loaded.

        It gets no adapter then, hence neither learns nor takes versions, which belong to its own model.
        """
        self._absent.add(domain)

    def add_domain(self, domain: str, parent: str | None = None) -> None:
        """A child drafts with its parent's model, under a copy of its adapter."""
        if parent in self._own:
            self._own.setdefault(domain, self._own[parent])
        draft = self.of(domain)
        if draft is not None and draft.adapters is not None and domain not in self._absent:
            draft.adapters.add(domain, parent)

    def drop_domain(self, domain: str) -> None:
        """Release the domain's adapter and its own model."""
        draft = self.of(domain)
        if draft is not None and draft.adapters is not None:
            draft.adapters.drop(domain)
        self._leave(domain)

    def _leave(self, domain: str) -> None:
        self._absent.discard(domain)
        draft = self._own.pop(domain, None)
        if draft is not None and draft not in self._own.values():
            self.residents.drop(draft)

    def __contains__(self, domain: str) -> bool:
        """Whether the domain has an adapter."""
        draft = self.of(domain)
        return draft is not None and draft.adapters is not None and domain in draft.adapters

    def tensors(self, domain: str) -> Expert:
        """A copy of the domain's adapter."""
        return self._adapters(domain).tensors(domain)

    def load(self, domain: str, tensors: Expert) -> None:
        """Serve ``tensors`` as the domain's adapter; rows rebuild their caches (case A27).

        Raises:
            UnknownNameError: The domain has no adapter.
            CheckpointError: See :meth:`AdapterBank.load`.
        """
        self._adapters(domain).load(domain, tensors)

    def fits(self, domain: str, tensors: Expert) -> bool:
        """Whether ``tensors`` could be loaded for the domain."""
        try:
            self.check(domain, tensors)
        except CheckpointError:
            return False
        return True

    def check(self, domain: str, tensors: Expert) -> None:
        """Raise unless ``tensors`` could be loaded for the domain, see :meth:`load`."""
        self._adapters(domain).check(tensors)

    @property
    def device(self) -> torch.device:
        """Where the first model is; the CPU before there is one."""
        drafts = (draft for draft in (self.default, *self._own.values()) if draft is not None)
        return next((draft.model.device for draft in drafts), torch.device("cpu"))

    def by_fingerprint(self, fingerprint: torch.Tensor) -> DraftModel | None:
        """The model that adapters with this fingerprint belong to."""
        found = (draft for draft in (self.default, *self._own.values()) if draft is not None)
        return next(
            (d for d in found if d.adapters is not None and torch.equal(d.adapters.fingerprint, fingerprint)),
            None,
        )

    def _adapters(self, domain: str) -> AdapterBank:
        draft = self.of(domain)
        if draft is None or draft.adapters is None:
            raise UnknownNameError("domain", domain, [])
        return draft.adapters

    def draft(
        self, rows: Sequence[DraftRow], limits: Sequence[int], extend: Extend, draw: bool = False
    ) -> None:
        """See :meth:`NeuralSource.draft`."""
        self.residents.use({self._own[row.domain] for row in rows if row.domain in self._own})
        groups: dict[int, list[_Path]] = {}
        for index, (row, limit) in enumerate(zip(rows, limits, strict=True)):
            draft, domain = self._serving(row.domain)
            if draft is None or limit <= 0 or not row.tokens:
                continue
            limit = min(limit, draft.max_depth, self._room(draft, row))
            if limit > 0:
                state = draft.state_for(domain, row.scratch.get(self.name))
                row.scratch[self.name] = state
                groups.setdefault(id(draft), []).append(_Path(index, row, state, limit))
        for paths in groups.values():
            try:
                self._draft(paths[0].state.serves[0], paths, extend, draw)
            except Exception:
                for path in paths:
                    path.row.scratch.pop(self.name, None)
                raise

    def unread(self, row: DraftRow) -> int:
        """See :meth:`NeuralSource.unread`: nothing where it would be silent, all after another adapter."""
        draft, domain = self._serving(row.domain)
        if draft is None or self._room(draft, row) <= 0:
            return 0
        return draft.state_for(domain, row.scratch.get(self.name)).unread(row.tokens)

    def _serving(self, domain: str) -> tuple[DraftModel | None, str]:
        """Model and domain of the adapter that draft for ``domain`` now."""
        own = self._own.get(domain)
        if domain in self._absent or (own is not None and not own.resident):
            return self.default, self.base
        return self.of(domain), domain

    def of(self, domain: str) -> DraftModel | None:
        """The model that drafts for a domain."""
        return self._own.get(domain, self.default)

    def describe(self, domain: str) -> dict[str, int | float | str]:
        """Name and size in bytes of the model that drafts for a domain."""
        draft = self._own.get(domain, self.default)
        if draft is None:
            return {}
        return {"model": draft.label, "bytes": draft.nbytes, "resident": int(draft.resident)}

    def _draft(self, draft: DraftModel, alive: list[_Path], extend: Extend, draw: bool) -> None:
        batch = ChainBatch(
            [path.state for path in alive],
            [path.row.tokens for path in alive],
            draft.next_logits,
            DynamicCache,
        )
        logits = batch.read(draft.model.device)
        while kept := self._extend(draft, alive, logits, extend, draw):
            if len(kept) < len(alive):
                batch.keep(kept)
                alive = [alive[i] for i in kept]
            logits = batch.feed([path.token for path in alive])
        batch.leave()

    def _extend(
        self, draft: DraftModel, alive: Sequence[_Path], logits: torch.Tensor, extend: Extend, draw: bool
    ) -> list[int]:
        """Offer each row's candidates; indices of the rows that go deeper."""
        kept: list[int] = []
        finite = torch.isfinite(logits).all(-1).tolist()
        for index, path in enumerate(alive):
            if not finite[index]:
                logger.warning("draft model %s gave non-finite logits; no proposal", draft.label)
                path.row.scratch.pop(self.name)
                continue
            token = extend(path.at, _choose(draft, logits[index], path.row, path.depth, draw))
            path.depth += 1
            if token is not None and path.depth < path.limit:
                path.token = token
                kept.append(index)
        return kept

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
