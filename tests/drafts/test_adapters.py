from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from drafts.adapters import BASE, FINGERPRINT, AdapterBank
from drafts.draft_model import DraftModel
from drafts.errors import CheckpointError
from drafts.kinds.base import DraftRow
from drafts.kinds.model import ModelSource
from tests.tiny import VOCAB, tiny_model

FAMILIES = [
    "llama",
    "gpt2",
    "qwen2-sliding",
    "gemma3",
    "gpt-neox",
    "bloom",
    "falcon-alibi",
    "mistral-sliding",
]
DOMAINS = ("base", "train", "lora_maths")


def noisy(bank: AdapterBank, domain: str, seed: int, scale: float = 0.3) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: t if name == FINGERPRINT else scale * torch.randn(t.shape, generator=generator)
        for name, t in bank.tensors(domain).items()
    }


def learned_source(kind: str = "llama") -> ModelSource:
    """One untouched domain and two with adapters of their own."""
    source = ModelSource(DraftModel(tiny_model(kind), VOCAB, rank=2))
    for seed, domain in enumerate(DOMAINS):
        source.add_domain(domain)
        if seed:
            source.load(domain, noisy(source.default.adapters, domain, seed))
    return source


@torch.inference_mode()
def greedy(source: ModelSource, domain: str, tokens: list[int], count: int) -> tuple[int, ...]:
    """The adapted model's continuation of one text, without any cache."""
    bank, text = source.of(domain).adapters, list(tokens)
    for _ in range(count):
        logits = bank.model(input_ids=torch.tensor([text]), adapter_names=[bank.name(domain)]).logits
        text.append(int(logits[0, -1].argmax()))
    return tuple(text[len(tokens) :])


def rows() -> list[DraftRow]:
    generator = torch.Generator().manual_seed(0)
    lengths = (3, 40, 7, 1, 18)
    return [
        DraftRow(f"r{i}", DOMAINS[i % 3], torch.randint(3, VOCAB, (n,), generator=generator).tolist(), 1)
        for i, n in enumerate(lengths)
    ]


@pytest.mark.parametrize("kind", FAMILIES)
def test_rows_of_different_domains_and_lengths_draft_together_as_each_alone(kind: str) -> None:
    source, batch = learned_source(kind), rows()
    for accepted in (2, 0, 4, 1):
        proposals = source.propose(batch, [4, 2, 4, 3, 4])
        for row, proposal, limit in zip(batch, proposals, [4, 2, 4, 3, 4], strict=True):
            assert proposal.tokens == greedy(source, row.domain, row.tokens, limit)
            wrong = (proposal.tokens[min(accepted, limit - 1)] + 1) % VOCAB
            row.tokens += [*proposal.tokens[: min(accepted, limit)], wrong]
    held = {len(row.scratch["model"].layers[0][0][0, 0]) for row in batch}
    assert len(held) > 1


def test_a27_a_swap_rebuilds_the_rows_of_its_domain_and_no_others() -> None:
    source, batch = learned_source(), rows()
    source.propose(batch, [3] * 5)
    before = [row.scratch["model"] for row in batch]
    source.load("train", noisy(source.default.adapters, "train", 9))
    for row, proposal in zip(batch, source.propose(batch, [3] * 5), strict=True):
        assert proposal.tokens == greedy(source, row.domain, row.tokens, 3)
    kept = [row.scratch["model"] is state for row, state in zip(batch, before, strict=True)]
    assert kept == [row.domain != "train" for row in batch]


def test_a_new_adapter_is_the_model_and_a_childs_is_its_parents() -> None:
    source = learned_source()
    bank = source.default.adapters
    assert bank.name("base") == BASE
    source.add_domain("child", "train")
    for name, tensor in source.tensors("train").items():
        assert torch.equal(source.tensors("child")[name], tensor)
    text = rows()[1].tokens
    assert greedy(source, "child", text, 4) == greedy(source, "train", text, 4)
    source.drop_domain("train")
    assert "train" not in source
    assert greedy(source, "child", text, 4) != greedy(source, "base", text, 4)


def test_weights_that_are_tried_touch_nothing_that_is_served() -> None:
    source = learned_source()
    bank = source.default.adapters
    served = {domain: source.tensors(domain) for domain in DOMAINS}
    tried = {
        n: t.requires_grad_() if t.is_floating_point() else t for n, t in noisy(bank, "train", 1).items()
    }
    ids = torch.tensor([rows()[1].tokens])
    logits = bank.run(tried, input_ids=ids).logits
    torch.testing.assert_close(logits, bank.model(input_ids=ids, adapter_names=[bank.name("train")]).logits)
    logits.sum().backward()
    assert all(t.grad is not None and bool(t.grad.any()) for n, t in tried.items() if n != FINGERPRINT)
    for domain in DOMAINS:
        for name, tensor in source.tensors(domain).items():
            assert torch.equal(tensor, served[domain][name])


def test_a27_an_adapter_that_does_not_fit_is_refused_and_nothing_changes() -> None:
    source = learned_source()
    served = source.tensors("train")
    first = next(iter(served))
    other = DraftModel(tiny_model(seed=1), VOCAB, rank=2)
    other.adapters.add("train")
    spoilt = {**served, first: torch.full_like(served[first], float("nan"))}
    for bad, message in (
        ({n: t for n, t in served.items() if n != first}, "missing"),
        ({**served, "extra": torch.zeros(1)}, "extra"),
        ({**served, first: served[first][:1]}, "shape"),
        (spoilt, "NaN"),
        (other.adapters.tensors("train"), "other weights"),
    ):
        with pytest.raises(CheckpointError, match=message):
            source.load("train", bad)
        for name, tensor in source.tensors("train").items():
            assert torch.equal(tensor, served[name])


def test_tried_weights_are_not_searched_for_in_the_model_one_by_one() -> None:
    """Learning tries weights in slices between two engine steps: a walk for each tensor takes seconds."""
    bank = learned_source().default.adapters
    tried, ids = noisy(bank, "train", 1), torch.tensor([[1, 2, 3]])
    with patch.object(bank.model, "named_parameters", wraps=bank.model.named_parameters) as walks:
        for _ in range(3):
            bank.run(tried, input_ids=ids)
    assert len(tried) > 20
    assert walks.call_count <= 6


def test_weights_that_are_tried_go_where_the_tokens_are() -> None:
    bank = learned_source().default.adapters
    tried = noisy(bank, "train", 1)
    with patch("drafts.adapters.torch.func.functional_call") as call:
        bank.run(tried, input_ids=torch.empty(1, 3, dtype=torch.int64, device="meta"))
    used = call.call_args.args[1]
    assert len(used) == len(tried) - 1
    assert {tensor.device.type for tensor in used.values()} == {"meta"}
