"""Weights and registries for tests."""

from __future__ import annotations

import torch

from drafts.registry import Registry


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"down": torch.full((2, 3), float(value)), "up": torch.full((3,), -float(value))}


def published(registry: Registry, count: int, domain: str = "math") -> Registry:
    for value in range(count):
        registry.publish(domain, weights(value), reason=f"update {value}", score=value / 10)
    return registry


def served(registry: Registry, domain: str = "math") -> int:
    version = registry.current(domain)
    assert version is not None
    return version.number
