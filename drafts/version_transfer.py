"""One domain's versions as one self-contained file, for another deployment or for keeping."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from drafts.checkpoint import load_tensors, save_tensors
from drafts.errors import CheckpointError, PolydraftError, VersionsFileError
from drafts.version import Version
from drafts.version_checks import check_domain_name, check_finite, check_same_form, check_same_tables

FORMAT = "polydraft-versions-1"


@dataclass(frozen=True)
class Exported:
    """What a file of versions holds.

    Attributes:
        domain: The domain they were exported from.
        served: Number of the version that it served.
        versions: All of them, oldest first.
    """

    domain: str
    served: int
    versions: list[Version]


def write_export(path: Path, versions: Sequence[Version], served: int, trunk: str | None) -> None:
    """Write ``versions`` to ``path`` as one safetensors file with everything that is known of them.

    Raises:
        CheckpointError: The file cannot be written.
    """
    tensors = {f"{v.number}/{name}": tensor for v in versions for name, tensor in v.tensors.items()}
    described = {
        "format": FORMAT,
        "domain": versions[0].domain,
        "served": served,
        "trunk": trunk,
        "versions": [version.metadata() for version in versions],
    }
    save_tensors(path, tensors, {"export": json.dumps(described)})


def read_export(path: Path, trunk: str | None, check: Callable[[dict[str, torch.Tensor]], None]) -> Exported:
    """Read and check what :func:`write_export` wrote.

    Args:
        path: The file.
        trunk: Fingerprint of the trunk in use; ``None`` where there is none to compare with.
        check: Raises a :class:`~drafts.errors.PolydraftError` for weights that cannot be served.

    Raises:
        VersionsFileError: The file is missing, damaged, of another format or trunk, its versions differ in
            form, hold values that are not finite, or fail ``check``.
    """
    try:
        tensors, metadata = load_tensors(path)
        described = json.loads(metadata["export"])
        if described["format"] != FORMAT:
            raise CheckpointError(f"format is {described['format']!r}, expected {FORMAT!r}")
        if None not in (trunk, described["trunk"]) and described["trunk"] != trunk:
            raise CheckpointError(f"made for trunk {described['trunk']}, this deployment has {trunk}")
        check_domain_name(described["domain"])
        versions = []
        for item in described["versions"]:
            prefix = f"{int(item['number'])}/"
            own = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
            made_on = {"trunk": described["trunk"], **item}
            versions.append(Version(described["domain"], tensors=own, **made_on))
        _check_versions(versions, int(described["served"]), len(tensors))
        for version in versions:
            check(version.tensors)
    except (PolydraftError, KeyError, TypeError, ValueError) as error:
        reason = str(error).removeprefix(f"{path}: ")
        raise VersionsFileError(f"{path}: cannot be imported: {reason}") from error
    return Exported(described["domain"], int(described["served"]), versions)


def continued(
    path: Path, found: Exported, domain: str, following: int, base: Version | None
) -> tuple[list[Version], Version]:
    """The file's versions as ``domain`` takes them, and the one of them to serve.

    Args:
        path: The file, for messages.
        found: What it holds.
        domain: The domain that takes them.
        following: Least number that is free there; numbers are kept where they are free.
        base: What the domain serves now. The one to serve descends from it, so that a rollback undoes the
            import, and so do versions without a parent in the file.

    Raises:
        VersionsFileError: Form or tables differ from those of ``base``.
    """
    if base is not None:
        try:
            check_same_form("tensors", found.versions[0].tensors, base.tensors)
            check_same_tables("tensors", found.versions[0].tensors, base.tensors)
        except PolydraftError as error:
            raise VersionsFileError(f"{path}: does not fit domain {domain}: {error}") from error
    shift = max(0, following - found.versions[0].number)
    numbers = {version.number for version in found.versions}
    root = None if base is None else base.number

    def parent(version: Version) -> int | None:
        replaces = root is not None and version.number == found.served
        if version.parent is None or version.parent not in numbers or replaces:
            return root
        return version.parent + shift

    taken = [
        replace(
            version,
            domain=domain,
            number=version.number + shift,
            parent=parent(version),
        )
        for version in found.versions
    ]
    return taken, next(version for version in taken if version.number == found.served + shift)


def _check_versions(versions: Sequence[Version], served: int, tensors: int) -> None:
    numbers = [version.number for version in versions]
    if not numbers or numbers != sorted(set(numbers)) or numbers[0] < 0:
        raise CheckpointError(f"versions are numbered {numbers}, expected one or more in rising order")
    if served not in numbers:
        raise CheckpointError(f"serves version {served}, but holds {numbers}")
    if sum(len(version.tensors) for version in versions) != tensors:
        raise CheckpointError("holds tensors that belong to none of its versions")
    for version in versions:
        check_finite(f"v{version.number}.tensors", version.tensors)
        check_same_form(f"v{version.number}.tensors", version.tensors, versions[0].tensors)
        check_same_tables(f"v{version.number}.tensors", version.tensors, versions[0].tensors)
