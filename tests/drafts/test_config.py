from __future__ import annotations

import pytest
from pydantic import BaseModel, ValidationError

from drafts.config import DraftsConfig, EagleConfig, LookupConfig, ModelConfig, NgramConfig

ALL = (DraftsConfig, LookupConfig, NgramConfig, EagleConfig, ModelConfig)


def test_defaults_are_valid_and_frozen() -> None:
    config = DraftsConfig()
    assert config.sources == ("lookup", "ngram", "eagle")
    with pytest.raises(ValidationError):
        config.max_depth = 3  # type: ignore[misc]


@pytest.mark.parametrize("model", ALL)
def test_every_field_has_a_sentence(model: type[BaseModel]) -> None:
    for name, field in model.model_fields.items():
        assert (field.description or "").endswith("."), name


@pytest.mark.parametrize("model", ALL)
def test_b29_unknown_keys_are_refused(model: type[BaseModel]) -> None:
    with pytest.raises(ValidationError, match="treshold"):
        model.model_validate(
            {"path": "somewhere", "treshold": 1} if model is ModelConfig else {"treshold": 1}
        )


def test_unknown_sources_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ValidationError, match=r"sources\[1\].*'eagel'.*known: eagle, lookup, model, ngram"):
        DraftsConfig(sources=("lookup", "eagel"))


def test_repeated_sources_are_refused() -> None:
    with pytest.raises(ValidationError, match="at most once"):
        DraftsConfig(sources=("lookup", "lookup"))


@pytest.mark.parametrize(
    ("model", "value"),
    [
        (DraftsConfig, {"max_depth": 0}),
        (DraftsConfig, {"keep_versions": 0}),
        (LookupConfig, {"min_match": 0}),
        (LookupConfig, {"min_match": 4, "max_match": 3}),
        (NgramConfig, {"min_order": 3, "max_order": 2}),
        (NgramConfig, {"floor": 1.0}),
        (NgramConfig, {"own_weight": float("nan")}),
        (NgramConfig, {"own_weight": float("inf")}),
        (NgramConfig, {"max_bytes": 10}),
        (EagleConfig, {"rank": 0}),
        (ModelConfig, {"path": ""}),
        (ModelConfig, {}),
    ],
)
def test_values_out_of_bounds_are_refused(model: type[BaseModel], value: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        model.model_validate(value)


def test_a_domains_own_draft_parses_as_written_in_config() -> None:
    draft = ModelConfig.model_validate({"kind": "model", "path": "some/model"})
    assert draft.path == "some/model"


@pytest.mark.parametrize("rank", [1, 16, 1024, "full"])
def test_a_rank_is_a_number_or_full(rank) -> None:
    assert EagleConfig(rank=rank).rank == rank


@pytest.mark.parametrize("rank", [0, 1025, "half"])
def test_another_rank_is_refused_by_name(rank) -> None:
    with pytest.raises(ValidationError, match="rank"):
        EagleConfig(rank=rank)
