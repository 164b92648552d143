"""Checks of a request's parameters against the target that is to answer it."""

from __future__ import annotations

from collections.abc import Collection

from drafts.errors import InvalidValueError
from osd.types import SamplingParams


def check_params(params: SamplingParams, vocab_size: int, end_ids: Collection[int]) -> None:
    """Refuse what this target cannot do.

    Args:
        params: The request's parameters.
        vocab_size: Columns of the target's logits.
        end_ids: End tokens of the target.

    Raises:
        InvalidValueError: Names the field, the value and what is allowed.
    """
    for token in params.logit_bias:
        if not 0 <= token < vocab_size:
            raise InvalidValueError("logit_bias", token, f"token ids 0..{vocab_size - 1} of this target")
    for index, token in enumerate(params.stop_token_ids):
        if token >= vocab_size:
            allowed = f"a token id 0..{vocab_size - 1} of this target"
            raise InvalidValueError(f"stop_token_ids[{index}]", token, allowed)
    if params.response_format is not None and params.ignore_eos:
        raise InvalidValueError("ignore_eos", True, "false with response_format, whose grammar ends the text")
