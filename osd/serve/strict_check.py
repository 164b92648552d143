"""The load-time check of ``numerics: strict``: does a token's result depend on anything but its text?

All comparisons are of bits. A library may change its cuts with any version or processor, so independence
is tested where it is used and not taken from a table.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from drafts.errors import InvalidValueError
from osd.serve.cache import SlotCache
from osd.serve.lean import LeanTarget
from osd.serve.strict import KERNELS, StrictTarget
from osd.serve.strict_attention import KEYS, QUERIES, Unit, attend, mask_of
from osd.serve.target import PassRow

logger = logging.getLogger(__name__)

LENGTHS = (64, 128, 512, 576, 2048)
"""Key lengths at which attention is tried; fused kernels cut keys at 512."""

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def strict_target(model: Any, *, name: str, feature_layers: Sequence[int] | None) -> StrictTarget:
    """A strict target with the first kernel whose rows prove independent on this machine.

    Raises:
        InvalidValueError: None does.
    """
    target = StrictTarget(model, name=name, feature_layers=feature_layers)
    findings: list[str] = []
    for kernel in KERNELS:
        target.kernel = kernel
        fault = dependence(target)
        if fault is None:
            logger.info("%s: strict numerics by %s", name, kernel.name)
            return target
        findings.append(f"{kernel.name}: {fault}")
        logger.warning("%s: strict numerics not by %s", name, findings[-1])
    raise InvalidValueError(
        "target.numerics",
        "strict",
        f"fast on this machine, where every kernel fails ({'; '.join(findings)})",
    )


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one floating type are equal bit by bit (0 is not -0, a NaN equals itself)."""
    kind = _INTEGERS[a.element_size()]
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


@torch.inference_mode()
def dependence(target: StrictTarget, seed: int = 0) -> str | None:
    """What a token's result depends on besides its text; ``None`` if nothing was found."""
    generator = torch.Generator().manual_seed(seed)
    return (
        _of_products(target, generator) or _of_attention(target, generator) or _of_passes(target, generator)
    )


def _of_products(target: StrictTarget, generator: torch.Generator) -> str | None:
    """One row at every place of a block, beside rows of other sizes."""
    rows = target.kernel.rows
    for role, matrices in target.weights().items():
        weight = matrices[0].plain
        block = _random(target, generator, rows, weight.shape[1])
        expected = target.kernel.product(block, weight)[0]
        for place in range(rows):
            other = _random(target, generator, rows, weight.shape[1]) * 10.0 ** (place % 5 - 2)
            other[place] = block[0]
            if not same_bits(target.kernel.product(other, weight)[place], expected):
                return f"a row of the {role} product depends on its place in the block or on the others"
    return None


def _of_attention(target: StrictTarget, generator: torch.Generator) -> str | None:
    """One query at every place of a group, at key lengths on both sides of the kernels' own cuts."""
    probe = target.make_cache(1, 1, keep_features=False).pairs[0]
    kv_heads, width = probe.shape[2], probe.shape[4]
    share = target.reference.config.num_attention_heads // kv_heads
    for length in LENGTHS:
        if length > max(KEYS, target.max_positions):
            break
        pair = _random(target, generator, 2, 1, kv_heads, length, width)
        own, seen = _random(target, generator, kv_heads, share, width), length - KEYS // 2
        found: list[Tensor] = []
        for place in range(QUERIES):
            queries = _random(target, generator, kv_heads, QUERIES, share, width)
            queries[:, place] = own
            counts = [length - (3 * other + place) % KEYS for other in range(QUERIES)]
            counts[place] = seen
            unit = Unit(0, tuple(range(QUERIES)), tuple(counts), length, None)
            mask = mask_of(unit, share, target.dtype).to(target.device)
            out = attend(queries.view(1, kv_heads, QUERIES * share, width), pair, mask, width**-0.5)
            found.append(out.view(kv_heads, QUERIES, share, width)[:, place])
        if not all(same_bits(found[0], other) for other in found[1:]):
            return f"attention over {length} keys depends on the query's place in its group or on the others"
    return None


@torch.inference_mode()
def pass_dependence(target: LeanTarget, seed: int = 0) -> str | None:
    """As :func:`dependence`, by whole passes alone."""
    return _of_passes(target, torch.Generator().manual_seed(seed))


def _of_passes(target: LeanTarget, generator: torch.Generator) -> str | None:
    """One text by single tokens alone; then in chunks, a chain and a tree, beside another row."""
    count = min(KEYS + 6, target.max_positions - 4)
    text: list[int] = torch.randint(target.vocab_size, (count + 20,), generator=generator).tolist()
    text, other = text[:count], text[count:]
    room = min(max(2 * KEYS, count + 20), target.max_positions)
    alone = target.make_cache(1, room, keep_features=False)
    alone.acquire()
    prompt = max(1, count - 10)
    expected = [_step(target, alone, [PassRow(0, 0, text[:prompt])])]
    expected += [_step(target, alone, [PassRow(0, at, text[at : at + 1])]) for at in range(prompt, count)]

    beside = target.make_cache(2, room, keep_features=True)
    beside.acquire()
    beside.acquire()
    found: list[Tensor] = []
    at = 0
    for chunk in (5, 3, 1, 12, prompt):
        part = text[at : min(at + chunk, prompt)]
        if part:
            rows = [PassRow(0, beside.lengths[0], other[:1]), PassRow(1, at, part)]
            found.append(_step(target, beside, rows, of=1))
            at += len(part)
    chain = [PassRow(1, at, text[at : at + 4]), PassRow(0, beside.lengths[0], other[1:4])]
    found.append(_step(target, beside, chain, of=0))
    at += 4
    wrong = [(token + 1) % target.vocab_size for token in text]
    tree = [text[at], wrong[at + 1], text[at + 1], wrong[at + 2], text[at + 2], text[at + 3]]
    parents = (-1, -1, 0, 1, 3)
    kept = [0, 2, 4, 5]
    rows = [PassRow(1, at, tree, parents), PassRow(0, beside.lengths[0], other[4:6])]
    output = target.forward(beside, rows)
    found.append(output.logits[kept])
    beside.commit_path(1, at, kept)
    at += 4
    found += [
        _step(target, beside, [PassRow(1, place, text[place : place + 1])]) for place in range(at, count)
    ]
    if not same_bits(torch.cat(expected), torch.cat(found)):
        return "a token's logits depend on chunks, tree or neighbours"
    for index, (a, b) in enumerate(zip(alone.pairs, beside.pairs, strict=True)):
        if not same_bits(a[:, 0, :, :count], b[:, 1, :, :count]):
            return f"keys of layer {index} depend on chunks, tree or neighbours"
    return None


def _step(target: LeanTarget, cache: SlotCache, rows: Sequence[PassRow], of: int = 0) -> Tensor:
    """Run and commit chains; the logits of ``rows[of]``."""
    output = target.forward(cache, rows)
    for row in rows:
        cache.commit(row.slot, row.start + len(row.tokens))
    begin = output.offsets[of]
    return output.logits[begin : begin + len(rows[of].tokens)]


def _random(target: StrictTarget, generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator).to(target.device, target.dtype)
