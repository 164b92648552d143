"""Files of tensors that are whole or absent: safetensors, checksummed, written aside and renamed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from drafts.errors import CheckpointError, UnflushedError

_PROCESS = secrets.token_hex(4)
"""Tells this process's unfinished files from those of one that was killed."""


def checksum(tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 over names, types, shapes and bytes, the same however the tensors are laid out or placed."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def save_tensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> str:
    """Write ``tensors`` and ``metadata`` to ``path`` as one atomic step; returns the tensors' checksum.

    After a crash at any moment ``path`` holds the old content or the new (case B26): the data is
    flushed under a temporary name in the same folder, renamed, and the folder is flushed too.

    Raises:
        CheckpointError: The file cannot be written; names it and the reason.
    """
    total = checksum(tensors)
    sealed = {**metadata, "checksum": total}
    sealed["seal"] = _seal(sealed)
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_atomically(path, save(_unshared(plain), metadata=sealed))
    return total


def load_tensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Tensors and metadata (``checksum`` included) of a file that :func:`save_tensors` wrote.

    Raises:
        CheckpointError: The file is missing, truncated, or its content does not match its checksum.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
            # A copy: the file may be replaced or pruned while the tensors live.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    expected, seal = metadata.get("checksum"), metadata.pop("seal", None)
    if expected is None or seal is None:
        raise CheckpointError(f"{path}: has no checksum")
    if seal != _seal(metadata):
        raise CheckpointError(f"{path}: metadata does not match its checksum")
    found = checksum(tensors)
    if found != expected:
        raise CheckpointError(f"{path}: checksum is {found}, the file was written with {expected}")
    return tensors, metadata


def write_atomically(path: Path, data: bytes) -> None:
    """Replace ``path`` with ``data``; an existing file keeps its mode bits.

    Raises:
        UnflushedError: The file is in place, but a power cut may still undo that.
        CheckpointError: The file cannot be written; ``path`` is unchanged then.
    """
    temporary = path.with_name(f".{path.name}.{_PROCESS}.{secrets.token_hex(4)}.tmp")
    try:
        make_folder(path.parent)
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            if path.exists():
                os.fchmod(file.fileno(), path.stat().st_mode & 0o7777)
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise CheckpointError(f"{path}: cannot be written: {error}") from error
    try:
        flush_folder(path.parent)
    except OSError as error:
        raise UnflushedError(f"{path}: written, but not flushed: {error}") from error


def make_folder(folder: Path) -> None:
    """Make ``folder`` and what is missing above it, so that they survive a power cut with their files."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        flush_folder(folder.parent)


def flush_folder(folder: Path) -> None:
    """Make renames and removals in ``folder`` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def clean_leftovers(folder: Path) -> list[Path]:
    """Remove unfinished files of processes that died; for the folder's one owner, on opening it."""
    leftovers = [p for p in folder.rglob(".*.tmp") if f".{_PROCESS}." not in p.name]
    for path in leftovers:
        path.unlink(missing_ok=True)
    return leftovers


def _seal(metadata: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(dict(metadata), sort_keys=True).encode()).hexdigest()


def _unshared(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies where two names share storage, which safetensors refuses."""
    seen: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        pointer = tensor.untyped_storage().data_ptr()
        result[name] = tensor.clone() if pointer in seen else tensor
        seen.add(pointer)
    return result
