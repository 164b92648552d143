from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafts.bank import Expert, ExpertBank, expert_logits
from drafts.eagle3 import FORMATS, Eagle3Head, Eagle3Target, fold_expert, obstacle, read_eagle3, write_eagle3
from drafts.errors import CheckpointError
from drafts.trunk import Trunk
from osd.learn.pretrain_data import Answer
from osd.learn.simulate import mean_accepted_length, right_flags
from osd.learn.unroll import unroll
from tests.drafts.eagle3_reference import Eagle3Reference
from tests.drafts.head_rig import IDS, SHAPE, matrices, random_expert, tiny_trunk
from tests.osd.test_learn_unroll import answer

TARGET = Eagle3Target("some/target", ("LlamaForCausalLM",), 512)
DEPTH = 3
Tensors = dict[str, torch.Tensor]


def bare_trunk() -> Trunk:
    """A trunk whose output has no bias, as EAGLE-3 wants it."""
    trunk = tiny_trunk()
    trunk.tensors["output_bias"].zero_()
    for name in ("feature_norm", "embed_norm", "hidden_norm", "mlp_norm", "final_norm"):
        trunk.tensors[name].normal_(mean=1.0, std=0.2, generator=torch.Generator().manual_seed(len(name)))
    return trunk


def trained_expert(trunk: Trunk, texts: list[Answer]) -> Expert:
    """Deltas that learned the texts' language; the bias is left alone."""
    embedding, output = matrices()
    bank = ExpertBank(trunk, rank=8, capacity=1)
    bank.add("math")
    expert = bank.tensors("math")
    learned = [t.requires_grad_() for n, t in expert.items() if n.endswith(("_a", "_b"))]
    optimiser = torch.optim.Adam(learned, lr=0.02)
    said = torch.searchsorted(IDS, torch.cat([text.tokens[text.prompt_length :] for text in texts]))
    for _ in range(60):
        hidden = unroll(trunk, embedding, texts, 1, expert).hidden[0]
        loss = torch.nn.functional.cross_entropy(expert_logits(trunk, output[IDS], hidden, expert), said)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return {name: tensor.detach() for name, tensor in expert.items()}


def accepted(flags: list[torch.Tensor]) -> list[list[int]]:
    """Accepted draft tokens of a chain begun at every output position."""
    return [right.int().cumprod(0).sum(0).tolist() for right in flags]


def accepted_by_reference(folder: Path, texts: list[Answer]) -> list[list[int]]:
    reference = Eagle3Reference(folder, matrices()[0])
    found: list[list[int]] = []
    for text in texts:
        tokens, counts = text.tokens.tolist(), []
        for end in range(text.prompt_length, len(tokens)):
            chain = reference.chain(tokens[:end], text.features[: end - 1], DEPTH)
            assert set(chain) <= set(IDS.tolist())
            wrong = (i for i, (a, b) in enumerate(zip(chain, tokens[end:], strict=False)) if a != b)
            counts.append(next(wrong, min(DEPTH, len(tokens) - end)))
        found.append(counts)
    return found


FRESH = """
import sys, torch
from pathlib import Path
from drafts.eagle3 import read_eagle3
from osd.learn.simulate import right_flags
folder = Path(sys.argv[1])
given = torch.load(folder / "texts.pt", weights_only=False)
head = read_eagle3(folder / "draft")
torch.save(right_flags(head.trunk, given["embedding"], head.output, given["texts"], 3), folder / "flags.pt")
"""


@pytest.mark.parametrize("form", FORMATS)
def test_a21_an_exported_expert_is_accepted_as_before(tmp_path: Path, form: str) -> None:
    trunk, (embedding, output) = bare_trunk(), matrices()
    texts = [answer(seed, prompt=4 + seed % 3, output=12) for seed in range(20)]
    expert = trained_expert(trunk, texts[:12])
    served = right_flags(trunk, embedding, output[IDS], texts, DEPTH, expert)
    alpha = sum(float(right[0].float().mean()) for right in served) / len(served)
    assert 0.2 < alpha < 1.0, "neither nothing nor everything may be accepted, or equality says little"

    head = fold_expert(trunk, expert, output[IDS])
    assert obstacle(head) is None
    folder = tmp_path / "draft"
    folder.mkdir()
    write_eagle3(folder, head, TARGET, form)
    torch.save({"texts": texts, "embedding": embedding}, tmp_path / "texts.pt")
    subprocess.run([sys.executable, "-c", FRESH, str(tmp_path)], check=True, timeout=120)
    again = torch.load(tmp_path / "flags.pt")
    assert accepted(again) == accepted(served)
    assert mean_accepted_length(again, DEPTH) == mean_accepted_length(served, DEPTH)
    assert accepted_by_reference(folder, texts) == accepted(served)
    alone = right_flags(trunk, embedding, output[IDS], texts, DEPTH)
    assert accepted(alone) != accepted(served), "the deltas must have changed something"


def written(folder: Path, form: str = "vllm") -> Eagle3Head:
    trunk, (_, output) = bare_trunk(), matrices()
    head = fold_expert(trunk, None, output[IDS])
    write_eagle3(folder, head, TARGET, form)
    return head


def permuted(name: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: tensors[name].roll(1)})


def shuffled_ids(tensors: Tensors) -> None:
    """The same ids in another order: what a loader that trusts the file would take."""
    ids = (tensors["d2t"] + torch.arange(len(IDS))).flip(0)
    tensors["d2t"] = ids - torch.arange(len(IDS))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda tensors: tensors.pop("d2t"), "d2t"),
        (lambda tensors: tensors.pop("t2d"), "t2d"),
        (shuffled_ids, "d2t"),
        (lambda tensors: tensors["d2t"].zero_(), "t2d .* d2t"),
        (permuted("t2d"), "t2d"),
        (lambda tensors: tensors.update({"d2t": tensors["d2t"] + 40}), "d2t"),
        (lambda tensors: tensors.update({"lm_head.weight": tensors["lm_head.weight"][1:]}), "lm_head"),
        (lambda tensors: tensors.pop("layers.0.self_attn.k_proj.weight"), "k_proj"),
        (lambda tensors: tensors.update({"fc.weight": tensors["fc.weight"].T.contiguous()}), "fc"),
    ],
)
@pytest.mark.parametrize("form", FORMATS)
def test_a21_a_table_that_is_missing_or_permuted_is_refused_by_name(
    tmp_path: Path, form: str, change: Callable[[Tensors], object], named: str
) -> None:
    written(tmp_path, form)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=named):
        read_eagle3(tmp_path)


@pytest.mark.parametrize("form", FORMATS)
def test_what_is_read_back_is_what_was_written(tmp_path: Path, form: str) -> None:
    head, back = written(tmp_path, form), read_eagle3(tmp_path)
    assert back.trunk.shape == SHAPE
    assert back.trunk.fingerprint() == head.trunk.fingerprint()
    assert torch.equal(back.output, head.output)


def test_folding_computes_what_the_deltas_do_and_adds_the_biases() -> None:
    trunk, (embedding, output) = tiny_trunk(), matrices()
    bank = ExpertBank(trunk, rank=2, capacity=1)
    random_expert(bank, "math", 3)
    expert = bank.view(bank.index("math"))
    head = fold_expert(trunk, expert, output[IDS])
    texts = [answer(1)]
    one = unroll(trunk, embedding, texts, DEPTH, expert).hidden
    other = unroll(head.trunk, embedding, texts, DEPTH).hidden
    for before, after in zip(one, other, strict=True):
        wanted = expert_logits(trunk, output[IDS], before, expert)
        torch.testing.assert_close(
            expert_logits(head.trunk, head.output, after, None), wanted, atol=1e-3, rtol=1e-3
        )
    reason = obstacle(head)
    assert reason is not None
    assert "output_bias" in reason


def test_a_bias_that_is_the_same_for_all_ids_is_no_obstacle() -> None:
    trunk = bare_trunk()
    trunk.tensors["output_bias"].fill_(0.7)
    assert obstacle(fold_expert(trunk, None, matrices()[1][IDS])) is None


def test_each_format_has_its_own_config(tmp_path: Path) -> None:
    written(tmp_path, "vllm")
    flat = json.loads((tmp_path / "config.json").read_text())
    assert flat["architectures"] == ["LlamaForCausalLMEagle3"]
    assert flat["draft_vocab_size"] == len(IDS)
    assert flat["eagle_aux_hidden_state_layer_ids"] == list(SHAPE.feature_layers)
    written(tmp_path, "speculators")
    nested = json.loads((tmp_path / "config.json").read_text())
    assert nested["speculators_model_type"] == "eagle3"
    assert nested["speculators_config"]["verifier"]["name_or_path"] == TARGET.path
    assert nested["transformer_layer_config"]["num_hidden_layers"] == 1
    assert nested["fc_norm"] is True


def test_a_folder_that_holds_no_draft_is_a_checkpoint_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_eagle3(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_eagle3(tmp_path)
