"""Driving a target over slots beside a cache-free forward of the same model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from drafts.errors import IntegrityError
from osd.serve.cache import SlotCache
from osd.serve.target import PassRow, TargetModel


@torch.inference_mode()
def plain_logits(model: Any, text: list[int]) -> Tensor:
    """float32 ``[len(text), vocab]`` by the plain model without a cache."""
    ids = torch.tensor([text], device=model.device)
    logits: Tensor = model(input_ids=ids, use_cache=False).logits[0]
    return logits.float()


@torch.inference_mode()
def plain_states(model: Any, text: list[int], layers: tuple[int, ...]) -> Tensor:
    """``[len(text), F]``: outputs of the given decoder layers, before any final norm."""
    decoder = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList))
    states: dict[int, Tensor] = {}

    def keep(layer: int) -> Any:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            states[layer] = output[0] if isinstance(output, tuple) else output

        return hook

    hooks = [decoder[layer - 1].register_forward_hook(keep(layer)) for layer in layers]
    plain_logits(model, text)
    for hook in hooks:
        hook.remove()
    return torch.cat([states[layer][0] for layer in layers], -1)


def random_text(length: int, seed: int, vocab: int = 128) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab, (length,), generator=generator).tolist()


def path_to(parents: tuple[int, ...], node: int) -> list[int]:
    """Offsets from the root (0) to ``node`` in a pass row's tokens."""
    path = [node]
    while path[-1]:
        path.append(parents[path[-1] - 1] + 1)
    return path[::-1]


def feed(target: TargetModel, cache: SlotCache, slot: int, text: list[int], chunk: int = 64) -> Tensor:
    """Prefill ``text`` in chunks, commit it, and return its logits."""
    found = [torch.empty(0, target.vocab_size, device=target.device)]
    for begin in range(0, len(text), chunk):
        part = text[begin : begin + chunk]
        found.append(target.forward(cache, [PassRow(slot, begin, part)]).logits)
        cache.commit(slot, begin + len(part))
    return torch.cat(found)


def check_refusals(target: TargetModel, cache: SlotCache) -> None:
    """Passes over an empty row 0 that no forward may run."""
    with pytest.raises(IntegrityError, match="twice"):
        target.forward(cache, [PassRow(0, 0, [1]), PassRow(0, 0, [2])])
    with pytest.raises(IntegrityError, match="committed length is 0"):
        target.forward(cache, [PassRow(0, 3, [1])])
    with pytest.raises(IntegrityError, match="parents"):
        target.forward(cache, [PassRow(0, 0, [1, 2], (-1, 0))])


def check_kept_path(target: TargetModel, close: Callable[[Tensor, Tensor], bool]) -> None:
    """A tree's kept path goes on as a chain: logits and features are the plain model's."""
    cache = target.make_cache(1, 64, keep_features=True)
    slot = cache.acquire()
    text = random_text(6, seed=5)
    feed(target, cache, slot, text)
    target.forward(cache, [PassRow(slot, 6, [11, 12, 13, 14, 15], (-1, -1, 1, 0))])
    cache.commit_path(slot, 6, [0, 2, 3])
    committed = [*text, 11, 13, 14]
    output = target.forward(cache, [PassRow(slot, 9, [20, 21])])
    assert close(output.logits, plain_logits(target.reference, [*committed, 20, 21])[-2:])
    states = plain_states(target.reference, committed, target.feature_layers)
    assert cache.features is not None
    assert close(cache.features[slot, :9], states)
