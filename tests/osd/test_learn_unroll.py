from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from drafts.kinds.base import DraftRow
from osd.learn.goals import top_goals
from osd.learn.losses import SparseTarget, draft_index
from osd.learn.pretrain import batch_loss, train
from osd.learn.pretrain_config import PretrainConfig
from osd.learn.pretrain_data import Answer, batches, rank_vocabulary, split
from osd.learn.simulate import mean_accepted_length, right_flags, simulate
from osd.learn.unroll import unroll
from tests.drafts.head_rig import IDS, SHAPE, matrices, random_expert, source, tiny_trunk
from tests.osd.pretrain_rig import answer, lent


def test_the_unroll_equals_what_the_source_proposes() -> None:
    eagle = source()
    embedding, _ = matrices()
    item = answer(3, prompt=9, output=3)
    tokens: list[int] = item.tokens[:10].tolist()
    features = torch.cat((item.features[:9].float(), torch.randn(3, SHAPE.feature_width)))
    row = DraftRow("r", "base", tokens, 9, features=features)
    chain = eagle.propose([row], [3])[0]

    @dataclass
    class Text:
        tokens: torch.Tensor
        prompt_length: int
        features: torch.Tensor
        output_length: int

    text = Text(torch.tensor([*tokens, *chain.tokens]), 9, features[:12], 4)
    result = unroll(eagle.trunk, embedding, [text], 3)
    for step in range(3):
        logits = eagle.bank.logits(eagle.output, result.hidden[step][1:2], [0])
        assert int(IDS[logits.argmax()]) == chain.tokens[step]
        assert float(logits.softmax(-1).max()) == pytest.approx(chain.confidence[step], abs=1e-4)


def test_a28_gradient_reaches_exactly_the_positions_whose_label_is_an_answer_token() -> None:
    trunk = tiny_trunk()
    embedding, output = matrices()
    item = answer(1, prompt=5, output=4)
    features = item.features.float().requires_grad_(True)
    probe = Answer(item.label, item.source, item.tokens, 5, features, item.top_ids, item.top_logprobs)
    result = unroll(trunk, embedding, [probe], 1)
    assert result.positions.tolist() == [0, 1, 2, 3]
    own = torch.autograd.grad(result.hidden[0][0].sum(), features)[0].abs().sum(-1)
    assert own[3] > 0
    assert not own[4:].any()
    goal = top_goals(draft_index(IDS, 50))([probe])
    whole = batch_loss(trunk, embedding, output[IDS], goal, [probe], PretrainConfig(unroll=1))
    reached = torch.autograd.grad(whole, features)[0].abs().sum(-1) > 0
    assert reached.tolist() == [True] * 7 + [False]


def test_a28_each_label_is_the_distribution_for_the_prefix_the_head_saw() -> None:
    trunk = tiny_trunk()
    embedding, output = matrices()
    items = [answer(1, output=4), answer(2, output=6)]
    evidence = [SparseTarget.from_evidence(a.top_ids, a.top_logprobs, draft_index(IDS, 50)) for a in items]
    from osd.learn.losses import forward_kl

    expected = torch.zeros(())
    for step in range(3):
        losses = []
        for item, goal in zip(items, evidence, strict=True):
            hidden = unroll(trunk, embedding, [item], 3).hidden[step]
            logits = trunk.norm(hidden, "final_norm") @ output[IDS].T + trunk.tensors["output_bias"]
            count = item.output_length - step
            losses.append(forward_kl(logits[:count], goal.rows(torch.arange(step, item.output_length))))
        expected = expected + 0.8**step * torch.cat(losses).mean()
    goal = top_goals(draft_index(IDS, 50))(items)
    got = batch_loss(trunk, embedding, output[IDS], goal, items, PretrainConfig(deeper_share=1.0))
    torch.testing.assert_close(got, expected)


def test_a_batch_of_unequal_answers_equals_each_alone() -> None:
    trunk = tiny_trunk()
    embedding, _ = matrices()
    items = [answer(1, 4, 9), answer(2, 12, 3), answer(3, 2, 1)]
    together = unroll(trunk, embedding, items, 3)
    for row, item in enumerate(items):
        alone = unroll(trunk, embedding, [item], 3)
        for one, two in zip(together.hidden, alone.hidden, strict=True):
            torch.testing.assert_close(one[together.rows == row], two, atol=1e-5, rtol=1e-4)


def test_a_head_overfits_and_the_source_then_proposes_the_answers() -> None:
    """The engine-side measure of case A28: acceptance by the source, not the training loss."""
    eagle = source()
    items = [answer(n, prompt=4, output=12) for n in range(20)]
    config = PretrainConfig(epochs=80, batch=10, rate=1e-2, final_rate=1e-3, warmup=5, deeper_share=1.0)
    train(eagle.trunk, lent(), items, items, config)
    eagle.trunk.product = torch.nn.functional.linear
    right = tested = 0
    for item in items:
        tokens: list[int] = item.tokens.tolist()
        for end in range(5, 14):
            row = DraftRow("r", "base", tokens[:end], 4, features=item.features)
            chain = eagle.propose([row], [3])[0].tokens
            right += sum(a == b for a, b in zip(chain, tokens[end : end + 3], strict=False))
            tested += len(tokens[end : end + 3])
    assert right / tested >= 0.98


def test_experts_change_the_simulation() -> None:
    eagle = source()
    embedding, _ = matrices()
    random_expert(eagle.bank, "math", 1)
    items = [answer(n) for n in range(6)]
    plain = right_flags(eagle.trunk, embedding, eagle.output, items, 2)
    skilled = right_flags(eagle.trunk, embedding, eagle.output, items, 2, eagle.bank.view(1))
    assert any(not torch.equal(a, b) for a, b in zip(plain, skilled, strict=True))
    assert set(simulate(eagle.trunk, embedding, eagle.output, items)) == {"all", "even", "odd"}


def test_mean_accepted_length_walks_as_a_greedy_engine_does() -> None:
    right = torch.tensor([[0, 1, 1, 0, 1, 1], [0, 1, 0, 1, 1, 0]], dtype=torch.bool)
    assert mean_accepted_length([right], 2) == pytest.approx(5 / 2)
    assert mean_accepted_length([right], 1) == pytest.approx(5 / 3)
    assert mean_accepted_length([torch.zeros(2, 6, dtype=torch.bool)], 2) == 1.0


def test_split_holds_back_some_of_every_label_and_batches_cover_an_epoch() -> None:
    items = [answer(n, output=3 + n % 5) for n in range(40)]
    train_part, held = split(items, 0.1, seed=1)
    assert {a.label for a in held} == {"even", "odd"}
    assert len(train_part) + len(held) == 40
    assert not {id(a) for a in train_part} & {id(a) for a in held}
    seen = [id(a) for batch in batches(train_part, 7, seed=2) for a in batch]
    assert sorted(seen) == sorted(id(a) for a in train_part)


def test_vocabulary_prefers_what_the_target_says_and_always_holds_the_end_token() -> None:
    items = [answer(n) for n in range(10)]
    said = {int(t) for a in items for t in a.tokens[a.prompt_length :]}
    ids = rank_vocabulary(items, 50, always=[48])[: len(said) + 4].sort().values
    assert said | {48, 0, 2, 4} == set(ids.tolist())
    assert ids.tolist() == sorted(ids.tolist())
