"""Configs: what loads, and that every mistake is an error that names its place and its cure."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from drafts.errors import UnknownNameError
from router.app.resources import find_config, find_traffic
from router.config import ConfigError, DomainConfig, PolydraftConfig, config_schema, load_config


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "c.yaml"
    file.write_bytes(text.encode())
    return file


def failure(tmp_path: Path, text: str, environment: dict[str, str] | None = None) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, text), environment or {})
    return caught.value


@pytest.mark.parametrize("name", ["demo", "gpu"])
def test_packaged_configs_load_and_declare_four_domains_of_five_examples(name):
    config = load_config(name, {})
    assert [d.name for d in config.domains] == ["math", "sql", "code", "translation"]
    assert all(len(d.examples) == 5 and d.description for d in config.domains)


def test_packaged_examples_are_not_in_the_demo_traffic():
    with open(find_traffic("mixed"), encoding="utf-8") as file:
        prompts = {json.loads(line)["prompt"] for line in file}
    for name in ("demo", "gpu"):
        for domain in load_config(name, {}).domains:
            assert not prompts & set(domain.examples)


def test_every_key_of_the_packaged_configs_has_a_comment_or_is_a_domain():
    for name in ("demo", "gpu"):
        lines = find_config(name).read_text().splitlines()
        head = lines[: lines.index("domains:")]
        keys = [line for line in head if line.strip() and not line.startswith("#") and not line.endswith(":")]
        assert keys
        assert all("#" in line for line in keys)


def test_every_field_is_described_and_the_schema_is_json():
    schema = json.loads(json.dumps(config_schema()))

    def check(node: dict, where: str) -> None:
        for key, child in node.get("properties", {}).items():
            shown = child if "description" in child else schema["$defs"][child["$ref"].rsplit("/", 1)[1]]
            assert shown["description"].endswith("."), f"{where}.{key}"

    check(schema, "")
    for name, node in schema["$defs"].items():
        assert node.get("additionalProperties") is False, name
        check(node, name)


def test_configs_are_frozen():
    with pytest.raises(ValueError, match="frozen"):
        PolydraftConfig().seed = 1


def test_b29_repeated_key_is_an_error_with_its_line(tmp_path):
    error = failure(tmp_path, "domains:\n  - name: a\nseed: 1\ndomains:\n  - name: b\n")
    assert error.line == 4
    assert str(tmp_path / "c.yaml") in str(error)
    assert "domains" in str(error)


def test_b29_two_domains_of_one_name_are_an_error(tmp_path):
    error = failure(tmp_path, "domains:\n  - name: a\n  - name: b\n  - name: a\n")
    assert error.field == "domains[2].name"
    assert error.value == "a"
    assert error.line == 4


@pytest.mark.parametrize("name", ["no", "on", "off", "yes", "y"])
def test_b29_names_that_other_yaml_takes_for_booleans_stay_text(tmp_path, name):
    config = load_config(write(tmp_path, f"domains:\n  - name: {name}\n"), {})
    assert config.domains[0].name == name


@pytest.mark.parametrize("name", ["1e3", "012", "null", "2024-01-01", "true", "~", "0x1f", "1.5", ".nan"])
def test_b29_names_that_are_not_text_are_told_to_be_quoted(tmp_path, name):
    error = failure(tmp_path, f"seed: 1\ndomains:\n  - description: x.\n    name: {name}\n")
    assert error.field == "domains[0].name"
    assert error.line == 4
    assert "quote" in error.allowed or "'" in error.allowed


@pytest.mark.parametrize("name", ["1e3", "012", "null", "2024-01-01", "true"])
def test_b29_quoted_names_load(tmp_path, name):
    assert load_config(write(tmp_path, f"domains:\n  - name: '{name}'\n"), {}).domains[0].name == name


@pytest.mark.parametrize("name", ["base", "Math", "a b", "", "-a", "x" * 65, "ä"])
def test_names_outside_the_alphabet_are_refused(tmp_path, name):
    assert failure(tmp_path, f"domains:\n  - name: '{name}'\n").field == "domains[0].name"


def test_b29_misspelt_key_names_path_line_and_the_nearest_key(tmp_path):
    error = failure(tmp_path, "router:\n  birth:\n    min_requets: 9\n")
    assert (error.field, error.line) == ("router.birth.min_requets", 3)
    assert "min_requests" in error.allowed
    assert "'domains'" in failure(tmp_path, "domians: []\n").allowed
    nowhere = failure(tmp_path, "server:\n  zzz: 1\n").allowed
    assert "port" in nowhere


@pytest.mark.parametrize("value", ["'0.5'", "yes", ".nan", ".inf", "-1", "2", "null", "[]"])
def test_b18_b29_bad_thresholds_are_refused_by_name_at_start_up(tmp_path, value):
    error = failure(tmp_path, f"router:\n  unknown_threshold: {value}\n")
    assert error.field == "router.unknown_threshold"
    assert error.line == 2
    assert "auto" in error.allowed or "equal" in error.allowed or "finite" in error.allowed


def test_numbers_where_text_is_wanted_and_text_where_numbers_are_wanted_are_refused(tmp_path):
    assert failure(tmp_path, "engine:\n  slots: '8'\n").field == "engine.slots"
    assert failure(tmp_path, "engine:\n  slots: 8.5\n").field == "engine.slots"
    assert failure(tmp_path, "learn:\n  enabled: 1\n").field == "learn.enabled"
    assert failure(tmp_path, "target:\n  model: 8\n").field == "target.model"
    assert failure(tmp_path, "engine:\n  k: 65\n").field == "engine.k"
    assert load_config(write(tmp_path, "engine:\n  k: 3\n"), {}).engine.k == 3


@pytest.mark.parametrize("text", ["", "\n\n", "# only\n# comments\n", "\ufeff", "---\n", "null\n"])
def test_b29_files_without_content_are_a_clear_error(tmp_path, text):
    assert "nothing" in str(failure(tmp_path, text))


def test_b29_byte_order_mark_is_ignored(tmp_path):
    assert load_config(write(tmp_path, "\ufeffseed: 7\n"), {}).seed == 7


def test_b29_tabs_are_named(tmp_path):
    error = failure(tmp_path, "engine:\n\tslots: 3\n")
    assert "tab" in error.allowed
    assert error.line == 2


@pytest.mark.parametrize("text", ["- a\n", "just text\n", "a: [1\n", "a: *b\n"])
def test_other_yaml_mistakes_are_config_errors(tmp_path, text):
    failure(tmp_path, text)


def test_bytes_that_are_not_utf8_and_files_that_are_not_there_are_named(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_bytes(b"seed: \xff\n")
    with pytest.raises(ConfigError, match="UTF-8"):
        load_config(file, {})
    with pytest.raises(UnknownNameError, match="demo"):
        load_config(tmp_path / "none.yaml", {})
    with pytest.raises(ConfigError, match="readable"):
        load_config(tmp_path, {})


def test_all_errors_of_a_file_are_listed(tmp_path):
    error = failure(tmp_path, "seed: -1\nengine:\n  slots: 0\n")
    assert {error.field, *(line.split(": ")[1] for line in error.others)} == {"seed", "engine.slots"}


def test_unknown_source_lists_the_known_ones(tmp_path):
    error = failure(tmp_path, "drafts:\n  sources: [lookup, nram]\n")
    assert error.field == "drafts.sources[1]"
    assert error.line == 2
    assert "ngram" in error.allowed
    assert failure(tmp_path, "domains:\n  - name: a\n    sources: [x]\n").field == "domains[0].sources[0]"


def test_environment_overrides_a_key_and_creates_its_section(tmp_path):
    file = write(tmp_path, "seed: 1\n")
    environment = {"POLYDRAFT__ENGINE__SLOTS": "3", "POLYDRAFT__SEED": "9", "POLYDRAFT__STATE__DIR": "null"}
    config = load_config(file, environment)
    assert (config.engine.slots, config.seed, config.state.dir) == (3, 9, None)


@pytest.mark.parametrize(
    "variable", ["POLYDRAFT__ENGINE__SLOST", "POLYDRAFT__ENGIN__SLOTS", "POLYDRAFT__SEED__X"]
)
def test_b29_environment_variable_that_names_nothing_is_an_error(tmp_path, variable):
    error = failure(tmp_path, "seed: 1\n", {variable: "3"})
    assert variable in str(error)


def test_b29_environment_variable_with_one_underscore_is_warned_about(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        load_config(write(tmp_path, "seed: 1\n"), {"POLYDRAFT_SEED": "3"})
    assert "POLYDRAFT_SEED" in caplog.text


def test_environment_value_of_the_wrong_type_names_the_variable(tmp_path):
    error = failure(tmp_path, "seed: 1\n", {"POLYDRAFT__ENGINE__SLOTS": "many"})
    assert "POLYDRAFT__ENGINE__SLOTS" in str(error)


def test_relative_paths_are_relative_to_the_file(tmp_path):
    (tmp_path / "model").mkdir()
    text = "target:\n  model: model\nstate:\n  dir: state\nrouter:\n  embedder: org/name\n"
    config = load_config(write(tmp_path, text), {})
    assert config.target.model == str(tmp_path / "model")
    assert config.state.dir == tmp_path / "state"
    assert config.router.embedder == "org/name"


def test_examples_come_from_a_file_of_lines_or_json_lines(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    (tmp_path / "b.jsonl").write_text('{"prompt": "three\\nfour", "domain": "x"}\n')
    text = "domains:\n  - {name: a, examples_file: a.txt}\n  - {name: b, examples_file: b.jsonl}\n"
    config = load_config(write(tmp_path, text), {})
    assert [d.examples for d in config.domains] == [("one", "two"), ("three\nfour",)]


def test_bad_example_files_name_file_and_line(tmp_path):
    (tmp_path / "b.jsonl").write_text('{"prompt": "a"}\n{"promt": "b"}\n')
    error = failure(tmp_path, "domains:\n  - {name: b, examples_file: b.jsonl}\n")
    assert (Path(error.file).name, error.line) == ("b.jsonl", 2)
    error = failure(tmp_path, "domains:\n  - {name: b, examples_file: c.txt}\n")
    assert error.field == "domains[0].examples_file"


def test_a_domain_inherits_what_it_does_not_say_of_its_learner(tmp_path):
    text = (
        "learn:\n  rate: 0.01\n  buffer: {window: 99}\n"
        "domains:\n  - {name: a, learner: {steps: 3}, buffer: {hold_back: 7}}\n"
    )
    domain = load_config(write(tmp_path, text), {}).domains[0]
    assert domain.learner is not None
    assert (domain.learner.rate, domain.learner.steps, domain.learner.buffer.window) == (0.01, 3, 99)
    assert domain.buffer is not None
    assert (domain.buffer.window, domain.buffer.hold_back) == (99, 7)


def test_a_domain_may_bring_a_draft_model(tmp_path):
    text = "domains:\n  - name: a\n    draft: {kind: model, path: org/small}\n"
    draft = load_config(write(tmp_path, text), {}).domains[0].draft
    assert draft is not None
    assert draft.path == "org/small"
    assert failure(tmp_path, "domains:\n  - name: a\n    draft: {kind: modle, path: x}\n").field.endswith(
        "kind"
    )


def test_too_many_domains_and_blank_examples_are_refused(tmp_path):
    text = "router: {max_domains: 1}\ndomains: [{name: a}, {name: b}]\n"
    assert failure(tmp_path, text).field == "domains"
    with pytest.raises(ValueError, match="blank"):
        DomainConfig(name="a", examples=("  ",))


def test_the_gpu_config_uses_both_kinds_of_neural_draft_within_a_bound() -> None:
    config = load_config("gpu", {})
    assert {"eagle", "model"} <= set(config.drafts.sources)
    assert config.drafts.model is not None
    assert config.drafts.model.rank > 0
    assert config.drafts.max_resident_bytes == 8 * 1024**3
