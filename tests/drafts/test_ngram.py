from __future__ import annotations

import random
import tracemalloc

import pytest
import torch

from drafts.config import NgramConfig
from drafts.errors import CheckpointError
from drafts.kinds.base import DraftRow
from drafts.kinds.ngram import NgramSource
from drafts.memory import Memory
from drafts.proposal import EMPTY, Proposal


def source(**config: object) -> NgramSource:
    made = NgramSource(NgramConfig.model_validate({"own_weight": 0.0, **config}))
    for domain in ("math", "code"):
        made.add_domain(domain)
    return made


def ask(made: NgramSource, tokens: list[int], domain: str = "math", limit: int = 4) -> Proposal:
    return made.propose([DraftRow("r", domain, list(tokens), 1)], [limit])[0]


def memory(**options: int) -> Memory:
    settings = {"max_order": 4, "max_bytes": 2**20, "max_followers": 8, "half_life_tokens": 1000}
    return Memory(**{**settings, **options})


def test_what_was_answered_before_is_proposed() -> None:
    made = source()
    made.teach("math", [1, 2, 10, 11, 12, 13], 2)
    assert ask(made, [2, 10]).tokens == (11, 12, 13)


def test_only_the_answer_is_learned_and_the_prompt_gives_context() -> None:
    made = source()
    made.teach("math", [1, 2, 3, 10], 3)
    assert ask(made, [1]) is EMPTY
    assert ask(made, [2, 3]).tokens == (10,)


def test_the_longer_context_decides() -> None:
    made = source()
    for _ in range(5):
        made.teach("math", [1, 7, 20], 2)
    made.teach("math", [2, 7, 30], 2)
    assert ask(made, [7], limit=1).tokens == (20,)
    assert ask(made, [2, 7], limit=1).tokens == (30,)


def test_an_unknown_context_backs_off_to_its_known_end() -> None:
    made = source()
    made.teach("math", [1, 7, 20], 2)
    assert ask(made, [99, 7], limit=1).tokens == (20,)


def test_confidence_is_a_probability_that_grows_with_evidence() -> None:
    made, seen = source(), []
    for _ in range(6):
        made.teach("math", [1, 20], 1)
        seen.append(ask(made, [1], limit=1).confidence[0])
    assert seen == sorted(set(seen))
    assert 0 < seen[0] <= seen[-1] < 1


def test_confidence_is_roughly_the_frequency_of_being_right() -> None:
    """1000 draws at p = 0.7; the band of 0.1 is 6.9 standard deviations: false alarm below 1e-11."""
    rng, made = random.Random(3), source()
    for _ in range(1000):
        made.teach("math", [1, 20 if rng.random() < 0.7 else 30], 1)
    assert ask(made, [1], limit=1).confidence[0] == pytest.approx(0.7, abs=0.1)


def test_a_chain_ends_before_confidence_falls_below_the_floor() -> None:
    made = source(floor=0.3)
    made.teach("math", [1, 2], 1)
    for token in range(100, 120):
        made.teach("math", [2, token], 1)
    assert ask(made, [1]).tokens == (2,)


def test_domains_do_not_see_each_others_memories() -> None:
    made = source()
    made.teach("math", [1, 20, 21], 1)
    assert ask(made, [1], "code") is EMPTY


def test_a_young_domain_leans_on_the_base_memory_and_outgrows_it() -> None:
    made = source(base_until_tokens=3)
    made.teach("base", [1, 20], 1)
    assert ask(made, [1], limit=1).tokens == (20,)
    made.teach("math", [5, 6, 7, 8], 1)
    assert ask(made, [1]) is EMPTY


def test_own_knowledge_outweighs_the_base_memory() -> None:
    made = source()
    for _ in range(5):
        made.teach("base", [1, 20], 1)
    made.teach("math", [1, 30], 1)
    assert ask(made, [1], limit=1).tokens == (30,)


def test_the_requests_own_text_counts_more_than_one_remembered_answer() -> None:
    made = source(own_weight=5.0)
    made.teach("math", [1, 20], 1)
    assert ask(made, [1, 30, 4, 1], limit=1).tokens == (30,)
    for _ in range(20):
        made.teach("math", [1, 20], 1)
    assert ask(made, [1, 30, 4, 1], limit=1).tokens == (20,)


def test_the_own_text_index_reads_each_token_once() -> None:
    made = source(own_weight=5.0)
    row = DraftRow("r", "math", [1, 2, 3], 3)
    made.propose([row], [2])
    row.tokens += [1, 2]
    assert made.propose([row], [2])[0].tokens[0] == 3
    fresh = DraftRow("r", "math", list(row.tokens), 3)
    made.propose([fresh], [2])
    assert row.scratch["ngram"] == fresh.scratch["ngram"]


def test_a_repetitive_answer_counts_once() -> None:
    made = source()
    made.teach("math", [1, *[5, 9] * 20], 1)
    for _ in range(2):
        made.teach("math", [1, 5, 7], 1)
    assert ask(made, [5], limit=1).tokens == (7,)


def test_requests_that_may_not_be_stored_teach_nothing() -> None:
    made = source()
    made.finish(DraftRow("r", "math", [1, 20, 21], 1, store=False))
    assert ask(made, [1]) is EMPTY
    made.finish(DraftRow("r", "math", [1, 20, 21], 1))
    assert ask(made, [1]).tokens == (20, 21)


def test_a_request_that_outlives_its_domain_teaches_nothing() -> None:
    made = source()
    made.drop_domain("math")
    made.finish(DraftRow("r", "math", [1, 20], 1))
    assert made.describe("math") == {}
    assert "math" not in made.state()


def test_the_base_memory_cannot_be_dropped() -> None:
    made = source()
    made.teach("base", [1, 20], 1)
    made.drop_domain("base")
    assert ask(made, [1], "base").tokens == (20,)


def test_new_observations_outweigh_old_ones_after_a_few_half_lives() -> None:
    made = source(half_life_tokens=100)
    for _ in range(20):
        made.teach("math", [1, 20], 1)
    assert ask(made, [1], limit=1).tokens == (20,)
    made.teach("math", [3, *range(1000, 1600)], 1)
    for _ in range(2):
        made.teach("math", [1, 30], 1)
    assert ask(made, [1], limit=1).tokens == (30,)


def test_a_shared_memory_serves_all_domains() -> None:
    made = source(shared=True)
    made.teach("math", [1, 20], 1)
    assert ask(made, [1], "code").tokens == (20,)
    assert list(made.state()) == ["base"]


def test_score_counts_tokens_per_pass_of_chains_drafted_from_memory_alone() -> None:
    made = source(floor=0.0)
    answer = [1, 2, *range(50, 61)]
    assert made.score("math", answer, 2) == 1.0
    for _ in range(10):
        made.teach("math", answer, 2)
    assert made.score("math", answer, 2) == 10 / 2
    assert made.score("math", answer, 2, depth=1) == 10 / 5
    assert made.score("code", answer, 2) == 1.0
    assert made.score("math", [1, 2, 50], 2) == 1.0


def test_score_of_a_half_right_memory_matches_a_count_by_hand() -> None:
    made = source()
    made.teach("math", [9, 1, 2, 3, 77, 5, 6], 1)
    # 1 | 2 3 (77 wrong, so 4) | 5 (nothing known after 4) | 6 (bonus of an empty last pass is 6 itself)
    assert made.score("math", [9, 1, 2, 3, 4, 5, 6], 1) == pytest.approx(5 / 3)


def test_memory_stays_within_its_bytes_and_its_books_balance() -> None:
    rng, small = random.Random(1), memory(max_bytes=100_000)
    for _ in range(200):
        small.learn([rng.randrange(500) for _ in range(60)], 5)
        assert small.bytes <= 100_000
    assert small.followers == sum(len(f) for f in small.contexts.values())
    assert sorted(small.contexts) == sorted(small._oldest)


def test_the_estimated_bytes_are_close_to_what_is_allocated() -> None:
    rng = random.Random(2)
    answers = [[rng.randrange(2000, 9000) for _ in range(100)] for _ in range(150)]
    tracemalloc.start()
    big = memory(max_bytes=2**30)
    for answer in answers:
        big.learn(answer, 1)
    allocated = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert 0.7 < big.bytes / allocated < 1.4


def test_eviction_takes_the_oldest_first_but_spares_what_is_often_said() -> None:
    rng, small = random.Random(4), memory(max_bytes=60_000, half_life_tokens=10**6)
    often, once = [1, 10, 11, 12], [2, 20, 21, 22]
    small.learn(once, 1)
    for _ in range(5):
        small.learn(often, 1)
    made = source()
    made._memories["math"] = small
    for _ in range(6):
        small.learn([rng.randrange(1000, 9000) for _ in range(40)], 1)
    assert ask(made, [2]) is EMPTY
    assert ask(made, [1]).tokens == (10, 11, 12)


def test_a_context_keeps_its_strongest_followers() -> None:
    small = memory(max_followers=3, half_life_tokens=10**6)
    for token, count in ((10, 3), (11, 2), (12, 1), (13, 1)):
        for _ in range(count):
            small.learn([1, token], 1)
    (followers,) = small.contexts.values()
    assert list(followers) == [10, 11, 13]


def test_weights_stay_finite_over_many_half_lives() -> None:
    small = memory(half_life_tokens=1)
    for _ in range(300):
        small.learn([1, 20, 21, 22, 23, 24, 25, 26, 27], 1)
    state = small.state()
    assert bool(torch.isfinite(state["weights"]).all())
    assert small.unit <= 2.0**80


def test_state_round_trips_exactly_and_learning_goes_on_alike() -> None:
    rng = random.Random(5)
    answers = [[rng.randrange(40) for _ in range(50)] for _ in range(30)]
    one, two = memory(max_bytes=80_000), memory(max_bytes=80_000)
    for answer in answers[:20]:
        one.learn(answer, 3)
    two.load_state({name: tensor.clone() for name, tensor in one.state().items()})
    for answer in answers[20:]:
        one.learn(answer, 3)
        two.learn(answer, 3)
    assert one.contexts == two.contexts
    for name, tensor in one.state().items():
        assert torch.equal(tensor, two.state()[name]), name


def test_a_state_that_does_not_add_up_is_refused_and_changes_nothing() -> None:
    one = memory()
    one.learn([1, 20, 21], 1)
    before = one.state()
    with pytest.raises(CheckpointError, match="weights"):
        one.load_state({name: tensor for name, tensor in before.items() if name != "weights"})
    with pytest.raises(CheckpointError, match="sizes"):
        one.load_state({**before, "sizes": before["sizes"] + 1})
    assert all(torch.equal(tensor, before[name]) for name, tensor in one.state().items())


def test_one_domains_state_is_its_part_of_the_whole() -> None:
    made = source()
    made.teach("math", [1, 20, 21], 1)
    whole = made.state()["math"]
    assert all(torch.equal(tensor, whole[name]) for name, tensor in made.domain_state("math").items())
    assert made.domain_state("math").keys() == whole.keys()
    assert made.domain_state("unknown") == {}


def test_describe_counts_tokens_contexts_and_bytes() -> None:
    made = source()
    made.teach("math", [1, 2, 20, 21], 2)
    assert made.describe("math")["tokens"] == 2
    assert made.describe("math")["contexts"] == 5
    assert int(made.describe("math")["bytes"]) > 0


def test_min_order_keeps_shorter_contexts_from_proposing() -> None:
    made = source(min_order=2)
    made.teach("math", [1, 2, 20], 2)
    assert ask(made, [9, 2]) is EMPTY
    assert ask(made, [1, 2]).tokens == (20,)
