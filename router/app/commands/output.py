"""What commands print."""

from __future__ import annotations

import json
from typing import Any

import typer


def print_json(content: Any) -> None:
    """Print ``content`` as indented JSON, letters of all alphabets as they are."""
    typer.echo(json.dumps(content, indent=2, ensure_ascii=False))
