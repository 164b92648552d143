"""Two domains become one: the expert that does better on both domains' records stays."""

from __future__ import annotations

import torch

from drafts.errors import InvalidValueError, UnknownNameError
from drafts.expert_key import expert_key
from drafts.version import Version
from osd.learn.distill import score
from osd.learn.scheduler import LearningScheduler


@torch.no_grad()
def merge_domains(learning: LearningScheduler, into: str, other: str) -> dict[str, Version]:
    """Keep the better expert of each kind that both have for ``into``, join the buffers, forget ``other``.

    Both served experts are scored at the same held-back positions of both domains: neither was trained on
    them, and a pairing by position compares the experts and not the traffic. On the engine's thread.

    Returns:
        The served version by kind.

    Raises:
        InvalidValueError: The two are one, or nothing is held back to judge by.
        UnknownNameError: There is no kind that both have a version of.
        CheckpointError: The change cannot be written; nothing has changed then.
    """
    known = learning.registry.domains()
    keys = {kind: (expert_key(into, kind), expert_key(other, kind)) for kind in learning.heads}
    keys = {kind: pair for kind, pair in keys.items() if set(pair) <= set(known)}
    if not keys:
        raise UnknownNameError("merge", f"{other} into {into}", known)
    pairs = [(*pair, _figures(learning, *pair)) for pair in keys.values()]
    versions = dict(zip(keys, learning.registry.merge_all(pairs), strict=True))
    for kept_key, gone_key in keys.values():
        kept, gone = learning.domain(kept_key), learning.domain(gone_key)
        kept.buffer.absorb(gone.buffer)
        kept.learner = None
    learning.drop_domain(other)
    return versions


def _figures(learning: LearningScheduler, into: str, other: str) -> dict[str, float]:
    """Agreement of both experts on the held-back records of both."""
    known = [learning.domains[name] for name in dict.fromkeys((into, other)) if name in learning.domains]
    records = [record for domain in known for record in domain.buffer.held if record.size]
    if not records:
        raise InvalidValueError("merge", f"{other} into {into}", "two domains with held-back records")
    head, to_draft = learning.head_of(into), learning.map_of(into)
    found = {}
    for name in (into, other):
        expert = learning.served(name)
        agreement = torch.cat([score(head, record, expert, to_draft).agreement for record in records])
        found[name] = float(agreement.mean())
    return found
