"""The life of domains in a body: birth, registration, removal, and what is known of each."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from drafts.config import ModelConfig
from drafts.errors import InvalidValueError
from drafts.expert_key import expert_key
from osd.serve.engine import Engine as Core
from osd.types import BASE_DOMAIN
from router.bodies.parts import DraftParts
from router.mind.birth import Birth
from router.mind.router import Router

if TYPE_CHECKING:
    from drafts.draft_model import DraftModel

log = logging.getLogger(__name__)


class DomainLife:
    """Keeps router, sources, learner and registry agreed on which domains there are.

    Drafts belong to the engine's thread and the router to its worker, so a domain's drafts are made
    first and requests are routed to it afterwards; until then the base domain serves them.

    Args:
        core: The engine whose thread owns the drafts.
        parts: The drafts.
        router: The router.
    """

    def __init__(self, core: Core, parts: DraftParts, router: Router) -> None:
        self._core = core
        self._parts = parts
        self._router = router

    def born(self, birth: Birth) -> None:
        """Make memory and expert of a new domain, and teach the memory what its founders were told."""
        answers = [(item.prompt_ids, item.output_ids) for item in birth.members]
        self._core.call(lambda: self._grow(birth.domain, answers))

    def add(
        self, name: str, description: str, examples: Sequence[str], draft: ModelConfig | None = None
    ) -> None:
        """Register a domain while serving; the same domain twice is not an error.

        A draft model of its own is loaded and checked on the caller's thread before anything changes, what
        costs least to check first: the name, the model's tokenizer, its size, its weights.

        Raises:
            InvalidValueError: A bad name, one taken by a different domain, or a draft that does not fit.
        """
        for domain in self._router.domains():
            same = domain.description == description and tuple(domain.examples) == tuple(examples)
            if domain.name == name and same and self._parts.draft_of(name) == draft:
                return
        own = None
        if draft is not None:
            self._router.check_new(name, description=description, examples=examples)
            own = draft, self._parts.load_model(draft)
        self._router.add_domain(name, description=description, examples=examples)
        self._core.call(lambda: self._grow(name, [], own)).result()

    def remove(self, name: str) -> None:
        """Forget a domain in the router, then its drafts; running requests go on with what is shared."""
        self._router.remove_domain(name)
        self._core.call(lambda: self._shed(name)).result()

    def restore(self, name: str) -> None:
        """Make the drafts of a domain that comes back from the state folder."""
        self._grow(name, [])

    def rows(self) -> list[dict[str, Any]]:
        """Domains as dictionaries, the base domain last."""
        described = [
            {"name": d.name, "description": d.description, "examples": len(d.examples), "origin": d.origin}
            for d in self._router.domains()
        ]
        base = {
            "name": BASE_DOMAIN,
            "description": "Serves what fits no domain.",
            "examples": 0,
            "origin": "built in",
        }
        return [{**row, **self._figures(str(row["name"]))} for row in [*described, base]]

    def _figures(self, name: str) -> dict[str, Any]:
        mixture, scheduler = self._parts.mixture, self._parts.scheduler
        sources = mixture.describe(name)
        buffer: dict[str, Any] = {}
        if "ngram" in sources:
            buffer["memory_tokens"] = sources["ngram"].get("tokens", 0)
        keys = [] if scheduler is None else [expert_key(name, kind) for kind in scheduler.heads]
        found = [scheduler.domains.get(key) for key in keys] if scheduler is not None else []
        if any(domain is not None for domain in found):
            buffer["records"] = sum(len(domain.buffer.training) for domain in found if domain is not None)
        return {
            "sources": sources,
            "version": mixture.version(name),
            "buffer": buffer,
            "speculation": mixture.speculation(name),
        }

    def _grow(
        self,
        name: str,
        answers: Sequence[tuple[Sequence[int], Sequence[int]]],
        own: tuple[ModelConfig, DraftModel] | None = None,
    ) -> None:
        self._parts.add_domain(name, own)
        if self._parts.ngram is not None:
            for prompt, output in answers:
                self._parts.ngram.teach(name, [*prompt, *output], len(prompt))

    def _shed(self, name: str) -> None:
        if name == BASE_DOMAIN:
            raise InvalidValueError("name", name, "a domain other than base, which always exists")
        self._parts.drop_domain(name)
