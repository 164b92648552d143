"""Whose answers a folder of shards holds: written by the collector, checked by whoever trains on them.

A shard itself is described in :mod:`osd.learn.pretrain_data`. A head is of use to one target only, and a
shard of another one would spoil it silently, so a folder belongs to one target and one choice of layers.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from drafts.checkpoint import clean_leftovers, write_atomically
from drafts.errors import CheckpointError

FACTS = "target.json"
"""Name of the file that says whose answers a folder holds."""


@dataclass(frozen=True)
class ShardFacts:
    """The target that answered, and which of its hidden states were kept.

    Attributes:
        name: What it was loaded from, for the reader only.
        fingerprint: Hash of its config and weights.
        vocab_size: Rows of its embedding.
        hidden_size: Width of its residual stream (H).
        feature_layers: Layers kept (1-based count of layers passed); features are ``H`` wide for each.
    """

    name: str
    fingerprint: str
    vocab_size: int
    hidden_size: int
    feature_layers: tuple[int, ...]

    def same_as(self, other: ShardFacts) -> bool:
        """Whether both describe the same target and layers, whatever it is called."""
        return (self.fingerprint, self.feature_layers) == (other.fingerprint, other.feature_layers)


def shard_files(folder: Path) -> list[Path]:
    """The ``.json`` files of all shards in ``folder``, in order."""
    return sorted(folder.glob("[0-9]*-*.json"))


def open_folder(folder: Path, facts: ShardFacts) -> None:
    """Make ``folder`` the place of ``facts``, and remove what a killed collector left unfinished.

    Raises:
        CheckpointError: It holds answers of another target or with other layers.
    """
    folder.mkdir(parents=True, exist_ok=True)
    clean_leftovers(folder)
    if not (folder / FACTS).exists():
        write_atomically(folder / FACTS, json.dumps(asdict(facts)).encode())
        return
    check_folder(folder, facts)


def check_folder(folder: Path, facts: ShardFacts) -> None:
    """Refuse a folder that is not the one of ``facts``.

    Raises:
        CheckpointError: It holds answers of another target or with other layers.
    """
    found = read_facts(folder)
    if not found.same_as(facts):
        raise CheckpointError(
            f"{folder}: holds answers of {_told(found)}; expected {_told(facts)}; name another folder"
        )


def read_facts(folder: Path) -> ShardFacts:
    """Whose answers ``folder`` holds.

    Raises:
        CheckpointError: It does not say, or its file is damaged.
    """
    path = folder / FACTS
    try:
        fields = json.loads(path.read_text())
        return ShardFacts(**{**fields, "feature_layers": tuple(fields["feature_layers"])})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: does not say whose answers these are ({error})") from error


def _told(facts: ShardFacts) -> str:
    return f"{facts.name} ({facts.fingerprint}) with layers {list(facts.feature_layers)}"
