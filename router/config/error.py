"""The error of a config file: where, what was found, what is allowed."""

from __future__ import annotations

from collections.abc import Sequence

from drafts.errors import InvalidValueError


class ConfigError(InvalidValueError):
    """A config file (or an environment variable that overrides it) that cannot be used.

    Args:
        file: The file, or the environment variable.
        field: Key path, for example ``domains[2].name``; empty for the file as a whole.
        value: What was found there.
        allowed: What would be accepted, with the nearest valid key where one was misspelt.
        line: Line in the file, from 1, where it is known.
        others: Further errors of the same file, already as text.
    """

    code = "invalid_config"

    def __init__(
        self,
        file: str,
        field: str,
        value: object,
        allowed: str,
        *,
        line: int | None = None,
        others: Sequence[str] = (),
    ) -> None:
        super().__init__(field or "the file", value, allowed)
        self.file = file
        self.line = line
        self.others = tuple(others)
        place = file if line is None else f"{file}:{line}"
        self.args = ("\n".join([f"{place}: {self.args[0]}", *self.others]),)
