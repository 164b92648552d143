from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from drafts.draft_model import DraftModel
from drafts.errors import InvalidValueError
from drafts.kinds import model as model_kind
from drafts.kinds.base import DraftRow
from drafts.kinds.model import ModelSource, check_tokenizers
from drafts.proposal import EMPTY
from tests.tiny import tiny_model

VOCAB = 40


def tiny(seed: int = 0, vocab: int = VOCAB, positions: int = 256) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=positions,
        initializer_range=0.5,
    )
    return LlamaForCausalLM(config)


def row(tokens: list[int], prompt_length: int = 2, domain: str = "base", **options: Any) -> DraftRow:
    return DraftRow("r", domain, list(tokens), prompt_length, **options)


@torch.inference_mode()
def greedy(model: Any, tokens: list[int], count: int, vocab: int = VOCAB) -> tuple[int, ...]:
    """The model's own greedy continuation, without any cache."""
    text = list(tokens)
    for _ in range(count):
        text.append(int(model(torch.tensor([text])).logits[0, -1, :vocab].argmax()))
    return tuple(text[len(tokens) :])


class TableNoise:
    """Noise that is a fixed table by position and token id."""

    def __init__(self, seed: int) -> None:
        self.table = torch.rand(64, VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        self.table = -(-self.table.log()).log()

    def gumbel(self, position: int, token_ids: torch.Tensor) -> torch.Tensor:
        return self.table[position, token_ids]


def test_it_proposes_the_models_own_greedy_continuation() -> None:
    model = tiny()
    source = ModelSource(DraftModel(model, VOCAB))
    proposal = source.propose([row([1, 2, 3])], [5])[0]
    assert proposal.tokens == greedy(model, [1, 2, 3], 5)
    assert all(0 < c <= 1 for c in proposal.confidence)
    proposal.check()


@pytest.mark.parametrize("accepted", [[5, 5, 5], [0, 0, 0], [2, 0, 5, 1], [1, 4, 3, 5]])
def test_a23_after_any_acceptance_the_cache_equals_one_from_scratch(accepted: list[int]) -> None:
    model = tiny(1)
    source = ModelSource(DraftModel(model, VOCAB))
    item = row([1, 2, 3, 4])
    for count in accepted:
        proposal = source.propose([item], [5])[0]
        wrong = (proposal.tokens[min(count, 4)] + 1) % VOCAB
        item.tokens += [*proposal.tokens[:count], wrong]
    source.propose([item], [1])
    fresh = row(item.tokens)
    source.propose([fresh], [1])
    one, two = item.scratch["model"], fresh.scratch["model"]
    assert one.held == two.held == item.tokens
    assert one.layers[0][0].shape[2] == len(item.tokens)
    for mine, theirs in zip(one.layers, two.layers, strict=True):
        torch.testing.assert_close(mine[0], theirs[0], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(mine[1], theirs[1], atol=1e-5, rtol=1e-4)


def test_a23_a_copy_of_the_target_is_always_right() -> None:
    model = tiny(2)
    source = ModelSource(DraftModel(model, VOCAB))
    item = row([1, 2, 3])
    for _ in range(12):
        proposal = source.propose([item], [4])[0]
        assert proposal.tokens == greedy(model, item.tokens, 4)
        item.tokens += proposal.tokens[:2]


def test_a08_beyond_its_context_it_is_silent_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny(positions=16)
    source = ModelSource(DraftModel(model, VOCAB))
    item = row([1, 2, 3])
    sizes = []
    with caplog.at_level(logging.WARNING):
        while len(item.tokens) < 24:
            proposal = source.propose([item], [4])[0]
            sizes.append(len(proposal))
            item.tokens.append(5)
            assert (source.unread(item) > 0) == (len(item.tokens) <= 16)
    assert sizes == [4] * 11 + [3, 2, 1] + [0] * 7
    assert sum("context of 16" in record.message for record in caplog.records) == 1


def test_a22_ids_of_a_padded_output_matrix_are_never_proposed() -> None:
    model = tiny(3, vocab=64)
    with torch.no_grad():
        model.lm_head.weight[VOCAB:] = 0
        model.lm_head.weight[VOCAB:, 0] = 100.0
        model.lm_head.weight[VOCAB + 1 :, 0] = -100.0
    assert max(greedy(model, [1, 2, 3], 6, vocab=64)) >= VOCAB
    source = ModelSource(DraftModel(model, VOCAB))
    proposal = source.propose([row([1, 2, 3])], [6])[0]
    assert proposal.tokens == greedy(model, [1, 2, 3], 6)


def test_a22_a_model_that_cannot_embed_all_ids_is_refused() -> None:
    with pytest.raises(InvalidValueError, match=r"draft\.path.*embeds 41 ids, not 40"):
        DraftModel(tiny(), VOCAB + 1)


def tokenizer(tokens: list[str]) -> Any:
    return SimpleNamespace(get_vocab=lambda: {token: index for index, token in enumerate(tokens)})


def test_a22_equal_tokenizers_pass() -> None:
    check_tokenizers(tokenizer(["a", "b", "c"]), tokenizer(["a", "b", "c"]))


@pytest.mark.parametrize("other", [["a", "c", "b"], ["a"], ["a", "x", "c", "d"]])
def test_a22_the_first_differing_token_id_is_named(other: list[str]) -> None:
    with pytest.raises(InvalidValueError, match="token id 1 is 'b'"):
        check_tokenizers(tokenizer(["a", "b", "c"]), tokenizer(other))


def test_a22_a_longer_draft_vocabulary_is_refused_at_its_first_extra_id() -> None:
    with pytest.raises(InvalidValueError, match="token id 2 is None"):
        check_tokenizers(tokenizer(["a", "b"]), tokenizer(["a", "b", "c"]))


def test_a18_a_model_with_nan_logits_proposes_nothing_and_neighbours_go_on() -> None:
    broken, sound = tiny(), tiny()
    with torch.no_grad():
        broken.lm_head.weight[3] = float("nan")
    source = ModelSource(DraftModel(sound, VOCAB))
    source.attach("ill", DraftModel(broken, VOCAB))
    one, two = source.propose([row([1, 2], domain="ill"), row([1, 2])], [3, 3])
    assert one is EMPTY
    assert two.tokens == greedy(sound, [1, 2], 3)


def test_sampled_rows_are_guessed_with_the_verifiers_noise() -> None:
    model, noise = tiny(4), TableNoise(7)
    source = ModelSource(DraftModel(model, VOCAB, candidates=VOCAB))
    item = row([1, 2, 3, 4], prompt_length=2, temperature=0.8, noise=noise)
    tokens = source.propose([item], [4])[0].tokens
    text = list(item.tokens)
    with torch.inference_mode():
        for depth in range(4):
            scores = model(torch.tensor([text])).logits[0, -1].double().log_softmax(-1) / 0.8
            text.append(int((scores + noise.table[2 + depth]).argmax()))
    assert tokens == tuple(text[4:])
    assert tokens != greedy(model, item.tokens, 4)


def test_a_domains_own_model_drafts_for_it_and_its_children() -> None:
    common, special = tiny(5), tiny(6)
    source = ModelSource(DraftModel(common, VOCAB))
    source.attach("math", DraftModel(special, VOCAB))
    source.add_domain("algebra", "math")
    rows = [row([1, 2, 3], domain=d) for d in ("base", "math", "algebra")]
    tokens = [p.tokens for p in source.propose(rows, [3] * 3)]
    own, other = greedy(special, [1, 2, 3], 3), greedy(common, [1, 2, 3], 3)
    assert tokens == [other, own, own]
    source.drop_domain("math")
    assert source.propose([row([1, 2, 3], domain="math")], [3])[0].tokens == other


def test_a_request_that_changes_domain_gets_a_fresh_cache() -> None:
    common, special = tiny(5), tiny(6)
    source = ModelSource(DraftModel(common, VOCAB))
    source.attach("math", DraftModel(special, VOCAB))
    item = row([1, 2, 3])
    source.propose([item], [3])
    assert source.unread(item) == 1
    item.domain = "math"
    assert source.unread(item) == 3
    assert source.propose([item], [3])[0].tokens == greedy(special, [1, 2, 3], 3)


def test_without_a_model_it_is_silent() -> None:
    assert ModelSource().propose([row([1, 2])], [4]) == [EMPTY]


def test_the_floor_ends_a_chain_once_whole_acceptance_is_unlikely() -> None:
    source = ModelSource(DraftModel(tiny(7), VOCAB))
    full = source.propose([row([1, 2, 3])], [6])[0]
    cut = source.propose_priced([row([1, 2, 3])], [6], [full.reach[1]])[0]
    assert cut.tokens == full.tokens[:2]


def test_sliding_window_models_take_back_rejections() -> None:
    torch.manual_seed(8)
    config = MistralConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=6,
        initializer_range=0.5,
    )
    model = MistralForCausalLM(config).eval()
    source = ModelSource(DraftModel(model, VOCAB))
    item = row([1, 2, 3])
    for _ in range(8):
        proposal = source.propose([item], [4])[0]
        assert proposal.tokens == greedy(model, item.tokens, 4)
        item.tokens += [proposal.tokens[0], (proposal.tokens[1] + 1) % VOCAB]


def test_the_older_name_of_the_cache_argument_works_too() -> None:
    inner = tiny(9).eval()

    class Older(torch.nn.Module):
        config = inner.config
        device = inner.device

        def get_input_embeddings(self) -> torch.nn.Module:
            return inner.get_input_embeddings()

        def forward(
            self, input_ids: torch.Tensor, past_key_values: DynamicCache, use_cache: bool = True
        ) -> Any:
            name = "cache" if DraftModel(inner, VOCAB)._cache_name == "cache" else "past_key_values"
            return inner(input_ids=input_ids, use_cache=use_cache, **{name: past_key_values})

    source = ModelSource(DraftModel(Older(), VOCAB))
    assert source.propose([row([1, 2, 3])], [4])[0].tokens == greedy(inner, [1, 2, 3], 4)


@pytest.mark.parametrize("fails_at", [0, 1, 3])
def test_a_pass_that_raises_leaves_nothing_behind_that_later_proposals_build_on(fails_at: int) -> None:
    draft = DraftModel(tiny(1), VOCAB)
    source = ModelSource(draft)
    batch = [row([1, 2, 3, 4]), row([7, 8])]
    for item, proposal in zip(batch, source.propose(batch, [4, 4]), strict=True):
        item.tokens += [*proposal.tokens[:2], 5, 6]
    read, passes = draft.next_logits, []

    def failing(*arguments: Any) -> torch.Tensor:
        passes.append(1)
        if len(passes) > fails_at:
            raise RuntimeError("out of memory")
        return read(*arguments)

    draft.next_logits = failing
    with pytest.raises(RuntimeError, match="out of memory"):
        source.propose(batch, [4, 4])
    draft.next_logits = read
    for item in batch:
        item.tokens.append(9)
    for item, proposal in zip(batch, source.propose(batch, [4, 4]), strict=True):
        assert proposal.tokens == greedy(draft.model, item.tokens, 4)


def test_two_loads_never_change_the_process_default_type_at_once(tmp_path: Path) -> None:
    """The library sets it while it loads and then puts back what it found."""
    seen = []

    def noted(*_: Any, **__: Any) -> LlamaForCausalLM:
        seen.append(model_kind._LOADING.locked())
        return tiny()

    with (
        patch.object(model_kind.AutoModelForCausalLM, "from_pretrained", noted),
        patch.object(model_kind.AutoModelForCausalLM, "from_config", noted),
    ):
        model_kind._read(str(tmp_path), "bfloat16")
        model_kind._least_bytes(LlamaConfig(dtype="bfloat16"), "auto")
    assert seen == [True, True]
    assert not model_kind._LOADING.locked()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "llama-bias"])
def test_a_models_size_is_known_without_its_weights(kind: str, dtype: str) -> None:
    model = tiny_model(kind).to(getattr(torch, dtype))
    before = torch.get_default_dtype()
    assert model_kind._least_bytes(model.config, dtype) == DraftModel(model, 128).nbytes
    assert torch.get_default_dtype() == before
