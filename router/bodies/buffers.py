"""What learning keeps of a domain's answers, as the service offers it: show, export, purge."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from safetensors.torch import save

from drafts.errors import UnknownNameError
from drafts.expert_key import expert_key
from drafts.kinds.ngram import NgramSource
from osd.learn.buffer import DomainBuffer
from osd.learn.scheduler import LearningScheduler
from osd.types import Event

OnEngine = Callable[[Callable[[], Any]], Any]
"""Runs work on the engine's thread and gives its result."""


class DomainBuffers:
    """The distillation buffers and memories of domains, from any thread.

    Args:
        domains: Names of the registered domains.
        scheduler: The learner that owns the buffers; ``None`` where nothing learns.
        ngram: The memories; ``None`` without.
        on_engine: Runs work on the engine's thread.
        rewrite: Called with a domain whose saved state is to be written anew.
        on_event: Called with every purge.
    """

    def __init__(
        self,
        domains: Callable[[], list[str]],
        scheduler: LearningScheduler | None = None,
        ngram: NgramSource | None = None,
        on_engine: OnEngine = lambda work: work(),
        rewrite: Callable[[str], None] = lambda domain: None,
        on_event: Callable[[Event], None] = lambda event: None,
    ) -> None:
        self._domains = domains
        self._scheduler = scheduler
        self._ngram = ngram
        self._on_engine = on_engine
        self._rewrite = rewrite
        self._on_event = on_event

    def show(self, domain: str) -> dict[str, Any]:
        """Sizes of a domain's buffers by kind of expert, and of its memory.

        Raises:
            UnknownNameError: The domain is not registered.
        """
        self._check(domain)
        return dict(self._on_engine(lambda: self._shown(domain)))

    def export(self, domain: str, kind: str | None = None) -> bytes:
        """A buffer as a safetensors file: token ids, positions, the target's probabilities, hidden states.

        Args:
            domain: The domain.
            kind: The kind of expert; the first that has a buffer if not given.

        Raises:
            UnknownNameError: The domain is not registered, or has no buffer (of this kind).
        """
        self._check(domain)
        found = self._buffers(domain)
        if not found or (kind is not None and kind not in found):
            raise UnknownNameError("kind", kind or "any", sorted(found))
        name = kind or next(iter(found))
        state = self._on_engine(found[name].state)
        return save(
            {key: tensor.contiguous() for key, tensor in state.items()}, {"domain": domain, "kind": name}
        )

    def purge(self, domain: str) -> dict[str, Any]:
        """Forget everything that was kept of a domain's answers, in memory and on disk.

        What experts learned from it stays in their weights, and other domains keep what is theirs. A memory
        that all domains share is emptied for all of them.

        Returns:
            What was there, as :meth:`show` tells it.

        Raises:
            UnknownNameError: The domain is not registered.
        """
        self._check(domain)

        def work() -> dict[str, Any]:
            before = self._shown(domain)
            if self._scheduler is not None:
                self._scheduler.purge(domain)
            if self._ngram is not None:
                self._ngram.purge(domain)
            return before

        before = dict(self._on_engine(work))
        self._rewrite(domain)
        numbers = {"records": float(sum(row["records"] + row["held_back"] for row in before["buffers"]))}
        self._on_event(Event("purge", domain, "buffers and memory were emptied by hand", numbers))
        return before

    def _check(self, domain: str) -> None:
        known = self._domains()
        if domain not in known:
            raise UnknownNameError("domain", domain, sorted(known))

    def _buffers(self, domain: str) -> dict[str, DomainBuffer]:
        """A domain's buffers by kind of expert."""
        if self._scheduler is None:
            return {}
        kept = self._scheduler.domains
        keys = {kind: expert_key(domain, kind) for kind in self._scheduler.heads}
        return {kind: kept[key].buffer for kind, key in keys.items() if key in kept}

    def _shown(self, domain: str) -> dict[str, Any]:
        memory = {} if self._ngram is None else self._ngram.describe(domain)
        return {
            "domain": domain,
            "buffers": [{"kind": kind, **_row(buffer)} for kind, buffer in self._buffers(domain).items()],
            "memory": {"tokens": memory.get("tokens", 0), "bytes": memory.get("bytes", 0)},
        }


def _row(buffer: DomainBuffer) -> dict[str, Any]:
    records = [*buffer.training, *buffer.held]
    created = [record.created for record in records]
    return {
        "records": len(buffer.training),
        "held_back": len(buffer.held),
        "positions": buffer.positions,
        "bytes": buffer.nbytes,
        "max_bytes": buffer.config.max_bytes,
        "seen": buffer.arrived,
        "oldest": min(created, default=None),
        "newest": max(created, default=None),
        "wrong_share": 1.0 - sum(r.agreement for r in records) / len(records) if records else None,
    }
