"""Laws that every source obeys, whatever its kind."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from drafts import kinds
from drafts.draft_model import DraftModel
from drafts.kinds.base import DraftRow, Source
from drafts.kinds.lookup import LookupSource
from drafts.kinds.model import ModelSource
from drafts.kinds.ngram import NgramSource
from drafts.proposal import EMPTY, Proposal
from tests.drafts import head_rig

VOCAB = head_rig.SHAPE.vocab_size
DOMAINS = ("base", "math", "code")


def tiny_model() -> ModelSource:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    return ModelSource(DraftModel(LlamaForCausalLM(config), VOCAB))


MAKERS: dict[str, Callable[[], Source]] = {
    "lookup": LookupSource,
    "ngram": NgramSource,
    "eagle": lambda: head_rig.source(),
    "model": tiny_model,
}


@pytest.fixture(params=sorted(MAKERS))
def made(request: pytest.FixtureRequest) -> Source:
    source = MAKERS[request.param]()
    for domain in DOMAINS[1:]:
        source.add_domain(domain, "base")
    return source


def text(seed: int, length: int = 40) -> list[int]:
    """A text over few tokens, so that every kind finds something to say."""
    rng = random.Random(seed)
    return [rng.randrange(8) for _ in range(length)]


def row(
    seed: int, domain: str = "math", tokens: list[int] | None = None, store: bool = True, prompt: int = 10
) -> DraftRow:
    tokens = text(seed) if tokens is None else tokens
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(300, head_rig.SHAPE.feature_width, generator=generator)
    return DraftRow(f"r{seed}", domain, list(tokens), prompt, features=features, store=store)


def taught(source: Source) -> Source:
    for seed in range(20, 30):
        source.finish(row(seed, DOMAINS[seed % 3]))
    return source


def same_state(one: Source, two: dict[str, dict[str, torch.Tensor]]) -> bool:
    now = one.state()
    return now.keys() == two.keys() and all(
        now[d].keys() == two[d].keys() and all(torch.equal(now[d][n], two[d][n]) for n in now[d]) for d in now
    )


def test_every_registered_kind_is_under_these_laws() -> None:
    assert sorted(MAKERS) == kinds.names()


def test_the_laws_are_not_vacuous(made: Source) -> None:
    assert sum(len(p) > 0 for p in taught(made).propose([row(n) for n in range(8)], [4] * 8)) >= 6


def test_inputs_are_not_changed(made: Source) -> None:
    rows, limits = [row(n) for n in range(4)], [4, 0, 1, 4]
    before = copy.deepcopy(rows)
    taught(made).propose(rows, limits)
    made.observe(rows[0], [1])
    made.finish(rows[0])
    assert limits == [4, 0, 1, 4]
    for now, then in zip(rows, before, strict=True):
        assert (now.request_id, now.domain, now.tokens, now.prompt_length, now.store) == (
            then.request_id,
            then.domain,
            then.tokens,
            then.prompt_length,
            then.store,
        )
        assert now.features is not None
        assert then.features is not None
        assert torch.equal(now.features, then.features)


def test_per_request_state_lives_under_the_sources_own_name(made: Source) -> None:
    item = row(1)
    taught(made).propose([item], [4])
    assert set(item.scratch) <= {made.name}


def test_limits_are_respected_and_silent_rows_get_empty(made: Source) -> None:
    rows = [row(n, DOMAINS[n % 3]) for n in range(9)]
    limits = [0, 1, 2, 3, 4, 5, 6, 0, 8]
    proposals = taught(made).propose(rows, limits)
    assert len(proposals) == len(rows)
    assert proposals[0] is EMPTY
    assert proposals[7] is EMPTY
    for proposal, limit in zip(proposals, limits, strict=True):
        assert len(proposal) <= limit


def test_no_rows_give_no_proposals(made: Source) -> None:
    assert made.propose([], []) == []


def test_proposals_pass_their_check_and_name_their_source(made: Source) -> None:
    for proposal in taught(made).propose([row(n) for n in range(12)], [6] * 12):
        proposal.check()
        assert set(proposal.sources) <= {made.name}
        assert all(0.0 <= c <= 1.0 for c in proposal.confidence)
        assert all(type(t) is int and 0 <= t < VOCAB for t in proposal.tokens)


def test_the_same_state_gives_the_same_proposal(made: Source) -> None:
    taught(made)
    first = made.propose([row(1)], [5])[0]
    assert made.propose([row(1)], [5])[0].tokens == first.tokens
    again = row(1)
    made.propose([again], [5])
    assert made.propose([again], [5])[0].tokens == first.tokens


def test_a12_a_row_gets_the_same_alone_and_in_any_company(made: Source) -> None:
    taught(made)
    rows = [row(n, DOMAINS[n % 3]) for n in range(6)]
    together = made.propose(rows, [4] * 6)
    for index in (5, 0, 3):
        alone = made.propose([row(index, DOMAINS[index % 3])], [4])[0]
        assert alone.tokens == together[index].tokens


def test_step_by_step_equals_all_at_once(made: Source) -> None:
    taught(made)
    tokens = text(3, 60)
    item = row(3, tokens=tokens[:12])
    at = 12
    for count in (1, 3, 1, 5, 8, 2, 7):
        made.propose([item], [4])
        item.tokens += tokens[at : at + count]
        made.observe(item, tokens[at : at + count])
        at += count
    assert made.propose([item], [4])[0].tokens == made.propose([row(3, tokens=tokens[:at])], [4])[0].tokens


def test_state_round_trips(made: Source) -> None:
    taught(made)
    saved = {d: {n: t.clone() for n, t in ts.items()} for d, ts in made.state().items()}
    other = MAKERS[made.name]()
    other.load_state(saved)
    assert same_state(other, saved)
    rows, copies = [row(n, DOMAINS[n % 3]) for n in range(6)], [row(n, DOMAINS[n % 3]) for n in range(6)]
    if made.state():
        assert [p.tokens for p in made.propose(rows, [4] * 6)] == [
            p.tokens for p in other.propose(copies, [4] * 6)
        ]


def test_an_unseen_domain_is_safe(made: Source) -> None:
    taught(made)
    stranger = row(1, "never-added")
    made.propose([stranger], [4])[0].check()
    made.observe(stranger, [1])
    made.finish(stranger)
    made.drop_domain("never-added")
    assert isinstance(made.describe("never-added"), dict)
    assert "never-added" not in made.state()


def test_domains_come_and_go_while_requests_run(made: Source) -> None:
    taught(made)
    item = row(1, "math")
    made.propose([item], [4])
    made.add_domain("newborn", "math")
    made.drop_domain("math")
    for domain in ("math", "newborn"):
        item.domain = domain
        made.propose([item], [4])[0].check()
    made.finish(item)
    assert "math" not in made.state()


def test_store_false_teaches_nothing(made: Source) -> None:
    taught(made)
    before = {d: {n: t.clone() for n, t in ts.items()} for d, ts in made.state().items()}
    probe = made.propose([row(2)], [6])[0]
    for _ in range(3):
        made.finish(row(1, store=False))
    assert same_state(made, before)
    assert made.propose([row(2)], [6])[0].tokens == probe.tokens


def test_a26_nothing_of_one_request_reaches_another_from_per_request_state(made: Source) -> None:
    """A request full of marker tokens runs, and is not stored; another never sees a proposal change."""
    taught(made)
    probe: list[Proposal] = made.propose([row(5), row(6)], [6, 6])
    marker = row(7, tokens=text(5)[:20] + [45, 46, 47] * 10)
    again = [row(5), row(6)]
    for _ in range(4):
        made.propose([again[0], marker, again[1]], [6, 6, 6])
        marker.tokens += [45, 46, 47]
        made.observe(marker, [45, 46, 47])
    assert [p.tokens for p in made.propose(again, [6, 6])] == [p.tokens for p in probe]
    assert [p.tokens for p in made.propose([row(5), row(6)], [6, 6])] == [p.tokens for p in probe]


def test_a06_a_one_token_request_is_safe(made: Source) -> None:
    for length in (1, 2):
        taught(made).propose([row(1, tokens=text(1)[:length], prompt=length)], [4])[0].check()
