"""Prompts that train a trunk: read from traffic files, made into the tokens that serving would make."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drafts.errors import ContextLengthError, InvalidValueError
from osd.serve.collect import Prompt
from router.app.traffic import TrafficItem, read_traffic
from router.bodies.prompts import PromptBuilder


def read_prompts(
    files: Sequence[Path],
    exclude: Sequence[Path],
    tokenizer: Any,
    max_prompt: int,
    *,
    skip_long: bool = False,
) -> tuple[list[Prompt], int]:
    """The prompts of ``files`` without repeats and without those of ``exclude``, and how many were too long.

    A conversation is left out too where its last user message is one of the excluded.

    Raises:
        InvalidValueError: No file or no prompt left, a bad line, or a prompt of more than ``max_prompt``
            tokens unless ``skip_long``; names file and line.
    """
    if not files:
        raise InvalidValueError("--prompts", None, "at least one file of prompts, JSON Lines")
    kept_out = {item.text.strip() for path in exclude for item in read_traffic(path)}
    builder = PromptBuilder(tokenizer, max_prompt + 1)
    found: dict[tuple[int, ...], Prompt] = {}
    long = 0
    for path in files:
        for item in read_traffic(path):
            if item.text.strip() in kept_out:
                continue
            try:
                prompt = _prompt(item, builder)
            except ContextLengthError as error:
                if not skip_long:
                    raise InvalidValueError(
                        f"{path}, line {item.line}: prompt",
                        error.value,
                        f"at most {max_prompt}; shorten it, raise --max-prompt, or give --skip-long",
                    ) from None
                long += 1
            else:
                found.setdefault(prompt.ids, prompt)
    if not found:
        raise InvalidValueError(
            "--prompts", [str(path) for path in files], "at least one prompt that is not excluded"
        )
    return list(found.values()), long


def _prompt(item: TrafficItem, builder: PromptBuilder) -> Prompt:
    """One line as the target reads it; text is stripped, so that blanks at an end make no new prompt."""
    messages = [{**message, "content": str(message["content"]).strip()} for message in item.messages]
    ids, _ = builder.build(None, messages, template=True)
    if len(ids) < 2:
        raise InvalidValueError(f"line {item.line}: prompt", item.text, "at least two tokens")
    return Prompt(item.label or "", item.source or "unknown", item.text.strip(), ids)
