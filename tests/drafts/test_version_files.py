from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from drafts import version_files
from drafts.checkpoint import load_tensors
from drafts.errors import CheckpointError
from drafts.registry import Registry
from tests.drafts.registry_rig import published, served, weights


def test_reopening_restores_versions_service_and_events(tmp_path: Path) -> None:
    first = published(Registry(tmp_path), 3)
    first.rollback("math", to=1, reason="worse")
    first.clone("math", "algebra")
    again = Registry(tmp_path)
    assert again.lineage("math") == first.lineage("math")
    assert again.lineage("algebra") == first.lineage("algebra")
    assert again.events() == first.events()
    assert served(again) == 1
    assert again.publish("math", weights(4), reason="r").number == 3


def test_a27_the_file_has_the_checksum_of_what_is_served(tmp_path: Path) -> None:
    registry = published(Registry(tmp_path), 2)
    version = registry.current("math")
    assert version is not None
    tensors, metadata = load_tensors(tmp_path / "math" / "v0001.safetensors")
    assert metadata["checksum"] == registry.checksum(version)
    assert torch.equal(tensors["down"], version.tensors["down"])


def test_pruned_and_dropped_versions_leave_no_files(tmp_path: Path) -> None:
    registry = published(Registry(tmp_path, keep=2), 4)
    assert sorted(p.name for p in (tmp_path / "math").iterdir()) == ["v0002.safetensors", "v0003.safetensors"]
    registry.drop("math")
    assert not (tmp_path / "math").exists()
    assert Registry(tmp_path).domains() == []


@pytest.mark.parametrize("size", [0, 100, -1])
def test_b26_a_truncated_version_is_set_aside_and_the_one_before_served(
    tmp_path: Path, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    published(Registry(tmp_path), 3)
    path = tmp_path / "math" / "v0002.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with caplog.at_level(logging.ERROR):
        again = Registry(tmp_path)
    assert str(path) in caplog.text
    assert served(again) == 1
    assert again.events()[-1]["kind"] == "fallback"
    assert path.with_name("v0002.safetensors.corrupt").exists()
    assert again.publish("math", weights(4), reason="r").number == 3


def test_b26_when_no_version_can_be_read_others_are_undisturbed(tmp_path: Path) -> None:
    registry = published(Registry(tmp_path), 1)
    registry.publish("code", weights(2), reason="r")
    (tmp_path / "math" / "v0000.safetensors").write_bytes(b"")
    again = Registry(tmp_path)
    assert again.domains() == ["code"]
    assert again.publish("math", weights(0), reason="anew").number == 1
    assert Registry(tmp_path).domains() == ["code", "math"]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"served": [], "next": {}, "events": []}'])
def test_b26_a_broken_index_is_set_aside_and_the_newest_versions_served(
    tmp_path: Path, content: bytes
) -> None:
    published(Registry(tmp_path), 3)
    (tmp_path / version_files.INDEX).write_bytes(content)
    again = Registry(tmp_path)
    assert served(again) == 2
    assert (tmp_path / f"{version_files.INDEX}.corrupt").exists()


def test_b26_a_version_written_but_not_yet_announced_is_not_served(tmp_path: Path) -> None:
    registry = published(Registry(tmp_path), 2)
    index = (tmp_path / version_files.INDEX).read_bytes()
    registry.publish("math", weights(9), reason="r")
    (tmp_path / version_files.INDEX).write_bytes(index)
    again = Registry(tmp_path)
    assert served(again) == 1
    assert again.publish("math", weights(9), reason="r").number == 3


def test_b26_a_failed_write_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = published(Registry(tmp_path), 2)
    before = (registry.serial, registry.lineage("math"), registry.events())
    for broken in ("save_tensors", "write_atomically"):

        def fail(*_: object) -> None:
            raise CheckpointError("disk full")

        with monkeypatch.context() as patch:
            patch.setattr(version_files, broken, fail)
            with pytest.raises(CheckpointError, match="disk full"):
                registry.publish("math", weights(9), reason="r")
        assert (registry.serial, registry.lineage("math"), registry.events()) == before
    assert len(list((tmp_path / "math").iterdir())) == 2


def test_b26_unfinished_files_are_removed_on_opening(tmp_path: Path) -> None:
    published(Registry(tmp_path), 1)
    leftover = tmp_path / "math" / ".v0001.safetensors.0badc0de.1.tmp"
    leftover.write_bytes(b"half")
    Registry(tmp_path)
    assert not leftover.exists()


def test_b26_a_domain_dropped_just_before_a_kill_does_not_come_back(tmp_path: Path) -> None:
    registry = published(Registry(tmp_path), 2)
    content = (tmp_path / "math" / "v0001.safetensors").read_bytes()
    registry.drop("math")
    (tmp_path / "math").mkdir()
    (tmp_path / "math" / "v0001.safetensors").write_bytes(content)
    again = Registry(tmp_path)
    assert again.domains() == []
    assert not (tmp_path / "math").exists()
