"""Makes the n-th call that changes the disk fail, or stop as a kill would."""

from __future__ import annotations

import errno
import os
import pathlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

CALLS = ("fsync", "replace", "unlink", "rmdir", "mkdir", "fchmod")


class Killed(BaseException):
    """Goes through every handler of ordinary errors, as a kill does."""


class Faults:
    """Counts the calls that change the disk; the one numbered ``at`` fails.

    Args:
        at: Number of the failing call, from 0.
        kill: Raise :class:`Killed` there instead of an ``OSError``.
        broken: Every later call fails too, as on a full or dying disk.
    """

    def __init__(self, at: int, kill: bool, broken: bool = False) -> None:
        self.at, self.kill, self.broken = at, kill, broken
        self.names: list[str] = []

    @property
    def struck(self) -> bool:
        return len(self.names) > self.at

    def pass_or_fail(self, name: str) -> None:
        number = len(self.names)
        self.names.append(name)
        if number == self.at or (self.broken and number > self.at):
            if self.kill:
                raise Killed(name)
            raise OSError(errno.EIO, f"{name} failed")

    @contextmanager
    def active(self) -> Iterator[Faults]:
        def wrapped(name: str) -> Callable[..., Any]:
            original = getattr(os, name)

            def call(*arguments: Any, **options: Any) -> Any:
                self.pass_or_fail(name)
                return original(*arguments, **options)

            return call

        opened = pathlib.Path.open

        def open_path(path: pathlib.Path, mode: str = "r", *rest: Any, **options: Any) -> Any:
            file = opened(path, mode, *rest, **options)
            return _Writing(file, self) if "x" in mode or "w" in mode else file

        patches = [patch.object(os, name, wrapped(name)) for name in CALLS]
        patches.append(patch.object(pathlib.Path, "open", open_path))
        for one in patches:
            one.start()
        try:
            yield self
        finally:
            for one in patches:
                one.stop()


class _Writing:
    """A file of which only half is written where the write fails."""

    def __init__(self, file: Any, faults: Faults) -> None:
        self._file, self._faults = file, faults

    def __enter__(self) -> _Writing:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, data: bytes) -> int:
        try:
            self._faults.pass_or_fail("write")
        except BaseException:
            self._file.write(data[: len(data) // 2])
            self._file.flush()
            raise
        return int(self._file.write(data))
