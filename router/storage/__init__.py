"""What survives a restart in one SQLite file; used by bodies and applications alike."""

from router.storage.database import Storage
from router.storage.folder import FolderLock, StorageError

__all__ = ["FolderLock", "Storage", "StorageError"]
