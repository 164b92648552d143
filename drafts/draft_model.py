"""One loaded draft model: its pass over rows of a batch, its adapters, and its weights' way in and out."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from drafts.adapters import BASE, AdapterBank
from drafts.bank import Expert
from drafts.chain_batch import RowState
from drafts.errors import InvalidValueError


class DraftModel:
    """A loaded draft model and its limits.

    Args:
        model: A ``PreTrainedModel`` with attention (a recurrent state cannot take back a rejection).
        vocab_size: Real vocabulary of the tokenizer; the output matrix may be padded beyond it.
        max_depth: Longest chain, in tokens.
        candidates: Tokens that compete under the noise of sampled requests.
        width: Candidates named per position.
        label: How messages name it.
        rank: Rank of the domains' adapters; 0 for a model that does not learn.
        reread: Reads the same weights again, in the order of the model's parameters; without it the weights
            wait in the host's memory.
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
        rank: int = 0,
        reread: Callable[[], list[torch.Tensor]] | None = None,
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
        self._takes_positions = "position_ids" in names
        self._weights = list(model.parameters())
        self._waiting: list[torch.Tensor] = []
        self._reread = reread if model.device.type == "cpu" else None
        self.nbytes = sum(p.numel() * p.element_size() for p in self._weights)
        self.resident = True
        self.adapters = AdapterBank(model, rank) if rank else None

    def release(self) -> None:
        """Let go of the weights (adapters stay): they are read again, or wait in the host's memory."""
        if self._reread is None:
            self._waiting = [parameter.data.cpu() for parameter in self._weights]
        for parameter in self._weights:
            parameter.data = parameter.data.new_empty(0)
        self.resident = False

    def fetch(self) -> list[torch.Tensor]:
        """The weights on the model's device; changes nothing, so another thread may call it."""
        if self._reread is not None:
            return self._reread()
        return [tensor.to(self.model.device) for tensor in self._waiting]

    def take(self, weights: list[torch.Tensor]) -> None:
        """Use what :meth:`fetch` gave."""
        for parameter, tensor in list(zip(self._weights, weights, strict=True)):
            parameter.data = tensor
        self._waiting, self.resident = [], True

    @torch.inference_mode()
    def next_logits(
        self, ids: torch.Tensor, held: Any, mask: torch.Tensor | None, names: Sequence[str]
    ) -> torch.Tensor:
        """float32 logits ``[R, vocab_size]`` of the token after ``ids [R, n]``, read behind ``held``.

        Args:
            ids: Equally many new tokens of each row.
            held: The library's cache, padded on the left; it grows by ``n``.
            mask: int64 ``[R, held + n]``, 0 where a row has no token; ``None`` where all have.
            names: The adapter of each row.
        """
        inputs: dict[str, Any] = {self._cache_name: held, **self._last_only}
        if mask is not None:
            inputs["attention_mask"] = mask
            if self._takes_positions:
                inputs["position_ids"] = (mask.cumsum(-1) - 1).clamp_min(0)[:, -ids.shape[1] :]
        if self.adapters is not None:
            inputs["adapter_names"] = list(names)
        run = self.model if self.adapters is None else self.adapters.model
        logits: torch.Tensor = run(input_ids=ids, use_cache=True, **inputs).logits
        return logits[:, -1, : self.vocab_size].float()

    def logits_at(self, expert: Expert, ids: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """float32 logits ``[P, vocab_size]`` after positions ``at [P]`` of a text ``ids [1, n]``.

        Under ``expert`` and differentiable in it; see :meth:`AdapterBank.run`.
        """
        assert self.adapters is not None
        some = {"logits_to_keep": at} if self._last_only else {}
        logits: torch.Tensor = self.adapters.run(expert, input_ids=ids, use_cache=False, **some).logits[0]
        chosen = logits if self._last_only else logits[at]
        return chosen[:, : self.vocab_size].float()

    def state_for(self, domain: str, before: object) -> RowState:
        """What a row of ``domain`` holds: ``before`` if it was made with just these weights, else nothing."""
        name, stamp = BASE, 0
        if self.adapters is not None and domain in self.adapters:
            name, stamp = self.adapters.name(domain), self.adapters.stamp(domain)
        serves = (self, name, stamp if name != BASE else 0)
        if isinstance(before, RowState) and before.serves == serves:
            return before
        return RowState(serves, name)
