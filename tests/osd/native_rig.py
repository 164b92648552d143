"""Models and checks that the tests of compiled passes share."""

import functools
from dataclasses import dataclass, field
from typing import Any

import torch

from osd.serve.cache import SlotCache
from osd.serve.lean import LeanTarget
from osd.serve.native import NativeTarget, native_obstacle
from osd.serve.target import PassRow
from tests.osd.passes import feed, path_to, plain_logits, random_text
from tests.tiny import tiny_model

SIZES = {"hidden_size": 96, "intermediate_size": 160, "head_dim": 32}
TOLERANCE = 1e-4
TREE = (-1, 0, 1, -1, 3, 3, 2, 5, -1, 8, 9, 10)


def fitting_model(kind: str = "llama", **changes: object):
    """A tiny model whose sizes come in whole vectors, over threads that do not share them out evenly."""
    model = tiny_model(kind, scale=0.2, **{**SIZES, **changes})
    assert native_obstacle(model) is None
    return model


def coded_model(bits: int, **changes: object) -> Any:
    """A tiny model whose products' weights are blocks of 4-bit or 8-bit codes."""
    model = fitting_model(**changes)
    generator = torch.Generator().manual_seed(1)
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            shape = (module.out_features, module.in_features // 32, 1)
            spread = 0.2 * (0.5 + torch.rand(shape, generator=generator))
            most = 15 if bits == 4 else 127
            scale = (spread / (4.6 if bits == 4 else 73)).half().float()
            shift = (-7.5 * scale).half().float() if bits == 4 else 0.0
            least = 0 if bits == 4 else -127
            codes = torch.randint(least, most + 1, (*shape[:2], 32), generator=generator).float()
            codes[..., 0], codes[..., 31] = least, most
            module.weight.data.copy_((scale * codes + shift).flatten(1))
    return model


def native(model, **options: object) -> NativeTarget:
    return NativeTarget(model, name="tiny", feature_layers=None, budget=0.0, **options)


@functools.cache
def shared(kind: str = "llama") -> NativeTarget:
    return native(fitting_model(kind))


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Within the tolerance, or a tenth of it relative to the largest number, whichever is more."""
    return bool((found - expected).abs().max() <= TOLERANCE * max(1.0, 0.1 * float(expected.abs().max())))


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Of the whole, relative to what is exact."""
    return float((found.float() - exact.float()).norm() / exact.float().norm())


@dataclass
class Calls:
    """Counts the passes that ran in compiled code."""

    count: int = 0
    threads: set[int] = field(default_factory=set)


def check_tree(target: NativeTarget, logits: torch.Tensor, row: PassRow, text: list[int]) -> None:
    assert row.parents is not None
    for node in range(len(row.tokens)):
        path = [row.tokens[at] for at in path_to(row.parents, node)]
        assert close(logits[node : node + 1], plain_logits(target.reference, text + path)[-1:])


def prompts(target: LeanTarget, lengths: list[int], features: bool = False) -> SlotCache:
    cache = target.make_cache(len(lengths), 97, keep_features=features)
    for slot, length in enumerate(lengths):
        cache.acquire()
        feed(target, cache, slot, random_text(length, seed=slot))
    return cache
