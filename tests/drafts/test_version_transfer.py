from __future__ import annotations

from pathlib import Path

import pytest
import torch

from drafts.checkpoint import load_tensors, save_tensors
from drafts.errors import CheckpointError, InvalidValueError, UnknownNameError, VersionsFileError
from drafts.registry import Registry
from tests.drafts.registry_rig import published, served, weights

TABLE = {"token_ids": torch.tensor([1, 4, 7], dtype=torch.int32)}


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    """Versions 1 to 3 of math, 2 served."""
    registry = published(Registry(keep=3), 4)
    registry.rollback("math")
    registry.export("math", tmp_path / "math.versions", trunk="trunk-a")
    return tmp_path / "math.versions"


def test_a_domain_that_is_new_gets_the_versions_as_they_were(exported: Path, tmp_path: Path) -> None:
    registry = Registry(tmp_path / "other", keep=3)
    version = registry.import_file(exported, trunk="trunk-a")
    assert (version.domain, version.number, served(registry)) == ("math", 2, 2)
    lineage = registry.lineage("math")
    assert [(v["number"], v["parent"], v["score"]) for v in lineage] == [
        (1, None, 0.1),
        (2, 1, 0.2),
        (3, 2, 0.3),
    ]
    assert torch.equal(version.tensors["down"], weights(2)["down"])
    assert registry.publish("math", weights(7), reason="on").number == 4
    assert Registry(tmp_path / "other", keep=3).events()[0]["kind"] == "import"


def test_a_domain_that_has_versions_goes_on_and_can_roll_back_to_its_own(exported: Path) -> None:
    registry = published(Registry(keep=9), 3, "sums")
    version = registry.import_file(exported, "sums")
    assert [(v.number, v.parent) for v in registry.versions("sums")] == [
        (0, None), (1, 0), (2, 1), (3, 2), (4, 2), (5, 4),
    ]  # fmt: skip
    assert (version.number, registry.rollback("sums").number, registry.rollback("sums").number) == (4, 2, 1)
    assert torch.equal(registry.get("sums", 2).tensors["down"], weights(2)["down"])


def test_of_more_versions_than_are_kept_the_served_one_stays(exported: Path, tmp_path: Path) -> None:
    registry = published(Registry(tmp_path / "few", keep=2), 2, "sums")
    version = registry.import_file(exported, "sums")
    assert [v.number for v in registry.versions("sums")] == [1, version.number]
    assert (version.parent, registry.rollback("sums").number) == (1, 1)
    assert len(list((tmp_path / "few" / "sums").iterdir())) == 2


def test_a_rollback_leads_back_to_what_was_served_before_the_import(exported: Path) -> None:
    registry = published(Registry(keep=3), 2, "sums")
    registry.import_file(exported, "sums")
    assert [(v.number, v.parent) for v in registry.versions("sums")] == [(1, 0), (3, 1), (4, 3)]
    assert registry.rollback("sums").number == 1


def changed(path: Path, **values: object) -> None:
    """Write the file again, sealed, with other metadata or tensors."""
    import json

    tensors, metadata = load_tensors(path)
    described = json.loads(metadata["export"])
    tensors.update(values.pop("tensors", {}))  # type: ignore[call-overload]
    for name in values.pop("without", ()):  # type: ignore[attr-defined]
        del tensors[name]
    described.update(values)
    save_tensors(path, tensors, {"export": json.dumps(described)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "tarball"}, "format is 'tarball'"),
        ({"trunk": "trunk-b"}, "trunk-b, this deployment has trunk-a"),
        ({"domain": "../up"}, "domain"),
        ({"served": 9}, "serves version 9"),
        ({"versions": []}, "numbered \\[\\]"),
        ({"versions": [{"number": 1}]}, "missing"),
        ({"tensors": {"2/up": torch.tensor([0.0, float("nan"), 0.0])}}, "v2.tensors.up.*finite"),
        ({"tensors": {"3/up": torch.zeros(4)}}, "v3.tensors.up.*shape"),
        ({"tensors": {"8/up": torch.zeros(3)}}, "none of its versions"),
        ({"without": ("2/up",)}, "missing: \\['up'\\]"),
    ],
)
def test_b26_a_bad_file_is_refused_by_name_and_changes_nothing(
    exported: Path, change: dict[str, object], message: str
) -> None:
    changed(exported, **change)
    registry = published(Registry(), 1, "sums")
    before = registry.serial, registry.lineage("sums"), registry.domains()
    with pytest.raises(VersionsFileError, match=f"math.versions.*{message}"):
        registry.import_file(exported, "sums", trunk="trunk-a")
    assert (registry.serial, registry.lineage("sums"), registry.domains()) == before


@pytest.mark.parametrize("size", [0, 100, -1])
def test_b26_a_truncated_file_is_refused_by_name(exported: Path, size: int) -> None:
    exported.write_bytes(exported.read_bytes()[:size])
    with pytest.raises(VersionsFileError, match=r"math\.versions"):
        Registry().import_file(exported)


def test_a_file_that_is_missing_or_of_another_kind_is_refused_by_name(exported: Path, tmp_path: Path) -> None:
    registry = published(Registry(tmp_path / "drafts"), 1)
    for path in (tmp_path / "absent", tmp_path / "drafts" / "math" / "v0000.safetensors"):
        with pytest.raises(VersionsFileError, match=path.name):
            registry.import_file(path)


def test_a21_an_expert_of_another_table_or_form_does_not_fit(tmp_path: Path) -> None:
    registry = Registry()
    registry.publish("math", {**weights(1), **TABLE}, reason="r")
    registry.export("math", tmp_path / "file")
    other = Registry()
    other.publish("code", {**weights(2), "token_ids": torch.tensor([1, 4, 8])}, reason="r")
    other.publish("plain", weights(2), reason="r")
    with pytest.raises(VersionsFileError, match=r"file.*token_ids.*table"):
        other.import_file(tmp_path / "file", "code")
    with pytest.raises(VersionsFileError, match=r"file.*extra: \['token_ids'\]"):
        other.import_file(tmp_path / "file", "plain")


def test_what_cannot_be_served_is_refused_by_the_one_who_serves(exported: Path) -> None:
    def check(tensors: dict[str, torch.Tensor]) -> None:
        raise CheckpointError("expert lacks the tensor 'gate'")

    with pytest.raises(VersionsFileError, match=r"math\.versions.*lacks the tensor 'gate'"):
        Registry().import_file(exported, check=check)


def test_export_needs_a_version_and_a_place_to_write(tmp_path: Path) -> None:
    registry = published(Registry(), 1)
    with pytest.raises(UnknownNameError, match="known: math"):
        registry.export("maths", tmp_path / "file")
    (tmp_path / "folder").mkdir()
    with pytest.raises(CheckpointError, match="folder"):
        registry.export("math", tmp_path / "folder")


def test_a_merge_keeps_the_better_expert_whole_and_says_by_which_figures() -> None:
    registry = published(published(Registry(), 2), 3, "code")
    loser = registry.current("math")
    version = registry.merge("math", "code", {"math": 0.5, "code": 0.625})
    assert (version.domain, version.number, version.parent, version.score) == ("math", 2, 1, 0.625)
    assert torch.equal(version.tensors["down"], weights(2)["down"])
    assert registry.domains() == ["math"]
    event = registry.events()[-1]
    assert (event["kind"], event["merged"], event["better"]) == ("merge", "code", "code")
    assert event["acceptance"] == {"math": 0.5, "code": 0.625}
    assert "0.500 against 0.625" in event["reason"]
    assert registry.rollback("math") is loser


def test_on_equal_figures_the_domain_that_stays_keeps_its_expert() -> None:
    registry = published(published(Registry(), 2), 3, "code")
    before = registry.current("math")
    assert registry.merge("math", "code", {"math": 0.5, "code": 0.5}) is before
    assert (registry.domains(), registry.events()[-1]["better"]) == (["math"], "math")


def test_merges_of_several_kinds_are_one_change_or_none() -> None:
    registry = published(published(Registry(), 2), 3, "code")
    for domain in ("math.model", "code.model"):
        registry.publish(domain, weights(1), reason="r")
    serial = registry.serial
    first = ("math", "code", {"math": 0.5, "code": 0.6})
    with pytest.raises(InvalidValueError, match=r"acceptance\.code\.model"):
        registry.merge_all([first, ("math.model", "code.model", {"math.model": 0.5})])
    assert (registry.serial, len(registry.domains())) == (serial, 4)
    figures = {"math.model": 0.5, "code.model": 0.4}
    versions = registry.merge_all([first, ("math.model", "code.model", figures)])
    assert [(v.domain, v.number) for v in versions] == [("math", 2), ("math.model", 0)]
    assert (registry.serial, registry.domains()) == (serial + 1, ["math", "math.model"])
    assert [event["kind"] for event in registry.events()[-2:]] == ["merge", "merge"]


def test_a21_experts_over_different_tables_are_not_merged() -> None:
    registry = Registry()
    registry.publish("math", {**weights(1), **TABLE}, reason="r")
    registry.publish("code", {**weights(2), "token_ids": torch.tensor([1, 4, 8])}, reason="r")
    with pytest.raises(InvalidValueError, match=r"code\.tensors\.token_ids.*table"):
        registry.merge("math", "code", {"math": 0.5, "code": 0.6})
    assert registry.domains() == ["code", "math"]


@pytest.mark.parametrize(
    ("other", "figures", "message"),
    [
        ("math", {"math": 0.5}, "a domain other than"),
        ("code", {"math": 0.5}, "acceptance.code.*None"),
        ("code", {"math": 0.5, "code": float("nan")}, "acceptance.code.*share"),
        ("code", {"math": 1.5, "code": 0.5}, "acceptance.math.*share"),
        ("wide", {"math": 0.5, "wide": 0.6}, "wide.tensors.up.*shape"),
        ("none", {"math": 0.5, "none": 0.6}, "known: code, math, wide"),
    ],
)
def test_a_merge_without_two_domains_of_one_form_and_their_figures_is_refused(
    other: str, figures: dict[str, float], message: str
) -> None:
    registry = published(published(Registry(), 1), 1, "code")
    registry.publish("wide", {**weights(0), "up": torch.zeros(4)}, reason="r")
    serial = registry.serial
    with pytest.raises(InvalidValueError, match=message):
        registry.merge("math", other, figures)
    assert registry.serial == serial
