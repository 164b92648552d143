"""The law of exactness: a request gets the tokens it gets alone without drafts, whatever goes on around it.

Under ``strict`` tokens and logits to the last bit; under ``fast`` up to a first difference at a near tie.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from osd.types import FinishReason
from tests.osd.draft_rig import Releases, mixture
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

SHARED = prompts(1, seed=51, lengths=(48,))[0]
PROMPTS = [
    *(tuple(p) for p in prompts(6, seed=50, lengths=(1, 3, 9, 17, 40, 70))),
    *(tuple(SHARED[:length] + end) for length, end in zip((34, 48, 48), prompts(3, seed=52), strict=True)),
    (*SHARED[:20], *SHARED[:20], *SHARED[:9]),
]
JSON = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 7},
    {"temperature": 0.8, "seed": 7, "top_p": 0.9, "top_k": 20},
    {"temperature": 0.8, "seed": 11, "top_p": 0.7},
    {"temperature": 1.2, "seed": 5, "min_p": 0.05},
    {"temperature": 0.0, "repetition_penalty": 1.3, "min_tokens": 8},
    {"temperature": 0.8, "seed": 3, "frequency_penalty": 0.7, "presence_penalty": 0.5},
    {"temperature": 0.0, "frequency_penalty": 1.5, "logit_bias": {5: -100.0, 9: 2.5}},
    {"temperature": 0.0, "stop": ("a", "b", "c", "d", "e")},
    {"temperature": 0.0, "response_format": {"kind": "json_schema", "json_schema": JSON}},
    {"temperature": 0.8, "seed": 9, "response_format": {"kind": "json_object"}},
]
DRAFTING: list[dict[str, Any]] = [
    {},
    {},
    {"k": 0},
    {"k": 2},
    {"sources": ()},
    {"sources": ("lookup", "forced")},
]
"""What a request may say of its drafts, which no text depends on."""
MARKS = ["RRRR", "RRW", "RW", "WWWW", "-", "R"]
LAW = settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


@dataclass
class Scene:
    """Requests with their arrival steps, cancellations by step, and how the engine runs.

    ``real`` drafts are lookup, ngram and an eagle, which learn as requests end; else a script is proposed.
    ``swaps`` are the steps at which new draft versions are adopted.
    """

    asked: list[Asked]
    drafting: list[dict[str, Any]]
    arrivals: list[int]
    cancelled: dict[int, int]
    marks: list[str]
    tree: bool
    real: bool
    swaps: list[int]
    engine: dict[str, int | None]


@st.composite
def scenes(draw: st.DrawFn) -> Scene:
    asked = [
        Asked(draw(st.sampled_from(PROMPTS)), {"max_tokens": 24, **draw(st.sampled_from(SAMPLINGS))})
        for _ in range(draw(st.integers(2, 6)))
    ]
    cancelled = draw(st.dictionaries(st.integers(0, len(asked) - 1), st.integers(1, 12), max_size=2))
    tree = draw(st.booleans())
    return Scene(
        asked=asked,
        drafting=[draw(st.sampled_from(DRAFTING)) for _ in asked],
        arrivals=[draw(st.integers(0, 6)) for _ in asked],
        cancelled=cancelled,
        marks=draw(st.lists(st.sampled_from(MARKS), min_size=1, max_size=5)),
        tree=tree,
        real=draw(st.booleans()),
        swaps=draw(st.lists(st.integers(1, 20), max_size=3)),
        engine={
            "fixed_k": draw(st.sampled_from([None] if tree else [0, 1, 4, None])),
            "prefill_chunk": draw(st.sampled_from([1, 5, 16, 64])),
            "slots": draw(st.integers(1, 5)),
            "prefix_cache_tokens": draw(st.sampled_from([0, 256])),
        },
    )


def play(scene: Scene, numerics: str, dtype: str, seen: Counter[str]):
    """Run the scene; the client, and the target that watched. Counts in ``seen`` what took place."""
    releases = None
    if scene.real:
        drafts: Any = mixture(("lookup", "ngram", "eagle"), exact_target(numerics, dtype), lambda: 0.0)
        releases = Releases(drafts)
    else:
        truth = {item.prompt: alone(item, numerics, dtype).ids for item in scene.asked}
        drafts = marked(truth, scene.marks, scene.tree)
    swaps = [] if scene.real else scene.swaps
    engine, watched = watched_engine(drafts, numerics, dtype, swaps, **scene.engine)
    client = Client(engine)
    for step in range(21):
        if releases is not None and step in scene.swaps:
            releases.publish()
        for index, item in enumerate(scene.asked):
            if scene.arrivals[index] == step:
                client.submit(str(index), item.prompt, **item.sampling, **scene.drafting[index])
            if scene.cancelled.get(index) == step and scene.arrivals[index] <= step:
                engine.intake.cancel(str(index))
        engine.step()
        engine.check()
    client.run()
    assert len(client.outcomes) == len(scene.asked)
    for index, item in enumerate(scene.asked):
        note(seen, item, client.outcomes[str(index)].record)
    return client, watched


def note(seen: Counter[str], item: Asked, record: Any) -> None:
    """Count what took place in a request."""
    seen["reused"] += record.cached_tokens >= 32
    seen["swapped"] += len(record.versions) > 1
    proposed = [item for item in record.rounds if item.proposed]
    seen.update(name for item in proposed for name in item.source.split("+"))
    seen["accepted"] += sum(item.accepted for item in proposed)
    seen["refused"] += sum(item.proposed - item.accepted for item in proposed)
    if proposed:
        seen.update(name for name in item.sampling if name not in ("temperature", "max_tokens", "seed"))
    seen["stopped"] += "stop" in item.sampling and record.finish is FinishReason.STOP


HELD = {
    *("reused", "swapped", "accepted", "refused", "stopped", "forced", "lookup", "ngram", "eagle"),
    *(name for sampling in SAMPLINGS for name in sampling if name not in ("temperature", "seed")),
}
"""What must take place somewhere in the scenes of a law, so that it says something about it."""


def answers(scene: Scene, client: Client):
    """Every request with its tokens and whether it was cut short."""
    for index, item in enumerate(scene.asked):
        record = client.outcomes[str(index)].record
        cut = record.finish is FinishReason.CANCELLED
        assert cut or record.finish in (FinishReason.STOP, FinishReason.LENGTH)
        assert not cut or index in scene.cancelled
        yield item, record.output_ids, cut


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_strict_gives_every_request_its_tokens_and_logits_to_the_last_bit(dtype: str) -> None:
    seen: Counter[str] = Counter()

    @LAW
    @given(scene=scenes())
    def law(scene: Scene) -> None:
        client, watched = play(scene, "strict", dtype, seen)
        for item, ids, cut in answers(scene, client):
            reference = alone(item, "strict", dtype)
            assert ids == reference.ids[: len(ids) if cut else None]
            assert compare_bits(watched, reference) >= len(ids)

    law()
    assert {name for name in HELD if not seen[name]} == set()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fast_gives_every_request_its_tokens_up_to_a_near_tie(dtype: str) -> None:
    seen: Counter[str] = Counter()

    @LAW
    @given(scene=scenes())
    def law(scene: Scene) -> None:
        client, _ = play(scene, "fast", dtype, seen)
        for item, ids, cut in answers(scene, client):
            found = first_difference(item, ids, "fast", dtype)
            if found is None:
                assert cut or len(ids) == len(alone(item, "fast", dtype).ids)
            else:
                assert found[1].is_tie, found

    law()
    assert {name for name in HELD if not seen[name]} == set()
