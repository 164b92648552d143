from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from drafts.checkpoint import checksum, clean_leftovers, load_tensors, save_tensors, write_atomically
from drafts.errors import CheckpointError

TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "scalar": torch.tensor(3.0),
    "empty": torch.zeros(0, 4),
    "ids": torch.tensor([2**62, -1]),
    "flags": torch.tensor([True, False]),
}


def test_round_trip_is_exact_with_metadata(tmp_path: Path) -> None:
    total = save_tensors(tmp_path / "x.safetensors", TENSORS, {"reason": "why"})
    tensors, metadata = load_tensors(tmp_path / "x.safetensors")
    assert metadata == {"reason": "why", "checksum": total}
    assert set(tensors) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert tensors[name].dtype == tensor.dtype
        assert torch.equal(tensors[name], tensor)


def test_views_and_tied_tensors_are_saved(tmp_path: Path) -> None:
    base = torch.randn(4, 4)
    saved = {"one": base, "two": base, "turned": base.T, "part": base[1:3]}
    save_tensors(tmp_path / "x", saved, {})
    tensors, _ = load_tensors(tmp_path / "x")
    assert all(torch.equal(tensors[name], saved[name]) for name in saved)


def test_checksum_sees_values_names_types_and_shapes_but_not_layout() -> None:
    base = torch.arange(4, dtype=torch.float32).reshape(2, 2)
    total = checksum({"a": base})
    assert checksum({"a": base.T.contiguous().T}) == total
    others = [{"b": base}, {"a": base.reshape(4)}, {"a": base.view(torch.int32)}, {"a": base + 1e-6}]
    assert total not in [checksum(other) for other in others]


@pytest.mark.parametrize("cut", [0, 4, 40, -1])
def test_b26_truncated_files_are_refused_by_name(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "x.safetensors"
    save_tensors(path, TENSORS, {})
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(CheckpointError, match=r"x\.safetensors"):
        load_tensors(path)


def test_b26_a_changed_value_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "x"
    save_tensors(path, TENSORS, {})
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(CheckpointError, match="checksum is"):
        load_tensors(path)


def test_b26_changed_metadata_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "x"
    save_tensors(path, TENSORS, {"score": "0.5"})
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    header["__metadata__"]["score"] = "0.9"
    changed = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(changed)) + changed + data[8 + size :])
    with pytest.raises(CheckpointError, match="metadata"):
        load_tensors(path)


def test_missing_and_foreign_files_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    with pytest.raises(CheckpointError, match="absent"):
        load_tensors(tmp_path / "absent")
    save_file({"a": torch.zeros(1)}, tmp_path / "foreign")
    with pytest.raises(CheckpointError, match="no checksum"):
        load_tensors(tmp_path / "foreign")


def test_an_unwritable_target_is_named_and_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(CheckpointError, match="folder"):
        write_atomically(tmp_path / "folder", b"data")
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


def test_b26_mode_bits_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "x"
    save_tensors(path, TENSORS, {})
    path.chmod(0o640)
    save_tensors(path, TENSORS, {"again": "yes"})
    assert path.stat().st_mode & 0o777 == 0o640


def test_leftovers_of_dead_processes_are_removed_and_own_ones_kept(tmp_path: Path) -> None:
    from drafts import checkpoint

    (tmp_path / "d").mkdir()
    dead = tmp_path / "d" / ".v0001.safetensors.0badc0de.11.tmp"
    own = tmp_path / "d" / f".v0001.safetensors.{checkpoint._PROCESS}.11.tmp"
    other = tmp_path / "d" / "notes.tmp"
    for path in (dead, own, other):
        path.write_bytes(b"")
    assert clean_leftovers(tmp_path) == [dead]
    assert own.exists()
    assert other.exists()


WRITER = """
import sys, itertools, torch
from pathlib import Path
from drafts.checkpoint import save_tensors
for n in itertools.count():
    save_tensors(Path(sys.argv[1]), {"a": torch.full((200_000,), float(n))}, {"n": str(n)})
    print(n, flush=True)
"""


def test_b26_a_kill_leaves_a_whole_file_with_its_own_metadata(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    for delay in (0.0, 0.004, 0.011):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, env={**os.environ}
        )
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        tensors, metadata = load_tensors(path)
        assert torch.equal(tensors["a"], torch.full((200_000,), float(metadata["n"])))
        clean_leftovers(tmp_path)
        assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]
