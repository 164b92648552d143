"""Rows of one batch do not mix: whoever is beside, however long, whatever is proposed to whom (A12, A25)."""

import random

import pytest
import torch

from drafts.kinds.lookup import LookupSource
from drafts.mixture import Mixture
from drafts.proposal import EMPTY, Proposal
from osd.serve.layout import PassLayout
from osd.serve.load import build_target
from tests.osd.engine_rig import Branching, Client, Forced, greedy, make_engine, prompts, target
from tests.osd.passes import path_to, plain_logits
from tests.tiny import VOCAB, tiny_model

DEPTHS = {"base": 0, "math": 1, "code": 4, "tree": 4}
"""How deep is proposed, by domain; ``tree`` also branches."""


class ByDomain(Branching):
    """Scripted drafts of a depth by domain, a tree in one of them."""

    def guesses(self, row, path):
        if len(path) >= DEPTHS[row.domain]:
            return []
        return Branching.guesses(self, row, path) if row.domain == "tree" else Forced.guesses(self, row, path)


def test_a12_32_requests_of_mixed_kinds_each_equal_themselves_alone():
    """A12: half copyable, half random; staggered; leaving at different steps; depth by domain."""
    rng = random.Random(1)
    asked = []
    for index, prompt in enumerate(prompts(32, seed=60, lengths=(6, 11, 17, 25))):
        sampling = {"max_tokens": rng.randint(2, 24), "ignore_eos": index % 3 > 0}
        if index % 4 == 3:
            sampling |= {"temperature": 0.8, "seed": index}
        asked.append((prompt * 3 if index % 2 else prompt, list(DEPTHS)[index // 2 % 4], sampling))
    plain = Client(make_engine(slots=1))
    for index, (prompt, domain, sampling) in enumerate(asked):
        plain.submit(str(index), prompt, domain, **sampling)
    alone = plain.run()

    def script(row, limit):
        right = alone[row.request_id][row.output_length :][:4]
        return [token if rng.random() < 0.8 else rng.randrange(VOCAB) for token in right]

    drafter = Mixture({"forced": ByDomain(script), "lookup": LookupSource()})
    engine = make_engine(drafter=drafter, slots=32, prefill_chunk=40, fixed_k=None)
    client = Client(engine)
    for index, (prompt, domain, sampling) in enumerate(asked):
        client.submit(str(index), prompt, domain, **sampling)
        if rng.random() < 0.3:
            engine.step()
            engine.check()
    assert client.run() == alone
    rounds = [item for outcome in client.outcomes.values() for item in outcome.record.rounds]
    assert sum(item.accepted for item in rounds) > 20
    assert sum(item.proposed > item.accepted for item in rounds) > 10


NODES = (0, 1, 5, 12)
"""Sizes of the trees that the rows of a batch are proposed, by turns."""


class Shaped:
    """A drafter of trees of set sizes: a right chain of up to three tokens and wrong ones anywhere."""

    needs_features = False

    def __init__(self, truth):
        self.truth = truth
        self.rng = random.Random(2)
        self.sizes = set()

    def __getattr__(self, name):
        return lambda *_: 0 if name == "version" else []

    def propose(self, rows, limits, price):
        return [self._tree(at, row, limit) for at, (row, limit) in enumerate(zip(rows, limits, strict=True))]

    def _tree(self, at, row, limit):
        size = NODES[(at + row.output_length) % 4]
        right = self.truth[row.request_id][row.output_length :][: min(3, size, limit)]
        if not right:
            return EMPTY
        tokens, parents, depths = list(right), list(range(-1, len(right) - 1)), list(range(1, len(right) + 1))
        while len(tokens) < size:
            parent = self.rng.choice([-1, *(node for node, depth in enumerate(depths) if depth < limit)])
            tokens.append(self.rng.randrange(VOCAB))
            parents.append(parent)
            depths.append(1 if parent < 0 else depths[parent] + 1)
        self.sizes.add(size)
        return Proposal(tuple(tokens), tuple(parents), ("shaped",) * size, (0.5,) * size)


class Watched:
    """The tiny target; every pass's position ids and logits are compared with each row alone."""

    def __init__(self):
        self.engine = None
        self.worst = 0.0
        self.mixed = 0

    def __getattr__(self, name):
        return getattr(target(), name)

    def forward(self, cache, rows):
        output = target().forward(cache, rows)
        positions = PassLayout(cache, rows, target().device).positions.tolist()
        texts = {row.slot: row.draft.tokens for row in self.engine.rows}
        self.mixed += len({row.logits_from for row in rows}) > 1 and len(rows) > 2
        at = 0
        for row, offset in zip(rows, output.offsets, strict=True):
            before = texts[row.slot][: row.start]
            for node in range(len(row.tokens)):
                path = path_to(row.parents, node) if row.parents else list(range(node + 1))
                assert positions[at + node] == row.start + len(path) - 1
                if node >= row.logits_from:
                    text = [*before, *(row.tokens[step] for step in path)]
                    alone = plain_logits(target().reference, text)[-1]
                    found = output.logits[offset + node - row.logits_from]
                    self.worst = max(self.worst, float((found - alone).abs().max() / alone.abs().max()))
            at += len(row.tokens)
        return output


@pytest.mark.parametrize("joining", ["together", "one by one"])
def test_a25_rows_of_1_to_500_tokens_with_trees_of_different_shapes_equal_themselves_alone(joining):
    """A25: logits within 1e-4 of each row alone, position ids per row, a row joining in chunked prefill."""
    asked = prompts(5, seed=61, lengths=(1, 2, 17, 200, 500))
    plain = Client(make_engine(slots=1, max_length=600, prefill_chunk=600))
    for index, prompt in enumerate(asked):
        plain.submit(str(index), prompt, max_tokens=14, ignore_eos=True)
    truth = plain.run()
    watched, drafter = Watched(), Shaped(truth)
    engine = make_engine(
        drafter=drafter, target=watched, slots=5, max_length=600, prefill_chunk=150, fixed_k=None
    )
    watched.engine = engine
    client = Client(engine)
    with torch.inference_mode():
        for index, prompt in enumerate(asked):
            client.submit(str(index), prompt, max_tokens=14, ignore_eos=True)
            if joining == "one by one":
                engine.step()
                engine.check()
        assert client.run() == truth
    assert watched.worst < 1e-4
    assert watched.mixed > 2, "prefill and decoding share passes"
    assert drafter.sizes >= {1, 5, 12}


def test_a_pass_never_holds_more_tokens_than_the_target_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    bounded, widths = build_target(tiny_model(), name="bounded"), []
    forward = bounded.forward

    def counted(cache, rows):
        widths.append(sum(len(row.tokens) for row in rows))
        return forward(cache, rows)

    monkeypatch.setattr(bounded, "forward", counted)
    bounded.most_tokens = 12
    texts = prompts(4, seed=3, lengths=(15,))
    truth = {tuple(text): greedy(text, 50, stop=()) for text in texts}
    source = Forced(lambda row, limit: truth[tuple(row.tokens[:15])][row.output_length :][:limit])
    client = Client(make_engine(source, target=bounded, prefill_chunk=600))
    for index, text in enumerate(texts):
        client.submit(str(index), text, max_tokens=50, ignore_eos=True)
    client.run()
    assert max(widths) == 12
    for index, text in enumerate(texts):
        assert client.outcomes[str(index)].record.output_ids == tuple(truth[tuple(text)])
