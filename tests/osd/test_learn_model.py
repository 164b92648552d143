"""Adapters of a draft model learn from what the target said, are judged, published and swapped."""

from __future__ import annotations

import pytest
import torch

from drafts.draft_model import DraftModel
from drafts.kinds.base import DraftRow
from drafts.kinds.model import ModelSource
from drafts.mixture import Mixture
from drafts.registry import Registry
from drafts.versions import Banks, VersionFollower
from osd.learn.config import BufferConfig, GuardConfig, LearnConfig
from osd.learn.distill import encode, pending
from osd.learn.learner import ExpertLearner
from osd.learn.losses import SparseTarget, draft_index, forward_kl
from osd.learn.model_head import CONTEXT, ModelHead, shared_texts
from osd.learn.scheduler import LearningScheduler
from tests.osd.engine_rig import Client, greedy, make_engine, prompts
from tests.osd.learn_rig import finished
from tests.tiny import VOCAB, tiny_model


def learning_source(*domains: str) -> ModelSource:
    source = ModelSource(DraftModel(tiny_model(seed=3), VOCAB, rank=8))
    for domain in domains:
        source.add_domain(domain)
    return source


def test_a28_a_position_is_predicted_from_precisely_the_tokens_before_it() -> None:
    source = learning_source("math")
    head = ModelHead(source, VOCAB)
    item = pending(finished(1, prompt=5, output=4), BufferConfig(), "math.model", with_features=False)
    assert item is not None
    assert item.positions.tolist() == [0, 1, 2, 3]
    contexts = encode(head, item)
    assert contexts.shape == (4, CONTEXT)
    for at, context in enumerate(contexts):
        assert context[context >= 0].tolist() == list(item.tokens[: 5 + at])
    logits = head.logits(contexts, head.served("math"))
    with torch.no_grad():
        whole = tiny_model(seed=3)(input_ids=torch.tensor([item.tokens])).logits[0, 4:8]
    torch.testing.assert_close(logits, whole, atol=1e-4, rtol=1e-4)


def test_a_long_text_is_read_from_its_last_tokens_and_a_one_token_prompt_from_its_first() -> None:
    head = ModelHead(learning_source("math"), VOCAB)
    long = pending(finished(1, prompt=300, output=100), BufferConfig(), "math.model", with_features=False)
    short = pending(finished(1, prompt=1, output=3), BufferConfig(), "math.model", with_features=False)
    assert long is not None
    assert short is not None
    contexts = encode(head, long)
    last = int(long.positions[-1]) + 300
    assert contexts[-1][contexts[-1] >= 0].tolist() == list(long.tokens[399 - CONTEXT : last])
    assert short.positions.tolist() == [0, 1, 2]
    assert int((encode(head, short)[0] >= 0).sum()) == 1


def test_rows_whose_context_begins_anothers_share_a_pass() -> None:
    rows = torch.tensor([[1, 2, -1], [1, 2, 3], [4, 2, -1], [1, -1, -1]])
    found = shared_texts(rows, [2, 3, 2, 1])
    assert [(text.tolist(), members) for text, members in found] == [([1, 2, 3], [1, 0, 3]), ([4, 2], [2])]


def test_the_gradient_is_that_of_forward_kl_over_the_whole_vocabulary() -> None:
    source = learning_source("math")
    head = ModelHead(source, VOCAB)
    learner = ExpertLearner(head, head.served("math"), LearnConfig(focus="all", clip=1e9))
    item = pending(finished(2), BufferConfig(), "math.model", with_features=False)
    assert item is not None
    evidence = SparseTarget.from_evidence(item.top_ids, item.top_logprobs, draft_index(head.token_ids, VOCAB))
    logits = head.logits(encode(head, item), {**learner.masters, **learner.fixed})
    assert logits.shape[-1] == VOCAB
    forward_kl(logits, evidence).mean().backward()
    grads = [t.grad for n, t in learner.masters.items() if n.endswith("lora_B")]
    assert grads
    assert all(grad is not None and bool(grad.any()) for grad in grads)


@pytest.mark.parametrize("together", ["model", "eagle and model"])
def test_an_adapter_is_distilled_published_and_used_while_the_engine_serves(together: str) -> None:
    from tests.osd.draft_rig import eagle

    model = ModelSource(DraftModel(tiny_model(seed=3), VOCAB, rank=8))
    sources = {"eagle": eagle(), "model": model} if together != "model" else {"model": model}
    drafter = Mixture(sources)
    for domain in ("base", "math"):
        drafter.add_domain(domain)
    banks = {name: source.bank if name == "eagle" else source for name, source in sources.items()}
    registry = Registry(None)
    drafter.versions = VersionFollower(registry, Banks(banks), tuple(banks))
    heads: dict[str, object] = {"model": ModelHead(model, VOCAB)}
    registry.publish("math.model", model.tensors("math"), reason="born")
    if "eagle" in sources:
        from osd.learn.head import EagleHead

        trunk = sources["eagle"]
        heads["eagle"] = EagleHead(trunk.trunk, trunk.bank, trunk.embedding, trunk.output)
        registry.publish("math", trunk.bank.tensors("math"), reason="born")
    config = LearnConfig(
        generalist=False,
        budget_share=0.9,
        update_every=4,
        rate=2e-2,
        passes=4.0,
        focus="all",
        buffer=BufferConfig(hold_back=2),
        guard=GuardConfig(min_positions=16),
    )
    events = []
    scheduler = LearningScheduler(heads, registry, config, events.append)
    engine = make_engine(
        drafter=drafter, evidence_k=32, observers=[scheduler], worker=scheduler, on_event=events.append
    )
    client = Client(engine)
    texts = prompts(6, seed=9, lengths=(6,))
    for turn in range(8):
        for index, prompt in enumerate(texts):
            client.submit(f"{turn}-{index}", prompt, "math", max_tokens=24, ignore_eos=True)
    client.run()
    while engine.step():
        pass
    kinds = {event.kind for event in events if event.domain == "math"}
    assert {"publish", "swap"} <= kinds
    served = registry.current("math.model")
    assert served is not None
    assert served.number >= 1
    assert drafter.versions.served_by_kind("math")["model"] == served.number
    assert drafter.version("math") == drafter.versions.served_by_kind("math")[next(iter(banks))]
    for name, tensor in model.tensors("math").items():
        torch.testing.assert_close(tensor, served.tensors[name])
    answer = client.outcomes["7-0"].record.output_ids
    text = [*texts[0], *answer]
    row = DraftRow("after", "math", text[:12], 6)
    born = DraftRow("before", "base", text[:12], 6)
    learned = scheduler.domains["math.model"].live
    assert max(live.mean for version, live in learned.items() if version) > learned[0].mean
    after, before = model.propose([row, born], [4, 4])
    assert after.tokens != before.tokens
    assert client.outcomes["0-0"].record.output_ids == answer
    assert list(answer) == greedy(texts[0], 24, stop=())


def test_evidence_of_padded_ids_counts_as_tail_and_learning_goes_on() -> None:
    """The target's output may have more columns than its tokenizer has tokens; any may be among the best."""
    record = finished(3)
    record.evidence.top_ids[:, 3] = VOCAB + 5
    scheduler = LearningScheduler(
        {"model": ModelHead(learning_source("math"), VOCAB, VOCAB + 8)},
        Registry(None),
        LearnConfig(
            update_every=1, steps=1, guard=GuardConfig(min_positions=1), buffer=BufferConfig(hold_back=2)
        ),
    )
    for _ in range(4):
        scheduler.take(record)
    scheduler.drain()
    assert scheduler.counts["scored"] == 4
    assert scheduler.counts["updates"] > 0


def test_a_window_wider_than_the_context_gives_no_position_without_tokens_before_it() -> None:
    config = LearnConfig(buffer=BufferConfig(window=2000, positions_per_record=500))
    head = ModelHead(learning_source("math"), VOCAB)
    scheduler = LearningScheduler({"model": head}, Registry(None), config)
    scheduler.take(finished(1, prompt=5, output=2 * CONTEXT))
    scheduler.drain()
    record = scheduler.domains["math.model"].newest
    assert record is not None
    assert record.size == CONTEXT
    assert int((record.hidden >= 0).sum(-1).min()) == 1


def test_what_is_compared_with_a_models_logits_is_on_the_models_device() -> None:
    source = learning_source("math")
    source.default.model.to("meta")
    head = ModelHead(source, VOCAB)
    assert head.token_ids.device.type == "meta"
    assert draft_index(head.token_ids, VOCAB).device.type == "meta"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_an_adapter_on_a_gpu_is_scored_trained_and_judged_there() -> None:
    source = ModelSource(DraftModel(tiny_model(seed=3).to("cuda"), VOCAB, rank=8))
    source.add_domain("math")
    head = ModelHead(source, VOCAB)
    assert head.token_ids.is_cuda
    registry = Registry(None)
    registry.publish("math.model", source.tensors("math"), reason="born")
    config = LearnConfig(
        update_every=2,
        rate=2e-2,
        focus="all",
        buffer=BufferConfig(hold_back=2),
        guard=GuardConfig(min_positions=8),
    )
    scheduler = LearningScheduler({"model": head}, registry, config)
    assert all(tensor.is_cuda for tensor in scheduler.served("math.model").values())
    for seed in range(12):
        scheduler.take(finished(seed))
        scheduler.drain()
    assert scheduler.counts["scored"] == 12
    assert scheduler.counts["published"] > 0
    on_cpu = {name: tensor.cpu() for name, tensor in registry.current("math.model").tensors.items()}
    ids = torch.tensor([[1, 2, 3]], device="cuda")
    assert source.default.logits_at(on_cpu, ids, torch.tensor([2], device="cuda")).is_cuda
