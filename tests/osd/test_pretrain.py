from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from drafts.errors import CheckpointError, InvalidValueError
from drafts.trunk import Trunk
from osd.learn import pretrain
from osd.learn.fused import mean_loss
from osd.learn.goals import full_goals, goals
from osd.learn.initial import initial_trunk
from osd.learn.losses import LOSSES, SparseTarget
from osd.learn.pretrain import Step, train
from osd.learn.pretrain_config import PretrainConfig
from osd.learn.pretrain_data import Answer, coverage, load_shards, rank_vocabulary, vocabulary_size
from osd.learn.pretrain_state import Epoch
from osd.lent import Lent
from osd.serve.collect import Prompt, collect
from osd.serve.lend import lend
from osd.serve.load import build_target
from osd.serve.target import TargetModel
from tests.drafts.head_rig import tiny_trunk
from tests.osd.pretrain_rig import answer, lent
from tests.tiny import tiny_model

CONFIG = PretrainConfig(epochs=3, batch=4, warmup=3)


class Killed(BaseException):
    """Stands for SIGKILL: nothing may catch it."""


def trained(items: Sequence[Answer], checkpoint: Path | None, dies_at: int = -1) -> tuple[Trunk, list[Epoch]]:
    trunk = tiny_trunk()

    def progress(step: Step) -> None:
        if step.number == dies_at:
            raise Killed

    torch.manual_seed(dies_at + 2)
    return trunk, train(trunk, lent(), items, items[:4], CONFIG, progress=progress, checkpoint=checkpoint)


def test_a_resumed_training_equals_an_uninterrupted_one_to_the_last_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten answers are three steps an epoch: kills before, within and at the end of every epoch."""
    items = [answer(n, output=3 + n % 5) for n in range(10)]
    monkeypatch.setattr(pretrain, "fastest_product", lambda width: pretrain.PRODUCTS["bfloat16"])
    whole, reports = trained(items, None)
    monkeypatch.setattr(pretrain, "fastest_product", lambda width: pretrain.PRODUCTS["plain"])
    plain, _ = trained(items, None)
    assert not torch.equal(plain.tensors["fc"], whole.tensors["fc"])
    for dies_at in range(4, 10):
        path = tmp_path / f"{dies_at}.safetensors"
        monkeypatch.setattr(pretrain, "fastest_product", lambda width: pretrain.PRODUCTS["bfloat16"])
        with pytest.raises(Killed):
            trained(items, path, dies_at)
        monkeypatch.setattr(pretrain, "fastest_product", lambda width: pretrain.PRODUCTS["plain"])
        again, resumed = trained(items, path)
        for name, tensor in whole.tensors.items():
            assert torch.equal(again.tensors[name], tensor), name
        assert [(e.loss, e.labels) for e in resumed] == [(e.loss, e.labels) for e in reports]


def test_a_finished_training_is_not_repeated_and_another_one_is_refused(tmp_path: Path) -> None:
    items = [answer(n) for n in range(6)]
    path = tmp_path / "state.safetensors"
    first, _ = trained(items, path)
    again, reports = trained(items, path, dies_at=1)
    assert len(reports) == 3
    assert torch.equal(first.tensors["qkv"], again.tensors["qkv"])
    with pytest.raises(CheckpointError, match="other answers or settings"):
        trained(items[:5], path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=path.name):
        trained(items, path)


def test_the_smallest_vocabulary_that_covers_is_chosen() -> None:
    items = [answer(n, output=9) for n in range(12)]
    ranked = rank_vocabulary(items[:8], 50, [48])
    for wanted in (0.3, 0.7, 0.95, 1.0):
        size = vocabulary_size(ranked, items[8:], wanted, step=1)
        assert coverage(items[8:], ranked[:size]) >= wanted
        assert coverage(items[8:], ranked[: size - 1]) < wanted
    assert vocabulary_size(ranked, items[8:], 0.3, step=8) % 8 == 0
    assert vocabulary_size(ranked, items[8:], 1.0, step=64) == 50
    chosen = initial_trunk(lent(), items[:8], items[8:], PretrainConfig(coverage=0.3))
    assert 48 in chosen.token_ids
    with pytest.raises(InvalidValueError, match="at least one of both"):
        initial_trunk(lent(), items, [], PretrainConfig())


@pytest.mark.parametrize("name", list(LOSSES))
def test_every_fused_loss_equals_the_plain_one_with_its_gradient(name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(24, 16, generator=generator)
    index = torch.randint(-1, 24, (150, 1), generator=generator) % 24
    index = torch.cat((index, (index + 5) % 24), dim=1)
    index[::7, 1] = -1
    probs = torch.rand(150, 2, generator=generator) * 0.4 * (index >= 0)
    goal = SparseTarget(index, probs, 1 - probs.sum(-1))
    inputs = [torch.randn(150, 16, generator=generator), torch.randn(24, generator=generator)]
    found = []
    for fused in (True, False):
        hidden, bias = (tensor.clone().requires_grad_(True) for tensor in inputs)
        if fused:
            loss = mean_loss(name, hidden, bias, weight, goal)
        else:
            loss = LOSSES[name](hidden @ weight.T + bias, goal).mean()
        found.append((loss.detach(), *torch.autograd.grad(3 * loss, (hidden, bias))))
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-3)


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return build_target(tiny_model("llama"), name="tiny", feature_layers=(1, 2, 3))


@pytest.fixture(scope="module")
def answers(target: TargetModel, tmp_path_factory: pytest.TempPathFactory) -> list[Answer]:
    generator = torch.Generator().manual_seed(3)
    asked = [
        Prompt("a", "made up", f"p{n}", tuple(torch.randint(3, 128, (4 + n,), generator=generator).tolist()))
        for n in range(8)
    ]
    folder = tmp_path_factory.mktemp("shards")
    return load_shards(collect(target, asked, folder, max_tokens=6, evidence_k=8, temperature=1.0))


def test_the_full_distribution_is_the_targets_own(target: TargetModel, answers: list[Answer]) -> None:
    things = lend(target)
    assert things.last_layer is not None
    trunk = Trunk.fresh(things.shape, torch.arange(0, 128, 2))
    got = full_goals(trunk, things.output, things.last_layer["final_norm"])(answers)
    expected = []
    for item in answers:
        with torch.inference_mode():
            logits = target.reference(item.tokens[None]).logits[0, item.prompt_length - 1 : -1]
        expected.append(logits.float().softmax(-1)[:, ::2])
    probs = torch.cat(expected)
    torch.testing.assert_close(got.probs, probs, atol=5e-3, rtol=5e-2)
    torch.testing.assert_close(got.tail, 1 - probs.sum(-1), atol=2e-2, rtol=0.0)
    assert 0.0 < float(got.tail.mean()) < 1.0


def test_the_full_distribution_needs_the_last_layer(target: TargetModel) -> None:
    full = PretrainConfig(support="full")
    things = lend(target).reading((1, 2))
    with pytest.raises(InvalidValueError, match="up to the last"):
        goals(Trunk.fresh(things.shape, torch.arange(64)), things, full)
    with pytest.raises(InvalidValueError, match="it is made up"):
        goals(tiny_trunk(), lent(), full)
    with pytest.raises(InvalidValueError, match="of those collected"):
        lend(target).reading((1, 4))


def test_a_trunk_that_begins_as_the_target_has_its_last_layer(
    target: TargetModel, answers: list[Answer]
) -> None:
    things = lend(target)
    trunk = initial_trunk(things, answers, answers[:2], PretrainConfig(init="target", draft_vocab=64))
    layer = target.reference.model.layers[-1]
    torch.testing.assert_close(trunk.tensors["down"], layer.mlp.down_proj.weight)
    torch.testing.assert_close(trunk.tensors["qkv"][:32, 32:], layer.self_attn.q_proj.weight)
    features = answers[0].features.float()
    deep = features[:, -32:]
    trunk.tensors["fc"][:, :-32] = 0.0
    turned = torch.nn.functional.cosine_similarity(trunk.fuse(features), deep, dim=-1)
    assert float(turned.min()) > 0.999
    sizes = torch.cat([trunk.fuse(a.features.float()) for a in answers]).square().mean().sqrt()
    real = torch.cat([a.features[:, -32:].float() for a in answers]).square().mean().sqrt()
    assert float(sizes / real) == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize(("kind", "why"), [("qwen2", "model type"), ("llama-bias", "has a bias")])
def test_a_layer_of_another_kind_is_not_taken_over(kind: str, why: str, answers: list[Answer]) -> None:
    things: Lent = lend(build_target(tiny_model(kind), name=kind, feature_layers=(1, 2, 3)))
    with pytest.raises(InvalidValueError, match=why):
        initial_trunk(things, answers, answers, PretrainConfig(init="target"))


@pytest.mark.parametrize("change", [{"loss": "reverse_kl"}, {"support": "full"}, {"init": "target"}])
def test_every_choice_lowers_its_loss(
    target: TargetModel, answers: list[Answer], change: dict[str, str]
) -> None:
    config = PretrainConfig.model_validate(
        {"epochs": 40, "rate": 5e-3, "warmup": 2, "draft_vocab": 64, **change}
    )
    things = lend(target)
    trunk = initial_trunk(things, answers, answers[:2], config)
    reports = train(trunk, things, answers, answers[:2], config)
    assert reports[-1].loss < 0.8 * reports[0].loss
