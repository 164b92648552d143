from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from drafts.errors import InvalidValueError, UnknownNameError
from drafts.registry import Registry
from tests.drafts.registry_rig import published, served, weights


@pytest.fixture(params=["memory", "disk"])
def registry(request: pytest.FixtureRequest, tmp_path: Path) -> Registry:
    return Registry(None if request.param == "memory" else tmp_path / "drafts", keep=3)


def test_numbers_increase_and_the_newest_is_served(registry: Registry) -> None:
    assert registry.current("math") is None
    published(registry, 3)
    assert [v.number for v in registry.versions("math")] == [0, 1, 2]
    assert [v.parent for v in registry.versions("math")] == [None, 0, 1]
    assert served(registry) == 2
    assert registry.domains() == ["math"]


def test_a_version_is_a_copy_of_what_was_published(registry: Registry) -> None:
    tensors = weights(1.0)
    version = registry.publish("math", tensors, reason="r")
    tensors["down"].zero_()
    assert torch.equal(version.tensors["down"], torch.ones(2, 3))


def test_serial_increases_with_every_change_and_only_then(registry: Registry) -> None:
    seen = [registry.serial]
    for change in (
        lambda: published(registry, 2),
        lambda: registry.rollback("math"),
        lambda: registry.clone("math", "algebra"),
        lambda: registry.drop("algebra"),
    ):
        change()
        registry.current("math")
        registry.versions("math")
        seen.append(registry.serial)
    assert seen == sorted(set(seen))


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"down": torch.zeros(2, 3)}, "missing: \\['up'\\]"),
        ({**weights(0), "gate": torch.zeros(1)}, "extra: \\['gate'\\]"),
        ({**weights(0), "up": torch.zeros(4)}, "math.tensors.up.*\\(3,\\)"),
        ({**weights(0), "up": torch.tensor([0, float("nan"), 0])}, "math.tensors.up.*finite"),
        ({**weights(0), "down": torch.full((2, 3), float("inf"))}, "math.tensors.down.*finite"),
    ],
)
def test_a27_a29_a_broken_update_is_refused_and_changes_nothing(
    registry: Registry, broken: dict[str, torch.Tensor], message: str
) -> None:
    published(registry, 1)
    serial = registry.serial
    with pytest.raises(InvalidValueError, match=message):
        registry.publish("math", broken, reason="bad")
    assert (registry.serial, served(registry), len(registry.versions("math"))) == (serial, 0, 1)


def test_the_first_version_must_be_finite_too(registry: Registry) -> None:
    with pytest.raises(InvalidValueError, match="finite"):
        registry.publish("math", {"a": torch.tensor(float("nan"))}, reason="bad")
    assert registry.domains() == []


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden", "Math", "-x", "a" * 65, "a\n", "é"])
def test_names_that_are_no_safe_folder_are_refused(registry: Registry, name: str) -> None:
    published(registry, 1)
    with pytest.raises(InvalidValueError, match="domain"):
        registry.publish(name, weights(0), reason="r")
    with pytest.raises(InvalidValueError, match="domain"):
        registry.clone("math", name)


def test_rollback_serves_the_parent_then_its_parent_and_then_refuses(registry: Registry) -> None:
    published(registry, 3)
    assert registry.rollback("math", reason="acceptance fell").number == 1
    assert registry.rollback("math").number == 0
    with pytest.raises(InvalidValueError, match="earlier"):
        registry.rollback("math")
    kinds = [(e["kind"], e["number"], e["reason"]) for e in registry.events()]
    assert kinds[3:] == [("rollback", 1, "acceptance fell"), ("rollback", 0, "rolled back")]


def test_a_version_after_a_rollback_descends_from_the_served_one(registry: Registry) -> None:
    published(registry, 3)
    registry.rollback("math", to=0)
    version = registry.publish("math", weights(9), reason="again")
    assert (version.number, version.parent) == (3, 0)
    assert registry.rollback("math").number == 0


def test_pruning_keeps_the_last_and_never_the_served_one_or_its_parent(registry: Registry) -> None:
    published(registry, 5)
    assert [v.number for v in registry.versions("math")] == [2, 3, 4]
    registry.rollback("math", to=2)
    registry.publish("math", weights(7), reason="r")
    assert [v.number for v in registry.versions("math")] == [2, 4, 5]
    registry.publish("math", weights(8), reason="r")
    assert [v.number for v in registry.versions("math")] == [4, 5, 6]


def test_unknown_names_list_the_known_ones(registry: Registry) -> None:
    published(registry, 1)
    with pytest.raises(UnknownNameError, match="known: math"):
        registry.rollback("maths")
    with pytest.raises(UnknownNameError, match="known: 0"):
        registry.get("math", 7)
    with pytest.raises(UnknownNameError, match="known: 0"):
        registry.publish("math", weights(1), reason="r", parent=7)
    with pytest.raises(UnknownNameError, match="known: math"):
        registry.drop("maths")


def test_a27_a_clone_has_the_parents_checksum_and_its_own_history(registry: Registry) -> None:
    published(registry, 2)
    child = registry.clone("math", "algebra")
    parent = registry.current("math")
    assert parent is not None
    assert (child.number, child.parent) == (0, None)
    assert "math v1" in child.reason
    assert registry.checksum(child) == registry.checksum(parent)
    registry.publish("algebra", weights(5), reason="r")
    assert served(registry) == 1
    with pytest.raises(InvalidValueError, match="no version yet"):
        registry.clone("math", "algebra")


def test_lineage_and_events_are_plain_values(registry: Registry) -> None:
    import json

    published(registry, 2)
    registry.clone("math", "algebra")
    registry.drop("algebra")
    lineage = json.loads(json.dumps(registry.lineage("math")))
    assert [(v["number"], v["parent"], v["served"]) for v in lineage] == [(0, None, False), (1, 0, True)]
    assert [e["kind"] for e in json.loads(json.dumps(registry.events()))] == [
        "publish",
        "publish",
        "clone",
        "drop",
    ]


def test_readers_always_see_a_whole_version_while_others_publish() -> None:
    registry = published(Registry(keep=1), 1)
    done = threading.Event()
    torn: list[str] = []

    def read() -> None:
        while not done.is_set():
            version = registry.current("math")
            if version is None or float(version.tensors["down"][0, 0]) != -float(version.tensors["up"][0]):
                torn.append(repr(version))

    def write() -> None:
        for value in range(100):
            registry.publish("math", weights(value), reason="r")

    readers = [threading.Thread(target=read) for _ in range(2)]
    writers = [threading.Thread(target=write) for _ in range(2)]
    for thread in readers + writers:
        thread.start()
    for thread in writers:
        thread.join()
    done.set()
    for thread in readers:
        thread.join()
    assert torn == []
    assert served(registry) == 200
