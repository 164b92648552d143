"""Limits and reuse as a deployment sees them: deadlines, tokens in flight, stored prefixes."""

from typing import Any
from unittest.mock import patch

import pytest

from drafts.errors import InvalidValueError
from osd.types import FinishReason
from tests.router import tiny_engine as rig

LONG = "the boat sails past the harbour and the anchor is up, "


def with_engine(**changes: Any) -> Any:
    return patch.dict(rig.CONFIG, {"engine": {**rig.CONFIG["engine"], **changes}})


def test_a_repeated_prompt_is_reused_told_and_forgotten_with_the_mode() -> None:
    asked = {"template": False, "max_tokens": 6, "temperature": 0.0, "ignore_eos": True}
    with rig.tiny_engine() as engine:
        first = engine.generate(LONG, **asked)
        again = engine.generate(LONG, **asked)
        assert again.token_ids == first.token_ids
        assert (first.cached_tokens, again.cached_tokens) == (0, (len(LONG) - 1) // 16 * 16)
        figures = engine.stats()["prefix_cache"]
        assert (figures["requests"], figures["hits"]) == (2, 1)
        assert figures["tokens_reused"] == again.cached_tokens
        assert figures["tokens_room"] == 8192
        engine.set_mode(sources=(), learn=False, k=None)
        assert engine.stats()["prefix_cache"]["tokens_held"] == 0
        plain = engine.generate(LONG, **asked)
        assert (plain.token_ids, plain.cached_tokens) == (first.token_ids, 0)


def test_a_deployments_limits_reach_its_engine() -> None:
    limits = {"max_tokens_in_flight": 64, "request_timeout": 1e-6, "prefix_cache_tokens": 0}
    with with_engine(**limits), rig.tiny_engine() as engine:
        with pytest.raises(InvalidValueError, match=r"engine\.max_tokens_in_flight"):
            engine.submit("boat", max_tokens=200)
        late = engine.generate("boat", max_tokens=8)
        assert (late.finish_reason, late.token_ids) == (FinishReason.TIMEOUT, ())
        assert engine.generate("boat", max_tokens=8, timeout=600.0).finish_reason != FinishReason.TIMEOUT
        assert engine.stats()["prefix_cache"]["bytes"] == 0
