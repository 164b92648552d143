"""Real draft sources under the engine: the text never depends on them, on k, on the batch, on a swap."""

import itertools

import pytest
import torch

from drafts.registry import Registry
from drafts.versions import VersionFollower
from osd.learn.config import BufferConfig, GuardConfig, LearnConfig
from osd.learn.head import EagleHead
from osd.learn.scheduler import LearningScheduler
from tests.osd.draft_rig import mixture
from tests.osd.engine_rig import Client, Forced, make_engine, prompts

SAMPLINGS = [{"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.95, "top_k": 40}]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a15_the_same_seed_gives_the_same_text_with_every_source_and_k_alone_and_in_a_batch(sampling):
    prompt, *others = prompts(5, seed=7, lengths=(9, 4, 30))
    alone = Client(make_engine())
    alone.submit("a", prompt, "math", seed=5, max_tokens=40, **sampling)
    expected = alone.run()["a"]
    for names, k in itertools.product(
        [("lookup",), ("ngram",), ("eagle",), ("lookup", "ngram", "eagle")], [0, 1, 2, 3, 4, None]
    ):
        engine = make_engine(drafter=mixture(names), fixed_k=k)
        for beside in (False, True):
            client = Client(engine)
            client.submit("a", prompt, "math", seed=5, max_tokens=40, **sampling)
            for index, other in enumerate(others if beside else ()):
                client.submit(f"o{index}", other, "base", seed=index, temperature=1.0)
            assert client.run()["a"] == expected, (names, k, beside)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a27_a_swap_in_the_middle_of_an_answer_changes_the_version_and_not_the_text(sampling):
    prompt = prompts(1, seed=8, lengths=(12,))[0]
    alone = Client(make_engine())
    alone.submit("a", prompt, "math", seed=9, max_tokens=40, ignore_eos=True, **sampling)
    expected = alone.run()["a"]
    drafter = mixture(("eagle",))
    bank, registry = drafter.sources["eagle"].bank, Registry(None)
    drafter.versions = VersionFollower(registry, bank)
    registry.publish("math", bank.tensors("math"), reason="born")
    events = []
    client = Client(make_engine(drafter=drafter, on_event=events.append))
    client.submit("a", prompt, "math", seed=9, max_tokens=40, ignore_eos=True, **sampling)
    for _ in range(5):
        client.engine.step()
    noisy = {
        name: tensor + torch.randn_like(tensor) if tensor.is_floating_point() else tensor
        for name, tensor in bank.tensors("math").items()
    }
    registry.publish("math", noisy, reason="noise")
    assert client.run()["a"] == expected
    record = client.outcomes["a"].record
    assert record.versions == (0, 1)
    assert {r.version for r in record.rounds} == {0, 1}
    assert [(event.kind, event.domain) for event in events] == [("swap", "math")]


def test_an_expert_is_distilled_published_and_used_while_the_engine_serves():
    drafter = mixture(("eagle",))
    source = drafter.sources["eagle"]
    registry = Registry(None)
    drafter.versions = VersionFollower(registry, source.bank)
    registry.publish("math", source.bank.tensors("math"), reason="born")
    head = EagleHead(source.trunk, source.bank, source.embedding, source.output)
    config = LearnConfig(
        budget_share=0.9,
        update_every=4,
        rate=1e-2,
        buffer=BufferConfig(hold_back=2),
        guard=GuardConfig(min_positions=16),
    )
    events = []
    scheduler = LearningScheduler({"eagle": head}, registry, config, events.append)
    engine = make_engine(
        drafter=drafter, evidence_k=16, observers=[scheduler], worker=scheduler, on_event=events.append
    )
    client = Client(engine)
    for index, prompt in enumerate(prompts(24, seed=9, lengths=(6,)) * 3):
        client.submit(str(index), prompt, "math", max_tokens=24, ignore_eos=True)
    client.run()
    while engine.step():
        pass
    kinds = {event.kind for event in events}
    assert "publish" in kinds
    assert "swap" in kinds
    assert drafter.version("math") >= 1
    serving = drafter.version("math")
    client.submit("after", prompts(1, seed=10)[0], "math", ignore_eos=True)
    client.run()
    assert client.outcomes["after"].record.versions[0] == serving


def test_the_book_says_which_limit_silenced_a_row():
    engine = make_engine(Forced(lambda row, limit: [5] * 3), fixed_k=None)
    client = Client(engine)
    client.submit("capped", prompts(1)[0], max_tokens=6, ignore_eos=True, k=0)
    client.submit("short", prompts(1)[0], max_tokens=2, ignore_eos=True)
    client.run()
    because = engine.drafter.speculation("base")["plain_because"]
    assert because == {"request cap": pytest.approx(5 / 6), "max_tokens left": pytest.approx(1 / 6)}
