"""What is accepted of a frozen draft depends on the request alone (A26); a draft's limit is kept (A08)."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest

from drafts.draft_model import DraftModel
from drafts.kinds.base import Source
from drafts.kinds.lookup import LookupSource
from drafts.kinds.model import ModelSource
from drafts.kinds.ngram import NgramSource
from drafts.mixture import Mixture
from osd.types import FinishedRecord
from tests.osd.draft_rig import eagle
from tests.osd.engine_rig import Client, make_engine, prompts
from tests.tiny import VOCAB, tiny_model

TEXTS = [
    (3 + index, *text, *text)
    for index, text in enumerate(prompts(20, seed=26, lengths=(3, 60, 5, 40, 4, 25, 9, 12)))
]
OTHERS = [
    (30 + index % 90, *text) for index, text in enumerate(prompts(500, seed=27, lengths=(4, 50, 9, 20)))
]
ORDERS = {
    "as listed": list(range(20)),
    "reversed": list(reversed(range(20))),
    "long before short": sorted(range(20), key=lambda index: -len(TEXTS[index])),
}


def trained_ngram() -> NgramSource:
    """A memory of the answers to a few of the prompts."""
    source = NgramSource()
    client = Client(make_engine(source))
    for index in range(0, 20, 3):
        client.submit(str(index), TEXTS[index], temperature=0.6, seed=index)
    client.run()
    assert source.describe("base")["tokens"]
    return source


def copy_of_target() -> ModelSource:
    """A model draft that is the target itself with a little noise."""
    model = tiny_model("llama")
    model.lm_head.weight.add_(0.05 * model.lm_head.weight.roll(1, 0))
    return ModelSource(DraftModel(model, VOCAB))


SOURCES = {"lookup": LookupSource, "ngram": trained_ngram, "eagle": eagle, "model": copy_of_target}


def counts(record: FinishedRecord) -> list[tuple[int, int, int]]:
    return [(item.proposed, item.accepted, item.tested) for item in record.rounds]


def served(source: Source, order: Sequence[int], before: int = 0) -> list[list[tuple[int, int, int]]]:
    """By prompt, what was proposed, accepted and tested in every round, in one slot of a fresh server."""
    engine = make_engine(drafter=Mixture({source.name: source}, learn=False), slots=1, queue=1000)
    client = Client(engine)
    for index, prompt in enumerate(OTHERS[:before]):
        client.submit(f"other {index}", prompt, max_tokens=4)
    for index in order:
        client.submit(str(index), TEXTS[index], temperature=0.6, seed=index, ignore_eos=True)
    client.run()
    return [counts(client.outcomes[str(index)].record) for index in range(20)]


@pytest.mark.parametrize("name", SOURCES)
def test_a26_without_learning_acceptance_of_a_prompt_is_the_same_in_every_order(name: str) -> None:
    source = SOURCES[name]()
    alone = served(source, ORDERS["as listed"])
    assert sum(proposed for rounds in alone for proposed, _, _ in rounds) > 100
    assert sum(accepted for rounds in alone for _, accepted, _ in rounds) > 0
    for order in ORDERS.values():
        assert served(source, order) == alone
    assert served(source, [*ORDERS["as listed"]], before=500) == alone


def test_a08_a_draft_with_a_short_context_falls_silent_and_everything_else_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    limit = 64
    draft = ModelSource(DraftModel(tiny_model("llama", max_position_embeddings=limit), VOCAB))
    engines = [
        make_engine(drafter=drafter, max_length=512)
        for drafter in (None, Mixture({"lookup": LookupSource(), "model": draft}))
    ]
    plain, mixed = map(Client, engines)
    prompt, late = (5, 6, 7, 8) * 5, prompts(1, seed=3, lengths=(4,))[0]
    with caplog.at_level(logging.WARNING):
        for client in (plain, mixed):
            client.submit("long", prompt, max_tokens=200, ignore_eos=True)
            client.run(steps=20)
            client.submit("late", late, max_tokens=40, ignore_eos=True)
            client.run()
    assert mixed.run() == plain.run()
    assert list(mixed.outcomes) == ["late", "long"], "they ran together"
    rounds = {name: outcome.record.rounds for name, outcome in mixed.outcomes.items()}
    assert sum("model" in item.source for item in rounds["late"]) >= 8
    held = len(prompt)
    for item in rounds["long"]:
        assert "model" not in item.source or held <= limit
        held += item.emitted
    sources = [item.source for item in rounds["long"]]
    assert (sources.count("model") >= 8, "model" in sources[20:], "lookup" in sources[20:]) == (
        True,
        False,
        True,
    )
    assert sum(f"context of {limit}" in record.message for record in caplog.records) == 1
    assert not [record for record in caplog.records if record.levelno > logging.WARNING]
