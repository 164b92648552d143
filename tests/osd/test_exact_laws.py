"""The law of exactness: a request gets the tokens it gets alone without drafts, whatever goes on around it.

Under ``strict`` tokens and logits to the last bit; under ``fast`` up to a first difference at a near tie.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from osd.types import FinishReason
from tests.osd.engine_rig import Client, prompts
from tests.osd.exact_rig import Asked, alone, compare_bits, first_difference, marked, watched_engine

PROMPTS = [tuple(p) for p in prompts(6, seed=50, lengths=(1, 3, 9, 17, 40, 70))]
SAMPLINGS = [
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 7},
    {"temperature": 0.8, "seed": 7, "top_p": 0.9, "top_k": 20},
    {"temperature": 0.8, "seed": 11, "top_p": 0.7},
]
MARKS = ["RRRR", "RRW", "RW", "WWWW", "-", "R"]
LAW = settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


@dataclass
class Scene:
    """Requests with their arrival steps, cancellations by step, and how the engine runs."""

    asked: list[Asked]
    arrivals: list[int]
    cancelled: dict[int, int]
    marks: list[str]
    tree: bool
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
        arrivals=[draw(st.integers(0, 6)) for _ in asked],
        cancelled=cancelled,
        marks=draw(st.lists(st.sampled_from(MARKS), min_size=1, max_size=5)),
        tree=tree,
        swaps=draw(st.lists(st.integers(1, 20), max_size=3)),
        engine={
            "fixed_k": draw(st.sampled_from([None] if tree else [0, 1, 4, None])),
            "prefill_chunk": draw(st.sampled_from([1, 5, 16, 64])),
            "slots": draw(st.integers(1, 5)),
        },
    )


def play(scene: Scene, numerics: str, dtype: str = "float32"):
    """Run the scene; the client, and the target that watched."""
    truth = {item.prompt: alone(item, numerics, dtype).ids for item in scene.asked}
    source = marked(truth, scene.marks, scene.tree)
    engine, watched = watched_engine(source, numerics, dtype, scene.swaps, **scene.engine)
    client = Client(engine)
    for step in range(13):
        for index, item in enumerate(scene.asked):
            if scene.arrivals[index] == step:
                client.submit(str(index), item.prompt, **item.sampling)
            if scene.cancelled.get(index) == step and scene.arrivals[index] <= step:
                engine.intake.cancel(str(index))
        engine.step()
        engine.check()
    client.run()
    assert len(client.outcomes) == len(scene.asked)
    return client, watched


def answers(scene: Scene, client: Client):
    """Every request with its tokens and whether it was cut short."""
    for index, item in enumerate(scene.asked):
        record = client.outcomes[str(index)].record
        cut = record.finish is FinishReason.CANCELLED
        assert cut or record.finish in (FinishReason.STOP, FinishReason.LENGTH)
        assert not cut or index in scene.cancelled
        yield item, record.output_ids, cut


@LAW
@given(scene=scenes())
def test_strict_gives_every_request_its_tokens_and_logits_to_the_last_bit(scene: Scene) -> None:
    client, watched = play(scene, "strict")
    for item, ids, cut in answers(scene, client):
        reference = alone(item, "strict")
        assert ids == reference.ids[: len(ids) if cut else None]
        assert compare_bits(watched, reference) >= len(ids)


@settings(LAW, max_examples=8)
@given(scene=scenes())
def test_strict_holds_in_bfloat16(scene: Scene) -> None:
    client, watched = play(scene, "strict", "bfloat16")
    for item, ids, cut in answers(scene, client):
        reference = alone(item, "strict", "bfloat16")
        assert ids == reference.ids[: len(ids) if cut else None]
        assert compare_bits(watched, reference) >= len(ids)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@settings(LAW, max_examples=10)
@given(scene=scenes())
def test_fast_gives_every_request_its_tokens_up_to_a_near_tie(dtype: str, scene: Scene) -> None:
    client, _ = play(scene, "fast", dtype)
    for item, ids, cut in answers(scene, client):
        found = first_difference(item, ids, "fast", dtype)
        if found is None:
            assert cut or len(ids) == len(alone(item, "fast", dtype).ids)
        else:
            assert found[1].is_tie, found
