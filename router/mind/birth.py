"""Birth: when the pool of unknown requests holds a new kind of traffic."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from sklearn.cluster import AgglomerativeClustering

from osd.types import Event
from router.config import BirthConfig
from router.mind.classify import Classifier, Density
from router.mind.embed import Vector
from router.mind.prototype import cohesion
from router.mind.unknown import PoolItem

SAME_KIND = 0.4
"""Kinship above which a group is the fringe of a known domain and no new one.

Measured from five examples a domain: code prompts that were not recognised 0.33-0.64 to code, other
kinds (recipes, questions, summaries) at most 0.32 to any.
"""


@dataclass(frozen=True)
class Birth:
    """A domain that has just been born.

    Attributes:
        domain: Its name.
        description: What its requests are about, from their terms.
        examples: Founding prompts that stand for it, the most typical first.
        members: The requests that founded it, the most typical first.
        event: Reason and figures.
    """

    domain: str
    description: str
    examples: tuple[str, ...]
    members: tuple[PoolItem, ...]
    event: Event


@dataclass(frozen=True)
class Group:
    """The largest group of similar unknown requests.

    Attributes:
        indices: Their places in the pool, most typical first.
        cohesion: Mean cosine similarity of its pairs.
        needed: The cohesion that was asked for.
        share: Its share of the pool.
        nearest: The domain most akin, ``None`` without any.
        kinship: How akin that is, from about 0 (unrelated) to 1 (the same).
    """

    indices: tuple[int, ...]
    cohesion: float
    needed: float
    share: float
    nearest: str | None
    kinship: float


def needed_cohesion(density: Density, size: int) -> float:
    """Similarity that ``size`` requests must have to be a domain.

    Half way from everyday requests to a usual domain, and two standard errors more, since the group
    was picked as the densest of many: chance makes small groups look dense.
    """
    return 0.5 * (density.by_chance + density.usual) + 2.0 * density.spread / math.sqrt(size)


def find_group(vectors: Vector, classifier: Classifier, config: BirthConfig) -> Group | None:
    """The largest group of the pool ``[n, d]`` that is dense and large enough, if there is one.

    Average linkage, because it asks of a group what a domain is asked for: that its members are
    similar on average. Miscellaneous requests stay below ``min_share`` (of general and factual
    questions the largest group is a sixth of the pool, of an unknown kind of traffic nearly all).
    """
    count = len(vectors)
    if count < max(2, config.min_requests):
        return None
    density = classifier.density()
    distance = 1.0 - 0.5 * (density.by_chance + density.usual)
    clustering = AgglomerativeClustering(
        n_clusters=None, metric="cosine", linkage="average", distance_threshold=distance
    )
    labels = clustering.fit(vectors).labels_
    names, sizes = np.unique(labels, return_counts=True)
    members = np.flatnonzero(labels == names[sizes.argmax()])
    needed = needed_cohesion(density, len(members))
    group = vectors[members]
    found = cohesion(group)
    share = len(members) / count
    if len(members) < config.min_requests or share < config.min_share or found < needed:
        return None
    mean = group.mean(axis=0)
    typical_first = members[np.argsort(-(group @ mean), kind="stable")]
    nearest, kinship = _nearest(group, classifier, density.usual)
    return Group(tuple(int(i) for i in typical_first), found, needed, share, nearest, kinship)


def _nearest(group: Vector, classifier: Classifier, usual: float) -> tuple[str | None, float]:
    """The domain whose mean points most in the group's direction, and by how much.

    The cosine of the two means, their lengths estimated without the pairs of a vector with itself:
    otherwise small groups would look less akin than they are.
    """
    best: tuple[str | None, float] = (None, 0.0)
    mean, own = group.mean(axis=0), max(cohesion(group), 1e-6)
    for name, prototype in classifier.prototypes.items():
        if prototype.is_empty:
            continue
        theirs = cohesion(prototype.anchors) if len(prototype.anchors) > 1 else usual
        kinship = float(mean @ prototype.anchors.mean(axis=0)) / float(np.sqrt(own * max(theirs, 0.05)))
        if best[0] is None or kinship > best[1]:
            best = (name, kinship)
    return best
