"""Models that domains brought, within a bound: who waits, who stands in, and what a row then holds."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from drafts.draft_model import DraftModel
from drafts.errors import InvalidValueError
from drafts.kinds.model import ModelSource
from drafts.residency import Residents
from tests.drafts.test_model import VOCAB, greedy, row, tiny


class Later:
    """Fetches when told to, as a thread would some time later."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Callable[[], list[Any]], Future[list[Any]]]] = []

    def __call__(self, work: Callable[[], list[Any]]) -> Future[list[Any]]:
        self.waiting.append((work, Future()))
        return self.waiting[-1][1]

    def arrive(self) -> None:
        for work, future in self.waiting:
            try:
                future.set_result(work())
            except OSError as error:
                future.set_exception(error)
        self.waiting.clear()


def draft(seed: int) -> DraftModel:
    weights = list(tiny(seed).parameters())
    return DraftModel(tiny(seed), VOCAB, rank=2, label=f"m{seed}", reread=lambda: [p.data for p in weights])


def bounded(models: int) -> tuple[ModelSource, Later]:
    """Domains a, b and c with models of their own, ``models`` of which fit beside the base domain's."""
    size = draft(0).nbytes
    source, later = ModelSource(draft(0), (models + 1) * size), Later()
    source.residents._start = later
    source.add_domain("base")
    for seed, domain in enumerate("abc", 1):
        source.attach(domain, draft(seed))
        source.add_domain(domain, "base")
    return source, later


def resident(source: ModelSource) -> str:
    return "".join(domain for domain in "abc" if source.of(domain).resident)


def gone() -> list[torch.Tensor]:
    raise OSError("no such file")


def test_the_least_recently_used_waits_and_the_base_draft_stands_in_until_it_is_back() -> None:
    source, later = bounded(2)
    assert resident(source) == "bc"
    item = row([1, 2, 3], domain="a")
    assert source.propose([item], [3])[0].tokens == greedy(tiny(0), item.tokens, 3)
    assert resident(source) == "c"
    item.tokens += [4, 5]
    assert source.propose([item], [3])[0].tokens == greedy(tiny(0), item.tokens, 3)
    assert len(later.waiting) == 1
    later.arrive()
    item.tokens += [6]
    assert source.propose([item], [3])[0].tokens == greedy(tiny(1), item.tokens, 3)
    assert resident(source) == "ac"
    assert source.residents.nbytes == source.residents.max_bytes


def test_one_batch_runs_all_models_that_are_here_and_sends_none_of_them_away() -> None:
    source, later = bounded(2)
    batch = [row([1, 2, 3 + i], domain=domain) for i, domain in enumerate(("a", "b", "c", "base", "b"))]
    for _ in range(3):
        proposals = source.propose(batch, [3] * 5)
        for item, proposal, seed in zip(batch, proposals, (0, 2, 3, 0, 2), strict=True):
            assert proposal.tokens == greedy(tiny(seed), item.tokens, 3)
            item.tokens += proposal.tokens[:2]
    assert resident(source) == "bc"
    assert not later.waiting
    source.propose(batch[:1], [3])
    assert len(later.waiting) == 1


def test_weights_that_cannot_be_read_leave_the_base_draft_serving_and_are_asked_for_again() -> None:
    source, later = bounded(1)
    source.of("a")._reread = gone
    item = row([1, 2, 3], domain="a")
    for _ in range(3):
        assert source.propose([item], [3])[0].tokens == greedy(tiny(0), item.tokens, 3)
        later.arrive()
    assert not source.of("a").resident


def test_without_files_to_read_again_the_weights_wait_as_they_are() -> None:
    model = DraftModel(tiny(1), VOCAB)
    before = [p.data.clone() for p in model.model.parameters()]
    model.release()
    assert sum(p.numel() for p in model.model.parameters()) == 0
    model.take(model.fetch())
    assert all(torch.equal(p.data, old) for p, old in zip(model.model.parameters(), before, strict=True))


def test_a_model_that_can_never_be_resident_is_refused() -> None:
    size = draft(0).nbytes
    with pytest.raises(InvalidValueError, match="max_resident_bytes"):
        ModelSource(draft(0), 2 * size - 1).attach("a", draft(1))
    with pytest.raises(InvalidValueError, match=r"drafts\.model\.path"):
        Residents(size - 1, size)


def test_a_dropped_domain_makes_room() -> None:
    source, later = bounded(1)
    source.drop_domain("c")
    source.propose([row([1, 2], domain="a")], [2])
    later.arrive()
    source.propose([row([1, 2], domain="a")], [2])
    assert source.of("a").resident


def test_after_a_failure_the_next_try_waits_twice_as_long_and_success_ends_that() -> None:
    source, later = bounded(1)
    now = [0.0]
    source.residents._clock = lambda: now[0]
    good, item = source.of("a")._reread, row([1, 2, 3], domain="a")

    def tried_at(seconds: float) -> bool:
        """Whether the weights are sent for at the time; what they meet is known at the next step."""
        now[0] = seconds
        source.propose([item], [3])
        asked = bool(later.waiting)
        later.arrive()
        source.propose([item], [3])
        return asked

    source.of("a")._reread = gone
    assert [t for t in (0.0, 0.9, 1.0, 2.9, 3.0, 6.9, 7.0) if tried_at(t)] == [0.0, 1.0, 3.0, 7.0]
    source.of("a")._reread = good
    assert not tried_at(14.9)
    assert tried_at(15.0)
    assert source.of("a").resident
    assert source.propose([item], [3])[0].tokens == greedy(tiny(1), item.tokens, 3)
    source.of("a").release()
    source.of("a")._reread = gone
    assert [t for t in (20.0, 20.9, 21.0) if tried_at(t)] == [20.0, 21.0]


def test_weights_that_cannot_be_used_cost_no_other_row_its_proposal() -> None:
    source, later = bounded(1)
    good = source.of("a")._reread
    source.of("a")._reread = lambda: good()[:-1]
    batch = [row([1, 2, 3], domain="a"), row([4, 5, 6], domain="base")]
    source.propose(batch[:1], [3])
    later.arrive()
    for item, proposal in zip(batch, source.propose(batch, [3, 3]), strict=True):
        assert proposal.tokens == greedy(tiny(0), item.tokens, 3)
    source.propose(batch, [3, 3])
    assert not later.waiting
    assert not source.of("a").resident
    assert all(parameter.numel() == 0 for parameter in source.of("a")._weights)
