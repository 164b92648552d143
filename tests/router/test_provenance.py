"""What a result says of where it comes from."""

from __future__ import annotations

import sys

import pytest

from router.app.provenance import provenance, without_folders


def test_provenance_names_what_is_needed_to_run_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["polydraft", "replay", "a file"])
    origin = provenance(7, config="c.yaml")
    assert origin["command"] == "polydraft replay 'a file'"
    assert origin["seed"] == 7
    assert origin["config"] == "c.yaml"
    assert {"commit", "versions", "machine"} <= set(origin)
    assert "torch" in origin["versions"]
    assert origin["machine"]["cores"] >= 1


def test_the_whole_command_is_told_without_the_folders_of_the_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = [
        "/home/me/benchmarks/floor.py",
        "--traffic",
        "/data/mix.jsonl",
        "--limit",
        "4",
        "--json=../o.json",
    ]
    monkeypatch.setattr(sys, "argv", words)
    found = provenance(0, config="/etc/my.yaml", traffic=["mix"])
    assert found["command"] == "floor.py --traffic mix.jsonl --limit 4 --json=o.json"
    assert (found["config"], found["traffic"]) == ("my.yaml", ["mix"])


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("configs/demo.yaml", "configs/demo.yaml"),
        ("~/a/b.json", "b.json"),
        ("../../b.json", "b.json"),
        ("own=/a/b.st,other=/c/d.st", "own=b.st,other=d.st"),
        ("http://localhost/v1", "http://localhost/v1"),
        ("1/2", "1/2"),
        ("lookup,ngram", "lookup,ngram"),
    ],
)
def test_only_paths_that_lie_elsewhere_lose_their_folders(word: str, told: str) -> None:
    assert without_folders(word) == told
