"""The state folder: made, writable, and used by one process at a time."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO

from drafts.errors import PolydraftError


class StorageError(PolydraftError):
    """A state folder or database that cannot be used; names it and the reason."""

    code = "storage"


class FolderLock:
    """Holds ``folder`` for this process until :meth:`release`, or until the process ends.

    The operating system drops the lock of a process that dies, so a crash leaves nothing to clean up.

    Raises:
        StorageError: the folder cannot be made or written, or another process holds it (named by
            its process id).
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file: IO[str] = open(folder / "lock", "a+", encoding="utf-8")  # noqa: SIM115
        except OSError as error:
            raise StorageError(f"state folder {folder} is not writable: {error.strerror}") from None
        if not _lock(self._file):
            self._file.seek(0)
            holder = self._file.read().strip() or "unknown"
            self._file.close()
            raise StorageError(f"state folder {folder} is in use by another process (pid {holder})")
        self._file.truncate(0)
        self._file.write(str(os.getpid()))
        self._file.flush()

    def release(self) -> None:
        """Let others use the folder. Idempotent."""
        self._file.close()


def _lock(file: IO[str]) -> bool:
    """Take the lock without waiting; false if it is held."""
    try:
        import fcntl
    except ImportError:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
