from __future__ import annotations

import dataclasses

import pytest
import torch

from osd.learn.config import BufferConfig, LearnConfig
from osd.learn.distill import Batch, collate, encode, is_right, make_record, pending, score
from osd.learn.head import EagleHead
from osd.learn.learner import ExpertLearner
from osd.learn.losses import SparseTarget, draft_index, forward_kl, total_variation
from osd.learn.record import BufferRecord
from osd.learn.unroll import unroll
from osd.types import FinishedRecord
from tests.drafts.head_rig import IDS, SHAPE
from tests.osd.learn_rig import finished, tiny_head
from tests.osd.test_learn_unroll import answer

TO_DRAFT = draft_index(IDS, 50)


def scored(head: EagleHead, record: FinishedRecord, number: int = 0) -> BufferRecord:
    item = pending(record, BufferConfig())
    assert item is not None
    hidden = encode(head, item)
    made = make_record(item, hidden, torch.zeros(len(hidden), dtype=torch.bool), number, 0)
    assert made is not None
    return made


def all_rows(records: list[BufferRecord]) -> Batch:
    return collate([(r, row) for r in records for row in range(r.size)], TO_DRAFT)


def test_a28_encoding_pairs_every_label_with_the_base_that_predicts_it() -> None:
    head = tiny_head("math")
    record = scored(head, finished(1, prompt=5, output=4))
    whole = unroll(head.trunk, head.embedding, [answer(1, prompt=5, output=4)], 1)
    logits = head.logits(record.hidden, head.served("math"))
    expected = head.bank.logits(head.output, whole.hidden[0], [0])
    torch.testing.assert_close(logits, expected, atol=2e-2, rtol=2e-2)
    assert record.positions.tolist() == [0, 1, 2, 3]
    assert record.emitted.tolist() == list(finished(1, prompt=5, output=4).output_ids)


def test_the_window_keeps_the_last_positions_and_spreads_what_it_keeps() -> None:
    item = pending(finished(1, prompt=30, output=100), BufferConfig(window=64, positions_per_record=10))
    assert item is not None
    assert len(item.features) == 64
    assert item.positions[0] == 37
    assert item.positions.diff().min() >= 6
    head = tiny_head("math")
    assert torch.isfinite(encode(head, item)).all()


def test_a_windowed_encoding_of_a_short_answer_equals_the_whole() -> None:
    head = tiny_head("math")
    record = finished(3, prompt=8, output=6)
    assert record.features is not None
    extended = dataclasses.replace(record, features=record.features)
    one, two = pending(record, BufferConfig(window=13)), pending(extended, BufferConfig(window=500))
    assert one is not None
    assert two is not None
    assert torch.equal(one.positions, two.positions)
    assert torch.equal(encode(head, one), encode(head, two))


@pytest.mark.parametrize("fault", ["features", "evidence", "output", "store"])
def test_a_request_that_teaches_nothing_is_left_out(fault: str) -> None:
    record = finished(1)
    if fault == "store":
        record = dataclasses.replace(record, request=dataclasses.replace(record.request, store=False))
    elif fault == "output":
        record = dataclasses.replace(record, output_ids=())
    else:
        record = dataclasses.replace(record, **{fault: None})
    assert pending(record, BufferConfig()) is None


def test_training_raises_agreement_and_leaves_the_served_expert_alone() -> None:
    head = tiny_head("math")
    served = head.served("math")
    before = {name: tensor.clone() for name, tensor in served.items()}
    records = [scored(head, finished(n)) for n in range(20)]
    learner = ExpertLearner(head, served, LearnConfig(rate=1e-2))
    for _ in range(150):
        assert learner.step(all_rows(records)) is not None
    after = sum(float(score(head, r, learner.candidate(), TO_DRAFT).agreement.mean()) for r in records) / 20
    start = sum(float(score(head, r, served, TO_DRAFT).agreement.mean()) for r in records) / 20
    assert after > start + 0.5
    for name, tensor in served.items():
        assert torch.equal(tensor, before[name])
    head.bank.load("math", learner.candidate())


def spoilt(batch: Batch, value: float) -> Batch:
    hidden = batch.hidden.clone()
    hidden[3, 2] = value
    return Batch(hidden, batch.target, batch.emitted, batch.ends)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a29_a_batch_that_is_not_finite_changes_nothing_and_the_next_good_one_trains(value: float) -> None:
    head = tiny_head("math")
    batch = all_rows([scored(head, finished(n)) for n in range(4)])
    learner = ExpertLearner(head, head.served("math"), LearnConfig())
    for _ in range(3):
        learner.step(batch)
    before, steps = learner.candidate(), learner.optimiser.state_dict()["state"][0]["step"].clone()
    assert learner.step(spoilt(batch, value)) is None
    for name, tensor in learner.candidate().items():
        assert torch.equal(tensor, before[name])
    assert learner.optimiser.state_dict()["state"][0]["step"] == steps
    assert learner.step(batch) is not None
    assert not torch.equal(learner.candidate()["output_b"], before["output_b"])


def test_a29_weights_that_leave_the_finite_are_restored_with_the_optimiser() -> None:
    head = tiny_head("math")
    batch = all_rows([scored(head, finished(n)) for n in range(4)])
    learner = ExpertLearner(head, head.served("math"), LearnConfig())
    learner.step(batch)
    learner.keep()
    good = learner.candidate()
    for group in learner.optimiser.param_groups:
        group["lr"] = float("inf")
    assert learner.step(batch) is None
    for name, tensor in learner.candidate().items():
        assert torch.equal(tensor, good[name])
    assert learner.optimiser.param_groups[0]["lr"] == LearnConfig().rate * LearnConfig().inner_factor
    assert learner.step(batch) is not None


def test_a29_masters_are_float32_and_move_by_small_steps() -> None:
    head = tiny_head("math")
    batch = all_rows([scored(head, finished(n)) for n in range(4)])
    served = {n: t.bfloat16() if t.is_floating_point() else t for n, t in head.served("math").items()}
    learner = ExpertLearner(head, served, LearnConfig(rate=1e-6))
    start = learner.candidate()["gate_up_a"].clone()
    for _ in range(5):
        learner.step(batch)
    moved = learner.candidate()["gate_up_a"]
    assert moved.dtype == torch.float32
    assert not torch.equal(moved, start)
    assert (moved - start).abs().max() < 1e-4


def test_a29_a_batch_without_weight_is_a_no_op() -> None:
    head = tiny_head("math")
    records = [scored(head, finished(n)) for n in range(4)]
    learner = ExpertLearner(head, head.served("math"), LearnConfig(focus="wrong", rate=1e-2))
    batch = all_rows(records)
    for _ in range(300):
        logits = head.logits(batch.hidden, learner.candidate())
        if is_right(logits, batch.emitted, IDS).all():
            break
        learner.step(batch)
    before = learner.candidate()
    assert learner.step(batch) == 0.0
    for name, tensor in learner.candidate().items():
        assert torch.equal(tensor, before[name])


def half_wrong(head) -> tuple[Batch, torch.Tensor]:
    """A batch of which the served expert has every other position wrong, and where."""
    batch = all_rows([scored(head, finished(n)) for n in range(4)])
    logits = head.logits(batch.hidden, head.served("math"))
    emitted = IDS[logits.argmax(-1)].clone()
    emitted[::2] = 1 + (emitted[::2] + 1) % 48
    return Batch(batch.hidden, batch.target, emitted, batch.ends), ~is_right(logits, emitted, IDS)


def test_focus_distils_wrong_positions_alone_with_the_right_ones_polished_or_all() -> None:
    head = tiny_head("math")
    batch, wrong = half_wrong(head)
    logits = head.logits(batch.hidden, head.served("math"))
    kl, tv = forward_kl(logits, batch.target), total_variation(logits, batch.target)
    expected = {
        "wrong": kl[wrong].mean(),
        "weighted": 0.25 * kl[wrong].mean() + 0.75 * tv[~wrong].mean(),
        "all": kl.mean(),
    }
    for focus, loss in expected.items():
        config = LearnConfig(focus=focus, right_share=0.75)  # type: ignore[arg-type]
        learner = ExpertLearner(head, head.served("math"), config)
        assert learner.step(batch) == pytest.approx(float(loss), rel=1e-5)


def test_a_step_cut_into_slices_equals_a_whole_one() -> None:
    head = tiny_head("math")
    batch, _ = half_wrong(head)
    whole, cut = (ExpertLearner(head, head.served("math"), LearnConfig(focus="all")) for _ in range(2))
    whole.step(batch)
    half = len(batch.emitted) // 2
    for rows in (slice(0, half), slice(half, 2 * half)):
        index = torch.arange(len(batch.emitted))[rows]
        part = Batch(batch.hidden[index], batch.target.rows(index), batch.emitted[index], batch.ends[index])
        assert cut.accumulate(part, 0.5) is not None
    assert cut.apply()
    for name, tensor in cut.candidate().items():
        assert torch.allclose(tensor.float(), whole.candidate()[name].float(), atol=1e-6)


def test_a_record_with_features_that_are_not_finite_is_refused() -> None:
    head = tiny_head("math")
    features = torch.randn(24, SHAPE.feature_width).half()
    features[20] = float("nan")
    item = pending(finished(1, features=features), BufferConfig())
    assert item is not None
    assert make_record(item, encode(head, item), torch.zeros(20, dtype=torch.bool), 0, 0) is None


def test_sampled_requests_score_one_minus_total_variation() -> None:
    head = tiny_head("math")
    record = scored(head, finished(1, temperature=0.7))
    assert not record.greedy
    values = score(head, record, head.served("math"), TO_DRAFT).agreement
    logits = head.logits(record.hidden, head.served("math"))
    target = SparseTarget.from_evidence(record.top_ids, record.top_logprobs, TO_DRAFT)
    inside = target.index >= 0
    q = logits.softmax(-1).gather(-1, target.index.clamp_min(0)) * inside
    overlap = torch.minimum(q, target.probs).sum(-1) + torch.minimum(1 - q.sum(-1), target.tail)
    torch.testing.assert_close(values, overlap, atol=1e-3, rtol=1e-3)


def test_a28_the_last_position_of_a_round_is_the_token_that_corrected_it() -> None:
    head = tiny_head("math")
    record = finished(1, prompt=5, output=9)
    made = scored(head, record)
    rounds = [item.emitted for item in record.rounds]
    ends = [sum(rounds[: at + 1]) - 1 for at in range(len(rounds))]
    assert made.positions[made.ends].tolist() == [at for at in ends if at < 9]
    assert made.emitted[made.ends].tolist() == [record.output_ids[at] for at in ends if at < 9]


def test_with_focus_rounds_only_ends_of_rounds_teach() -> None:
    head = tiny_head("math")
    batch = all_rows([scored(head, finished(n, output=9)) for n in range(4)])
    assert 0 < int(batch.ends.sum()) < len(batch.ends)
    learner = ExpertLearner(head, head.served("math"), LearnConfig(focus="rounds"))
    logits = head.logits(batch.hidden, learner.candidate())
    expected = forward_kl(logits, batch.target)[batch.ends].mean()
    assert learner.step(batch) == pytest.approx(float(expected), rel=1e-5)
    before = learner.candidate()
    none = Batch(batch.hidden, batch.target, batch.emitted, torch.zeros_like(batch.ends))
    assert learner.step(none) == 0.0
    for name, tensor in learner.candidate().items():
        assert torch.equal(tensor, before[name])
