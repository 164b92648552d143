"""Case A23: over a long answer the state of a draft is what reading the committed text from scratch gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from drafts.adapters import FINGERPRINT
from drafts.draft_model import DraftModel
from drafts.head_cache import HeadCache
from drafts.kinds.base import DraftRow, NeuralSource
from drafts.kinds.eagle import EagleSource
from drafts.kinds.model import ModelSource
from drafts.proposal import ROOT, Proposal
from osd.serve.target import PassRow
from tests.osd.draft_rig import eagle
from tests.osd.engine_rig import Client, greedy, make_engine, target
from tests.tiny import VOCAB, tiny_model

LENGTH = 300
PROMPT = [5, 9, 40, 77, 31]

Continue = Callable[[Proposal, int], list[int]]
"""What is committed after a proposal in a step."""


def best(proposal: Proposal, count: int) -> list[int]:
    """The first ``count`` tokens of the path of first siblings, and one that nobody proposed."""
    path, at = [], ROOT
    while len(path) < count:
        below = [node for node, parent in enumerate(proposal.parents) if parent == at]
        if not below:
            break
        at = below[0]
        path.append(proposal.tokens[at])
    return [*path, other(proposal.tokens)]


def branch(proposal: Proposal, step: int) -> list[int]:
    """A later sibling at a depth that changes, with the best tokens before it."""
    path, at = [], ROOT
    for depth in range(1 + step % 3):
        below = [node for node, parent in enumerate(proposal.parents) if parent == at]
        if not below:
            break
        at = below[-1 if depth == step % 3 else 0]
        path.append(proposal.tokens[at])
    return [*path, other(proposal.tokens)]


def other(tokens: Sequence[int]) -> int:
    return next(token for token in range(3, VOCAB) if token not in tokens)


ACCEPTANCE: dict[str, Continue] = {
    "all": lambda proposal, step: best(proposal, 4),
    "none": lambda proposal, step: best(proposal, 0),
    "partial": lambda proposal, step: best(proposal, (0, 3, 1, 2, 4)[step % 5]),
    "another branch": branch,
}


def adapted_model() -> ModelSource:
    source = ModelSource(DraftModel(tiny_model(seed=1), VOCAB, rank=2))
    for domain in ("base", "math"):
        source.add_domain(domain)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: t if name == FINGERPRINT else 0.1 * torch.randn(t.shape, generator=generator)
        for name, t in source.tensors("math").items()
    }
    source.load("math", tensors)
    return source


class Target:
    """Features of a text as an engine keeps them: entries behind the text are of what was refused."""

    def __init__(self) -> None:
        self.model = target()
        self.cache = self.model.make_cache(1, 512, keep_features=True)
        self.cache.acquire()
        self.read = 0

    def follow(self, row: DraftRow) -> None:
        tokens = row.tokens[self.read : -1]
        self.model.forward(self.cache, [PassRow(0, self.read, [*tokens, 3, 4])])
        self.cache.commit(0, len(row.tokens) - 1)
        self.read += len(tokens)
        assert self.cache.features is not None
        row.features = self.cache.features[0]


def state_of(row: DraftRow, name: str) -> dict[str, torch.Tensor]:
    """Positions, keys and values of what is committed."""
    state = row.scratch[name]
    if isinstance(state, HeadCache):
        assert state.next_pair == len(row.tokens) - 1
        size = state.length
        return {"keys": state.keys[:, :size], "values": state.values[:, :size]}
    size = len(row.tokens)
    assert state.held[:size] == row.tokens
    found: dict[str, torch.Tensor] = {}
    for index, (keys, values) in enumerate(state.layers):
        found[f"keys {index}"], found[f"values {index}"] = keys[:, :, :size], values[:, :, :size]
    return found


@pytest.mark.parametrize("accepted", list(ACCEPTANCE))
@pytest.mark.parametrize("make", [eagle, adapted_model], ids=["eagle", "model"])
def test_a23_at_every_step_of_a_long_answer_the_state_is_one_from_scratch(
    make: Callable[[], NeuralSource], accepted: str
) -> None:
    source, seen = make(), Target()
    if isinstance(source, EagleSource):
        source.add_domain("math")
    row = DraftRow("r", "math", list(PROMPT), len(PROMPT))
    step = 0
    while row.output_length < LENGTH:
        seen.follow(row)
        proposal = source.propose_priced([row], [4], [0.0], width=2)[0]
        fresh = DraftRow("f", "math", list(row.tokens), len(PROMPT))
        if source.needs_features:
            whole = Target()
            whole.follow(fresh)
            assert row.features is not None
            assert fresh.features is not None
            end = len(row.tokens) - 1
            torch.testing.assert_close(row.features[:end], fresh.features[:end], atol=1e-4, rtol=1e-4)
        again = source.propose_priced([fresh], [4], [0.0], width=2)[0]
        mine, theirs = state_of(row, source.name), state_of(fresh, source.name)
        assert mine.keys() == theirs.keys()
        for name, tensor in mine.items():
            torch.testing.assert_close(tensor, theirs[name], atol=1e-4, rtol=1e-4, msg=name)
        assert proposal.confidence == pytest.approx(again.confidence, abs=1e-4)
        row.tokens += ACCEPTANCE[accepted](proposal, step)
        step += 1


def test_a23_a_copy_of_the_target_is_accepted_whole_up_to_the_end_of_a_long_answer() -> None:
    copy = ModelSource(DraftModel(tiny_model(), VOCAB, rank=2))
    copy.add_domain("base")
    client = Client(make_engine(copy, max_length=400))
    client.submit("a", PROMPT, max_tokens=LENGTH, ignore_eos=True)
    assert list(client.run()["a"]) == greedy(PROMPT, LENGTH, stop=())
    emitted = 0
    late: list[tuple[int, int]] = []
    for item in client.outcomes["a"].record.rounds:
        if emitted >= 200:
            late.append((item.accepted, item.tested))
        emitted += item.emitted
    assert emitted == LENGTH
    accepted, tested = sum(a for a, _ in late), sum(t for _, t in late)
    assert accepted > 70
    assert accepted == tested
