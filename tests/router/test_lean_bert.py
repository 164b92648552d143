"""The embedder's own BERT forward: the library's vectors, and the library for what it does not do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import BertConfig, BertModel, DistilBertConfig, DistilBertModel

from router.mind.lean_bert import LeanBert, bert_obstacle


def tiny(**options: Any) -> BertModel:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=60,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=40,
        initializer_range=0.3,
        **options,
    )
    return BertModel(config, add_pooling_layer=False).eval()


def lean(model: BertModel, dtype: torch.dtype) -> LeanBert:
    try:
        return LeanBert(model, dtype)
    except (RuntimeError, NotImplementedError, AttributeError):
        pytest.skip("this build of torch has no blocked weights")


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 0.1)])
@pytest.mark.parametrize("length", [1, 7, 40])
def test_the_token_vectors_are_the_librarys(dtype: torch.dtype, tolerance: float, length: int):
    model = tiny()
    form = lean(model, dtype)
    inputs = {
        "input_ids": torch.randint(0, 60, (1, length)),
        "attention_mask": torch.ones(1, length, dtype=torch.long),
        "token_type_ids": torch.zeros(1, length, dtype=torch.long),
    }
    with torch.inference_mode():
        found, expected = form(**inputs).last_hidden_state, model(**inputs).last_hidden_state
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("what", ["padding", "types", "batch"])
def test_what_it_does_not_compute_goes_to_the_library(what: str):
    model = tiny()
    form = lean(model, torch.float32)
    ids = torch.randint(0, 60, (2 if what == "batch" else 1, 6))
    inputs = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "token_type_ids": torch.zeros_like(ids),
    }
    if what == "padding":
        inputs["attention_mask"][:, 4:] = 0
    if what == "types":
        inputs["token_type_ids"][:, 3:] = 1
    with torch.inference_mode():
        found, expected = form(**inputs).last_hidden_state, model(**inputs).last_hidden_state
    assert torch.equal(found, expected)


def test_other_models_are_named_as_obstacles():
    assert bert_obstacle(tiny()) is None
    assert bert_obstacle(tiny(hidden_act="relu")) == "its activation is relu"
    other = DistilBertModel(DistilBertConfig(vocab_size=60, dim=32, n_layers=1, n_heads=4, hidden_dim=48))
    assert bert_obstacle(other) == "it is a distilbert model"
    assert bert_obstacle(torch.nn.Linear(2, 2)) == "it is a Linear model"
