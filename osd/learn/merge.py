"""Two domains become one: the expert that does better on both domains' records stays."""

from __future__ import annotations

import torch

from drafts.errors import InvalidValueError
from drafts.version import Version
from osd.learn.distill import score
from osd.learn.scheduler import LearningScheduler


@torch.no_grad()
def merge_domains(learning: LearningScheduler, into: str, other: str) -> Version:
    """Keep the better expert for ``into``, join the buffers, forget ``other``; on the engine's thread.

    Both served experts are scored at the same held-back positions of both domains: neither was trained on
    them, and a pairing by position compares the experts and not the traffic.

    Raises:
        InvalidValueError: The two are one, or nothing is held back to judge by.
        UnknownNameError: One of them has no version.
        CheckpointError: The change cannot be written; nothing has changed then.
    """
    known = [learning.domains[name] for name in dict.fromkeys((into, other)) if name in learning.domains]
    records = [record for domain in known for record in domain.buffer.held if record.size]
    if not records:
        raise InvalidValueError("merge", f"{other} into {into}", "two domains with held-back records")
    figures = {}
    for name in (into, other):
        expert = learning.served(name)
        agreement = torch.cat([score(learning.head, r, expert, learning.to_draft).agreement for r in records])
        figures[name] = float(agreement.mean())
    version = learning.registry.merge(into, other, figures)
    kept, gone = learning.domain(into), learning.domain(other)
    kept.buffer.absorb(gone.buffer)
    kept.learner = None
    learning.drop_domain(other)
    return version
