"""A folder that appears whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from drafts.errors import InvalidValueError


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A place beside ``folder`` to write to, renamed at the end; removed if anything fails on the way.

    Raises:
        InvalidValueError: ``folder`` cannot be made there.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError as error:
        raise InvalidValueError(
            "--out", str(folder), f"a folder that can be made ({error.strerror})"
        ) from None
    try:
        yield part
        part.chmod(0o755)
        os.replace(part, folder)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
