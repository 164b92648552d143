from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from drafts.errors import InvalidValueError
from router.app import cli
from router.app.commands.replay import parse_k, parse_sources
from router.app.server import listen
from tests.router.fake_engine import FakeEngine
from tests.router.serving import live_server
from tests.router.test_matrix import MATRIX

runner = CliRunner()


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def failing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run the command as the console script does; it must fail as a user's mistake does."""
    monkeypatch.setattr(sys, "argv", ["polydraft", *arguments])
    with pytest.raises(SystemExit) as left:
        cli.main()
    captured = capsys.readouterr()
    assert left.value.code == 2
    assert "Traceback" not in captured.err + captured.out
    return plain(captured.err)


@pytest.fixture
def url() -> Iterator[str]:
    engine = FakeEngine()
    engine.events = [{"kind": "birth", "domain": "poems", "reason": "12 alike", "numbers": {}, "time": 1.0}]
    with live_server(engine) as address:
        yield address


def test_every_command_explains_itself_with_an_example() -> None:
    for command in (
        ["serve"],
        ["replay"],
        ["pretrain"],
        ["stats"],
        ["domains", "list"],
        ["domains", "add"],
        ["domains", "remove"],
        ["export"],
        ["domains", "versions"],
        ["domains", "rollback"],
        ["domains", "export"],
        ["domains", "import"],
        ["config", "check"],
        ["config", "schema"],
    ):
        result = runner.invoke(cli.app, [*command, "--help"])
        assert result.exit_code == 0
        assert "Example" in result.output
        assert f"polydraft {' '.join(command)}" in plain(result.output)


def test_help_needs_neither_torch_nor_transformers() -> None:
    heavy = ("torch", "transformers", "fastapi", "httpx")
    code = f"import sys, router.app.cli; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_without_a_server_the_message_says_how_to_start_one(monkeypatch, capsys) -> None:
    for command in (["stats"], ["domains", "list"], ["domains", "remove", "x"]):
        said = failing(monkeypatch, capsys, *command, "--url", "http://127.0.0.1:9")
        assert "no server answers at http://127.0.0.1:9" in said
        assert "polydraft serve" in said
    assert "--url" in failing(monkeypatch, capsys, "stats", "--url", "localhost")


def test_mistakes_are_one_message_and_exit_code_two(monkeypatch, capsys, tmp_path: Path) -> None:
    missing = str(tmp_path / "none.jsonl")
    replay = ("replay", missing, "--config", "c.yaml")
    assert "none.jsonl" in failing(monkeypatch, capsys, *replay)
    assert "known: generate, plain" in failing(monkeypatch, capsys, *replay, "--compare", "vllm")
    assert "auto or a number" in failing(monkeypatch, capsys, *replay, "--k", "many")
    assert "--concurrency" in failing(monkeypatch, capsys, *replay, "--concurrency", "0")
    traffic = tmp_path / "bad.jsonl"
    traffic.write_text('{"prompt": "a"}\n{"prompt": 1}\n')
    assert "line 2" in failing(monkeypatch, capsys, "replay", str(traffic), "--config", "c.yaml")


def test_sampled_answers_cannot_be_verified_under_rejection(monkeypatch, capsys, tmp_path: Path) -> None:
    traffic, deployment = tmp_path / "t.jsonl", tmp_path / "c.yaml"
    traffic.write_text('{"prompt": "a"}\n')
    deployment.write_text("engine: {verification: rejection}\n")
    wanted = ("replay", str(traffic), "--config", str(deployment), "--verify", "1", "--temperature", "0.8")
    assert "no seed fixes" in failing(monkeypatch, capsys, *wanted)


def test_k_and_sources_are_read_as_documented() -> None:
    assert [parse_k(text) for text in ("auto", "0", "4")] == [None, 0, 4]
    assert [parse_sources(text) for text in (None, "none", "lookup, ngram,lookup")] == [
        None,
        (),
        ("lookup", "ngram"),
    ]
    for bad in ("-1", "65", "1.5", ""):
        with pytest.raises(InvalidValueError):
            parse_k(bad)
    for bad in (",", "lookup,crystal-ball"):
        with pytest.raises(InvalidValueError):
            parse_sources(bad)


def test_domains_are_listed_registered_and_removed_on_the_running_server(url: str, tmp_path: Path) -> None:
    listed = runner.invoke(cli.app, ["domains", "list", "--url", url])
    assert all(name in listed.output for name in ("base", "math", "code"))
    examples = tmp_path / "examples.txt"
    examples.write_text("a sonnet\n\na haiku\n")
    arguments = ["domains", "add", "poems", "--description", "verse", "--example", "a limerick"]
    added = runner.invoke(cli.app, [*arguments, "--examples-file", str(examples), "--url", url])
    assert "poems with 3 examples" in added.output
    rows = json.loads(runner.invoke(cli.app, ["domains", "list", "--json", "--url", url]).output)
    assert [row["name"] for row in rows] == ["base", "math", "code", "poems"]
    assert "removed poems" in runner.invoke(cli.app, ["domains", "remove", "poems", "--url", url]).output


def test_the_servers_own_message_reaches_the_user(monkeypatch, capsys, url: str) -> None:
    said = failing(monkeypatch, capsys, "domains", "remove", "nope", "--url", url)
    assert "404" in said
    assert "known: base, code, math" in said


def test_stats_show_learning_and_events_and_print_json(url: str) -> None:
    shown = runner.invoke(cli.app, ["stats", "--url", url]).output
    assert "3 updates, 2 published, 1 rolled back" in shown
    assert "birth · poems: 12 alike" in shown
    figures = json.loads(runner.invoke(cli.app, ["stats", "--json", "--url", url]).output)
    assert figures["learning"]["updates"] == 3


def test_the_matrix_is_shown_on_request() -> None:
    engine = FakeEngine()
    with live_server(engine) as url:
        empty = runner.invoke(cli.app, ["stats", "--matrix", "--url", url]).output
        assert "nothing was compared yet" in empty
        engine.matrix = {"experts": MATRIX, "memories": {}}
        shown = runner.invoke(cli.app, ["stats", "--matrix", "--url", url]).output
    assert "experts" in shown
    assert "memories" not in shown
    for text in ("code", "math", "0.70", "0.20", "0.90", "–"):
        assert text in shown
    assert "0.40" not in shown


def test_a_taken_port_is_told_before_loading() -> None:
    holder = listen("127.0.0.1", 0)
    holder.listen()
    with pytest.raises(InvalidValueError, match="free to listen"):
        listen("127.0.0.1", holder.getsockname()[1])
    holder.close()
