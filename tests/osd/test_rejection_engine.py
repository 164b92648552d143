"""The engine under ``verification: rejection``: what drafts see, what is refused, whose text it is."""

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch

from drafts.draft_model import DraftModel
from drafts.kinds.lookup import LookupSource
from drafts.kinds.model import ModelSource
from drafts.kinds.ngram import NgramSource
from drafts.mixture import Mixture
from drafts.proposal import POINT_MASS
from osd.config import EngineConfig
from osd.serve.shaping import shaped_logprobs
from osd.types import SamplingParams
from tests.osd.draft_rig import eagle
from tests.osd.engine_rig import Client, Forced, check_counters, make_engine, prompts, target
from tests.osd.rejection_rig import p_value
from tests.tiny import VOCAB

SAMPLED = {"temperature": 0.9, "top_p": 0.95, "top_k": 40, "ignore_eos": True}


def engine_with(drafter, **changes):
    engine = make_engine(drafter=drafter, **changes)
    engine.settings.verification = "rejection"
    return engine


def mixture(names=("lookup", "ngram", "eagle")):
    made = {"lookup": LookupSource, "ngram": NgramSource, "eagle": eagle}
    return Mixture({name: made[name]() for name in names})


class Recorded:
    """A drafter that keeps the rows and proposals of another, and may change the proposals."""

    def __init__(self, inner, change=lambda proposal: proposal):
        self.inner = inner
        self.change = change
        self.seen = []

    def propose(self, rows, limits, price):
        proposals = [self.change(p) for p in self.inner.propose(rows, limits, price)]
        self.seen += zip(rows, proposals, strict=True)
        return proposals

    def __getattr__(self, name):
        return getattr(self.inner, name)


class Drawing:
    """A neural source alone: combs of a fixed shape, drawn with the row's own noise."""

    def __init__(self, depth, width, source=None):
        self.source = source or eagle()
        self.depth, self.width = depth, width
        self.needs_features = True

    def propose(self, rows, limits, price):
        caps = [min(limit, self.depth) for limit in limits]
        return self.source.propose_priced(rows, caps, [0.0] * len(rows), self.width)

    def observe(self, rows, proposals, emitted):
        pass

    def finish(self, row):
        row.scratch.clear()

    def swap(self):
        return []

    def version(self, domain):
        return 0


def texts(engine, count=3, **sampling):
    client = Client(engine)
    for index, prompt in enumerate(prompts(count, seed=3, lengths=(9, 4, 30))):
        client.submit(str(index), prompt, seed=index, max_tokens=20, **sampling)
    answers = client.run()
    for outcome in client.outcomes.values():
        check_counters(outcome.record)
    return answers


def test_the_choice_is_a_setting_and_invariant_is_the_default():
    assert EngineConfig().verification == "invariant"
    assert EngineConfig(verification="rejection").verification == "rejection"
    with pytest.raises(ValueError, match="verification"):
        EngineConfig(verification="typical")


@pytest.mark.parametrize("fixed_k", [3, None])
def test_a11_the_mixture_proposes_point_masses_and_never_sees_verifications_noise(fixed_k):
    drafter = Recorded(mixture())
    texts(engine_with(drafter, fixed_k=fixed_k), **SAMPLED)
    assert any(len(proposal) for _, proposal in drafter.seen)
    for row, proposal in drafter.seen:
        assert not row.coupled
        assert set(proposal.check_distributions()) <= {POINT_MASS}
        proposal.check()


def test_a11_under_the_invariant_rule_a_sampled_tree_claims_no_distribution():
    drafter = Recorded(mixture())
    texts(make_engine(drafter=drafter, fixed_k=3), **SAMPLED)
    assert all(row.coupled for row, _ in drafter.seen)
    assert {proposal.distributions for _, proposal in drafter.seen if len(proposal)} == {None}


def test_greedy_texts_are_the_plain_ones():
    greedy = {"temperature": 0.0, "ignore_eos": True}
    assert texts(engine_with(mixture(), fixed_k=None), **greedy) == texts(make_engine(), **greedy)


def test_a15_without_drafts_a_seed_gives_the_text_of_the_invariant_rule():
    assert texts(engine_with(None), **SAMPLED) == texts(make_engine(), **SAMPLED)


@pytest.mark.parametrize(
    "drafter", [lambda: mixture(("eagle",)), lambda: Drawing(3, 1), lambda: Drawing(2, 3)]
)
def test_a15_the_same_seed_and_drafts_give_the_same_text_again(drafter):
    first = texts(engine_with(drafter(), fixed_k=3), **SAMPLED)
    assert texts(engine_with(drafter(), fixed_k=3), **SAMPLED) == first


def test_a11_a_source_without_q_is_refused_by_name_and_leaves_the_text(caplog):
    drafter = Recorded(
        Mixture({"forced": Forced(lambda row, limit: [5] * limit)}),
        lambda proposal: replace(proposal, distributions=None),
    )
    with caplog.at_level(logging.ERROR):
        answers = texts(engine_with(drafter), **SAMPLED)
    assert answers == texts(make_engine(), **SAMPLED)
    refusals = [record for record in caplog.records if "forced" in record.getMessage()]
    assert len(refusals) == 1
    assert any(len(proposal) for _, proposal in drafter.seen)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a18_a_head_with_broken_output_proposes_nothing_and_leaves_the_text(bad):
    drafter = Drawing(2, 2)
    drafter.source.output[3] = bad
    recorded = Recorded(drafter)
    assert texts(engine_with(recorded), **SAMPLED) == texts(make_engine(), **SAMPLED)
    assert {len(proposal) for _, proposal in recorded.seen} == {0}


SHAPED = {"temperature": 0.6, "top_k": 3}


@pytest.fixture(scope="module")
def expected():
    """Exact probabilities of the tokens at output positions 1 and 2 after one prompt, [V, V]."""
    prompt = prompts(1, seed=5, lengths=(7,))[0]
    table = np.zeros((VOCAB, VOCAB))

    @torch.no_grad()
    def after(tokens):
        logits = target().reference(torch.tensor([tokens])).logits[0, -1]
        ids, logp = shaped_logprobs(logits, SamplingParams(**SHAPED))
        return list(zip(ids.tolist(), logp.exp().tolist(), strict=True))

    for a, p in after([*prompt]):
        for b, q in after([*prompt, a]):
            for c, r in after([*prompt, a, b]):
                table[b, c] += p * q * r
    return prompt, table


@pytest.mark.parametrize(("depth", "width"), [(2, 1), (2, 2)])
def test_a11_texts_of_the_engine_follow_the_target(depth, width, expected):
    """The first two tokens that a proposal can touch; the draft is the target itself without its top-k."""
    prompt, table = expected
    source = ModelSource(DraftModel(target().reference, VOCAB))
    engine = engine_with(Drawing(depth, width, source), fixed_k=2, slots=8)
    client = Client(engine)
    counts = np.zeros((VOCAB, VOCAB))
    n = 300
    for seed in range(n):
        client.submit(str(seed), prompt, seed=seed, max_tokens=4, ignore_eos=True, **SHAPED)
        if seed % 100 == 99:
            client.run()
    tested = accepted = 0
    for outcome in client.outcomes.values():
        counts[tuple(outcome.record.output_ids[1:3])] += 1
        tested += sum(item.tested for item in outcome.record.rounds)
        accepted += sum(item.accepted for item in outcome.record.rounds)

    assert counts.sum() == n
    assert 0.2 < accepted / tested < 0.98
    assert p_value(counts, table) > 1e-3
