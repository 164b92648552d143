"""A crash between any two writes leaves the old version or the new one: every call in turn, every change."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from drafts import registry as registry_module
from drafts import version_book
from drafts.errors import CheckpointError
from drafts.registry import Registry
from tests.drafts.fault_rig import Faults, Killed
from tests.drafts.registry_rig import published, weights

Change = Callable[[Registry], object]

CHANGES: dict[str, Change] = {
    "publish": lambda r: r.publish("math", weights(9), reason="r"),
    "publish the first": lambda r: r.publish("sql", weights(9), reason="r"),
    "rollback": lambda r: r.rollback("math"),
    "clone": lambda r: r.clone("math", "sql"),
    "merge into the better": lambda r: r.merge("math", "code", {"math": 0.6, "code": 0.5}),
    "merge into the worse": lambda r: r.merge("math", "code", {"math": 0.5, "code": 0.6}),
    "drop": lambda r: r.drop("math"),
    "import": lambda r: r.import_file(r._files.directory.parent / "exported", "code"),  # type: ignore[union-attr]
    "import as new": lambda r: r.import_file(r._files.directory.parent / "exported", "sql"),  # type: ignore[union-attr]
}


@pytest.fixture(autouse=True)
def _steady_clock() -> Iterator[None]:
    clock = SimpleNamespace(time=lambda: 1.0)
    with patch.object(registry_module, "time", clock), patch.object(version_book, "time", clock):
        yield


def prepared(folder: Path) -> Registry:
    """Rolled back, so that 'the version before' and 'the highest number' are different ones."""
    registry = published(Registry(folder / "drafts", keep=3), 3)
    registry.rollback("math", to=1)
    published(registry, 2, "code")
    registry.export("math", folder / "exported")
    return registry


def state(registry: Registry) -> Any:
    return [registry.lineage(domain) for domain in registry.domains()], registry.events()


def faults_in_turn(tmp_path: Path, **options: bool) -> Iterator[tuple[Registry, Faults, Any, Path]]:
    """The prepared registry again and again, with one more call let through each time."""
    for at in itertools.count():
        folder = tmp_path / str(at)
        registry = prepared(folder)
        yield registry, Faults(at, **options), state(registry), folder
        shutil.rmtree(folder)


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("how", ["fails", "fails and stays broken", "is killed"])
def test_b26_whichever_call_fails_the_registry_is_the_old_or_the_new(
    tmp_path: Path, name: str, how: str
) -> None:
    wanted = prepared(tmp_path / "whole")
    CHANGES[name](wanted)
    new, seen = state(wanted), set()
    options = {"kill": how == "is killed", "broken": how.endswith("broken")}
    for registry, faults, old, folder in faults_in_turn(tmp_path, **options):
        with faults.active():
            try:
                CHANGES[name](registry)
            except CheckpointError:
                assert not faults.kill
                assert state(registry) == old
            except Killed:
                pass
            else:
                assert state(registry) == new
        if not faults.struck:
            break
        again = Registry(folder / "drafts", keep=3)
        assert state(again) in (old, new), faults.names
        if not faults.kill:
            assert state(again) == state(registry), faults.names
        seen.add("new" if state(again) == new else "old")
        following = again.publish("math", weights(5), reason="after") if "math" in again.domains() else None
        assert state(Registry(folder / "drafts", keep=3)) == state(again)
        assert following is None or following.number >= 3
    assert seen == {"old", "new"}
    assert {"write", "fsync", "replace"} <= set(faults.names)


@pytest.mark.parametrize("name", ["publish", "merge into the worse", "drop", "import"])
def test_b26_a_second_kill_while_the_first_is_cleaned_up_changes_nothing(tmp_path: Path, name: str) -> None:
    wanted = prepared(tmp_path / "whole")
    CHANGES[name](wanted)
    new = state(wanted)
    for registry, faults, old, folder in faults_in_turn(tmp_path, kill=True):
        try:
            with faults.active():
                CHANGES[name](registry)
        except Killed:
            pass
        if not faults.struck:
            break
        for at in itertools.count():
            second = Faults(at, kill=True)
            try:
                with second.active():
                    Registry(folder / "drafts", keep=3)
            except Killed:
                continue
            break
        assert state(Registry(folder / "drafts", keep=3)) in (old, new)


@pytest.mark.parametrize("name", CHANGES)
def test_b26_a_change_that_succeeded_leaves_no_file_that_the_index_does_not_name(
    tmp_path: Path, name: str
) -> None:
    registry = prepared(tmp_path)
    CHANGES[name](registry)
    found = {str(p.relative_to(tmp_path / "drafts")) for p in (tmp_path / "drafts").rglob("*.*")}
    named = {f"{d}/v{v.number:04d}.safetensors" for d in registry.domains() for v in registry.versions(d)}
    assert found == {"registry.json", *named}


def test_b26_a_reopening_that_cannot_write_still_serves(tmp_path: Path) -> None:
    registry = prepared(tmp_path)
    path = tmp_path / "drafts" / "math" / "v0001.safetensors"
    path.write_bytes(b"")
    assert registry.current("math").number == 1  # type: ignore[union-attr]
    with Faults(0, kill=False, broken=True).active() as faults:
        again = Registry(tmp_path / "drafts", keep=3)
    assert "write" in faults.names
    assert again.current("math").number == 0  # type: ignore[union-attr]
    assert again.events()[-1]["kind"] != "fallback"


def test_b26_a_new_domains_folder_is_flushed_before_the_index_names_it(tmp_path: Path) -> None:
    registry = prepared(tmp_path)
    steps: list[tuple[str, str]] = []
    real = {name: getattr(os, name) for name in ("mkdir", "replace", "fsync")}

    def noted(name: str) -> Callable[..., Any]:
        def call(first: Any, *rest: Any, **options: Any) -> Any:
            where = os.readlink(f"/proc/self/fd/{first}") if name == "fsync" else str(first)
            steps.append((name, Path(where).name))
            return real[name](first, *rest, **options)

        return call

    with patch.multiple(os, **{name: noted(name) for name in real}):
        registry.clone("math", "sql")
    made = steps.index(("mkdir", "sql"))
    index = next(i for i, (kind, name) in enumerate(steps) if kind == "replace" and ".registry.json" in name)
    assert ("fsync", "drafts") in steps[made:index]
    assert ("fsync", "sql") in steps[made:index]
