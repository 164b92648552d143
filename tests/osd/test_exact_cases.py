"""Reported faults of exactness, by case: A10 (verification pass), A14 (near ties), A15 (seeds)."""

from __future__ import annotations

import pytest
import torch

from tests.osd.engine_rig import Client, prompts
from tests.osd.exact_rig import (
    Asked,
    alone,
    compare_bits,
    exact_target,
    first_difference,
    marked,
    watched_engine,
)
from tests.osd.passes import plain_logits

PATTERNS = {
    "RRR": ["RRR"],
    "RRW": ["RRW"],
    "RWR": ["RWR"],
    "WWW": ["WWW"],
    "all right": ["RRRRRRRR"],
    "empty": ["-"],
    "alternating": ["RRRR", "WWWW", "RW", "WR", "-"],
}


@pytest.mark.parametrize("numerics", ["fast", "strict"])
@pytest.mark.parametrize("length", [1, 7])
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("name", PATTERNS)
def test_a10_every_verified_position_has_the_logits_of_a_forward_without_a_cache(
    name: str, tree: bool, length: int, numerics: str
) -> None:
    prompt = tuple(prompts(1, seed=11, lengths=(length,))[0])
    asked = Asked(prompt, {"max_tokens": 64, "ignore_eos": True})
    ids = alone(asked, numerics).ids
    source = marked({prompt: ids}, PATTERNS[name], tree)
    engine, watched = watched_engine(source, numerics, fixed_k=None if tree else 8)
    client = Client(engine)
    client.submit("a", prompt, **asked.sampling)
    assert client.run()["a"] == ids
    text = [*prompt, *ids]
    plain = plain_logits(exact_target(numerics).reference, text)
    worst = 0.0
    for end in range(length, len(text)):
        for found in watched.seen[tuple(text[:end])]:
            worst = max(worst, float((found - plain[end - 1]).abs().max()))
    assert worst <= 1e-4


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def answered(request: pytest.FixtureRequest) -> tuple[str, list[Asked]]:
    """A dtype, and a hundred prompts of 256 tokens whose answers alone, without drafts, are known."""
    texts = prompts(100, seed=14, lengths=(5, 9, 30, 1))
    asked = [Asked(tuple(text), {"max_tokens": 256, "ignore_eos": True}) for text in texts]
    for item in asked:
        alone(item, "fast", request.param)
    return request.param, asked


@pytest.mark.parametrize(
    ("k", "together"),
    [(0, 8), (1, 1), (1, 8), (4, 1), (4, 8), ("tree", 1), ("tree", 8)],
)
def test_a14_plain_and_speculative_text_part_only_at_near_ties(
    answered: tuple[str, list[Asked]], k: int | str, together: int
) -> None:
    """Every first difference is printed with its top-2 gap."""
    dtype, asked = answered
    truth = {item.prompt: alone(item, "fast", dtype).ids for item in asked}
    source = marked(truth, ["RRRR", "RRW", "WW", "R", "RW"], k == "tree")
    engine, _ = watched_engine(source, "fast", dtype, fixed_k=None if k == "tree" else k, slots=together)
    client = Client(engine)
    for index, item in enumerate(asked):
        client.submit(str(index), item.prompt, **item.sampling)
    answers = client.run(steps=30_000)
    differ = 0
    for index, item in enumerate(asked):
        found = first_difference(item, answers[str(index)], "fast", dtype)
        if found is not None:
            differ += 1
            print(f"{dtype}, k={k}, {together} together, request {index}, position {found[0]}: {found[1]}")
            assert found[1].is_tie
        else:
            assert answers[str(index)] == truth[item.prompt]
    print(f"{dtype}, k={k}, {together} together: {differ} of {len(asked)} differ, all at near ties")


@pytest.mark.parametrize("numerics", ["fast", "strict"])
@pytest.mark.parametrize("extra", [{}, {"top_p": 0.9, "top_k": 20}])
def test_a15_one_seed_gives_one_text_alone_beside_others_after_others_and_after_a_swap(
    extra: dict[str, float], numerics: str
) -> None:
    asked = Asked(tuple(prompts(1, seed=15)[0]), {"max_tokens": 32, "seed": 42, "temperature": 1.0, **extra})
    reference = alone(asked, numerics)
    others = prompts(107, seed=16, lengths=(3, 8, 20))
    source = marked({asked.prompt: reference.ids}, ["RRRR", "RW", "W"], tree=True)
    engine, watched = watched_engine(source, numerics, swaps=[3, 60], fixed_k=None, slots=8)
    client = Client(engine)
    for index, other in enumerate(others[:7]):
        client.submit(f"beside {index}", other, temperature=1.0)
    client.submit("beside", asked.prompt, **asked.sampling)
    client.run()
    for index, other in enumerate(others[7:]):
        client.submit(f"before {index}", other, temperature=1.0, max_tokens=4)
    client.run()
    client.submit("after", asked.prompt, **asked.sampling)
    client.run()
    source.script = lambda row, limit: [7, 8, 9]
    version = engine.drafter.versions
    version.steps.add(version.step + 4)
    client.submit("swapped", asked.prompt, **asked.sampling)
    answers = client.run()
    assert version.version == 3
    assert client.outcomes["swapped"].record.versions[-1] == 3
    assert {answers[name] for name in ("beside", "after", "swapped")} == {reference.ids}
    if numerics == "strict":
        assert compare_bits(watched, reference) >= 3 * len(reference.ids)


def test_a15_serial_requests_without_a_seed_differ() -> None:
    prompt = prompts(1, seed=31)[0]
    engine, _ = watched_engine(None, "fast", fixed_k=0)
    client = Client(engine)
    for index in range(20):
        client.submit(str(index), prompt, temperature=1.0)
        client.run()
    assert len({outcome.record.output_ids for outcome in client.outcomes.values()}) >= 15


def test_strict_and_fast_differ_in_bits_only() -> None:
    asked = Asked(tuple(prompts(1, seed=17, lengths=(40,))[0]), {"max_tokens": 24})
    fast, strict = alone(asked, "fast"), alone(asked, "strict")
    assert fast.ids == strict.ids
    for text, logits in fast.logits.items():
        assert torch.allclose(logits, strict.logits[text], atol=1e-4, rtol=0)
