"""Files that travel with the project: default configs and demo traffic, in a wheel or a checkout."""

from __future__ import annotations

from pathlib import Path

from drafts.errors import UnknownNameError

_PACKAGE = Path(__file__).resolve().parent.parent
_CONFIGS = (_PACKAGE / "resources" / "configs", _PACKAGE.parent / "configs")
_TRAFFIC = (_PACKAGE / "resources" / "traffic", _PACKAGE.parent / "examples" / "traffic")


def find_config(name: str | Path) -> Path:
    """The config file meant by ``name``: an existing file, else a packaged config such as ``demo``.

    Raises:
        UnknownNameError: neither; lists the packaged ones.
    """
    return _find(name, _CONFIGS, ".yaml", "config")


def find_traffic(name: str | Path) -> Path:
    """The traffic file meant by ``name``: an existing file, else packaged traffic such as ``mixed``.

    Raises:
        UnknownNameError: neither; lists the packaged ones.
    """
    return _find(name, _TRAFFIC, ".jsonl", "traffic")


def _find(name: str | Path, folders: tuple[Path, ...], suffix: str, what: str) -> Path:
    path = Path(name)
    if path.exists():
        return path
    packaged = {file.stem: file for folder in reversed(folders) for file in sorted(folder.glob(f"*{suffix}"))}
    if str(name) in packaged:
        return packaged[str(name)]
    raise UnknownNameError(what, str(name), ["a file that exists", *packaged])
