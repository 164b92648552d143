"""Example prompts that a domain keeps in a file of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from router.config.error import ConfigError
from router.config.read import Document, KeyPath, shown


def read_examples(document: Document, folder: Path) -> None:
    """Replace every ``examples_file`` by the ``examples`` in it, so that the config stands alone.

    Raises:
        ConfigError: no such file, nothing in it, or a line that is no prompt.
    """
    domains = document.data.get("domains")
    for index, domain in enumerate(domains if isinstance(domains, list) else ()):
        name = domain.get("examples_file") if isinstance(domain, dict) else None
        if not isinstance(name, str) or domain.get("examples"):
            continue
        path: KeyPath = ("domains", index, "examples_file")
        domain["examples"] = _prompts(document, path, name, folder / Path(name).expanduser())
        domain["examples_file"] = None


def _prompts(document: Document, path: KeyPath, name: str, file: Path) -> list[str]:
    where = shown(path)
    try:
        lines = file.read_bytes().decode("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            document.file, where, name, f"a readable UTF-8 file ({error})", line=document.line(path)
        ) from None
    prompts = [
        line.strip() if file.suffix != ".jsonl" else _prompt(str(file), number, line)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not prompts:
        raise ConfigError(
            document.file, where, name, "a file with at least one prompt", line=document.line(path)
        )
    return prompts


def _prompt(file: str, number: int, line: str) -> str:
    try:
        record: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(file, "", line.strip(), f"one JSON object ({error.msg})", line=number) from None
    prompt = record.get("prompt") if isinstance(record, dict) else None
    if not isinstance(prompt, str) or not prompt.strip():
        raise ConfigError(file, "prompt", prompt, "text that is not blank", line=number)
    return prompt
