"""Everyday requests that belong to no domain in particular: what a domain must beat to be believed."""

from __future__ import annotations

from functools import cache
from pathlib import Path


@cache
def background_texts() -> tuple[str, ...]:
    """About a hundred prompts, written for this project, that stand for "anything else".

    They give the classifier its idea of similarity by chance, so that "too far from everything" is
    measured and not a constant.
    """
    lines = Path(__file__).with_name("background.txt").read_text(encoding="utf-8").splitlines()
    return tuple(line for line in lines if line)
