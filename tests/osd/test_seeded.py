"""200 seeded requests at temperature 0.8: one text each, however drafted, batched and learned from."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.osd.draft_rig import Releases, mixture
from tests.osd.engine_rig import Client, make_engine, prompts
from tests.osd.exact_rig import Asked, alone, exact_target, first_difference, marked

COUNT = 200
MARKS = ["RRRR", "RRW", "RW", "R"]


def asked() -> list[Asked]:
    """Prompts that hold a text twice, so that memories have something to say, each with a seed of its own."""
    texts = prompts(20, seed=90, lengths=(4, 9, 17, 26))
    return [
        Asked(
            (3 + index // 20, *texts[index % 20], *texts[index % 20]),
            {"temperature": 0.8, "seed": index, "max_tokens": 10},
        )
        for index in range(COUNT)
    ]


def serve(numerics: str, drafts: str, learn: bool, slots: int) -> dict[str, tuple[int, ...]]:
    """All answers; where drafts learn, an eagle is among them and replaced after the twentieth step."""
    items = asked()
    truth = {item.prompt: alone(item, numerics).ids for item in items}
    target = exact_target(numerics)
    drafter, releases = None, None
    if drafts != "none":
        names = {"chains": (), "trees": ("lookup", "ngram")}[drafts]
        names = ("lookup", "ngram", "eagle") if learn else names
        forced = marked(truth, MARKS, tree=drafts == "trees")
        drafter = mixture(names, target, lambda: 0.0, forced=forced)
        drafter.learn = learn
        releases = Releases(drafter) if learn else None
    fixed = {"none": 0, "chains": 4, "trees": None}[drafts]
    engine = make_engine(drafter=drafter, target=target, slots=slots, fixed_k=fixed, prefill_chunk=64)
    client = Client(engine)
    for index, item in enumerate(items):
        client.submit(str(index), item.prompt, **item.sampling)
    if releases is not None:
        client.run(steps=20)
        releases.publish()
    found = client.run()
    rounds = [item for outcome in client.outcomes.values() for item in outcome.record.rounds]
    if drafter is not None:
        assert sum(item.accepted for item in rounds) > COUNT // 4, "speculation took place"
        assert sum(item.accepted < item.proposed for item in rounds) > COUNT // 4, "and was refused at times"
    if drafts == "trees":
        assert sum(item.proposed > item.tested for item in rounds) > COUNT // 4, (
            "trees were wider than a path"
        )
    if learn:
        by_source = Counter(name for item in rounds if item.proposed for name in item.source.split("+"))
        assert min(by_source[name] for name in ("lookup", "ngram", "eagle")) > 0, "all of them proposed"
        assert {item.version for item in rounds} == {0, 1}, "and one was replaced meanwhile"
    return found


@pytest.mark.parametrize("numerics", ["strict", "fast"])
@pytest.mark.parametrize("slots", [1, 16])
@pytest.mark.parametrize(
    ("drafts", "learn"),
    [("none", False), ("chains", False), ("chains", True), ("trees", False), ("trees", True)],
)
def test_200_seeded_requests_have_one_text_each(numerics: str, slots: int, drafts: str, learn: bool) -> None:
    found = serve(numerics, drafts, learn, slots)
    assert len(found) == COUNT
    for index, item in enumerate(asked()):
        ids = found[str(index)]
        if numerics == "strict":
            assert ids == alone(item, "strict").ids
        elif (difference := first_difference(item, ids, "fast", "float32")) is not None:
            assert difference[1].is_tie, difference
        else:
            assert len(ids) == len(alone(item, "fast").ids)
