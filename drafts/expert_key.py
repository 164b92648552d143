"""Names of experts: a domain has one for each kind of draft that learns, and each has versions of its own."""

from __future__ import annotations

FIRST_KIND = "eagle"
"""The kind whose experts are named by their domain alone."""


def expert_key(domain: str, kind: str) -> str:
    """What registry and learner call the expert of ``domain`` in draft kind ``kind``."""
    return domain if kind == FIRST_KIND else f"{domain}.{kind}"


def split_key(key: str) -> tuple[str, str]:
    """Domain and kind of an expert; domain names have no dot."""
    domain, _, kind = key.partition(".")
    return domain, kind or FIRST_KIND
