"""The nursery: unknown requests gather here until a group of them is a domain of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from osd.types import Event
from router.config import BirthConfig
from router.mind.background import background_texts
from router.mind.birth import SAME_KIND, Birth, Group, find_group
from router.mind.classify import Classifier
from router.mind.domain import Domain
from router.mind.naming import characteristic_terms, domain_name
from router.mind.unknown import PoolItem, UnknownPool

EXAMPLES_OF_A_BORN_DOMAIN = 16
"""Founding requests that a born domain keeps as its examples, most typical first."""


class Nursery:
    """Decides what becomes of unknown requests; belongs to the router's worker thread.

    Args:
        config: When a group is large and dense enough.
        classifier: Knows the domains; widened where a group turns out to be the fringe of one.
    """

    def __init__(self, config: BirthConfig, classifier: Classifier) -> None:
        self.config = config
        self.pool = UnknownPool(config.window)
        self._classifier = classifier
        self._revision = classifier.revision

    def take(self, item: PoolItem, domains: Sequence[Domain], room: bool) -> Birth | Event | None:
        """Add an unknown request and see whether a group has formed.

        Args:
            item: The request.
            domains: Those that exist, for names.
            room: Whether another domain may be born.

        Returns:
            A birth, which the caller registers; an event, if a domain was widened; usually nothing.
        """
        self.pool.add(item)
        if not self.config.enabled:
            return None
        if self._classifier.revision != self._revision:
            self._revision = self._classifier.revision
            known = [self._classifier.classify(old.vector).known for old in self.pool]
            self.pool.remove(index for index, is_known in enumerate(known) if is_known)
        group = find_group(self.pool.vectors, self._classifier, self.config)
        if group is None:
            return None
        if group.nearest is not None and group.kinship >= SAME_KIND:
            return self._widen(group.nearest, group)
        return self._bear(group, domains) if room else None

    def _widen(self, domain: str, group: Group) -> Event:
        members = self._taken(group)
        for item in members:
            self._classifier.refine(domain, item.vector)
        self._classifier.refit()
        reason = f"{len(members)} unknown requests turned out to be the fringe of {domain}"
        return Event("widen", domain, reason, _numbers(group))

    def _bear(self, group: Group, domains: Sequence[Domain]) -> Birth:
        members = self._taken(group)
        texts = [item.text for item in members]
        terms = characteristic_terms(texts, [*(d.examples for d in domains), background_texts()])
        name = domain_name(terms, {"base", *(domain.name for domain in domains)})
        description = f"Requests about {', '.join(terms)}." if terms else "Requests of a kind of their own."
        reason = (
            f"{len(members)} unknown requests are as similar to each other as those of a domain "
            f"({group.cohesion:.2f}, needed {group.needed:.2f}) and akin to no other"
        )
        examples = tuple(dict.fromkeys(texts))[:EXAMPLES_OF_A_BORN_DOMAIN]
        event = Event("birth", name, reason, {**_numbers(group), "terms": terms, "examples": examples[:3]})
        return Birth(name, description, examples, tuple(members), event)

    def _taken(self, group: Group) -> list[PoolItem]:
        """The group's requests, most typical first, out of the pool."""
        place = {index: rank for rank, index in enumerate(sorted(group.indices))}
        taken = self.pool.remove(group.indices)
        return [taken[place[index]] for index in group.indices]


def _numbers(group: Group) -> dict[str, Any]:
    return {
        "size": len(group.indices),
        "share": round(group.share, 3),
        "cohesion": round(group.cohesion, 3),
        "needed_cohesion": round(group.needed, 3),
        "nearest": group.nearest,
        "kinship": round(group.kinship, 3),
    }
