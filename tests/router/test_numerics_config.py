"""``target.numerics`` reaches the loader, and only the words it knows get past the config."""

from typing import Any

import pytest
from pydantic import ValidationError

from drafts.errors import InvalidValueError
from osd.config import TargetConfig
from router.bodies import embedded
from router.config import PolydraftConfig


@pytest.mark.parametrize("numerics", ["fast", "strict"])
def test_the_config_says_which_numerics_a_target_is_loaded_with(
    numerics: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def load(*_: Any, **options: Any) -> Any:
        asked.update(options)
        raise InvalidValueError("target.model", "none", "not in this test")

    monkeypatch.setattr("router.bodies.target.load_target", load)
    config = PolydraftConfig.model_validate({"target": {"numerics": numerics}})
    with pytest.raises(InvalidValueError, match="not in this test"):
        embedded.Engine.from_config(config)
    assert asked["numerics"] == numerics


def test_fast_is_the_default_and_other_words_are_refused() -> None:
    assert TargetConfig().numerics == "fast"
    with pytest.raises(ValidationError, match="numerics"):
        TargetConfig.model_validate({"numerics": "exact"})
