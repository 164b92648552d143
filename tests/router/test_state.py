"""A restart: domains, statistics, memories and versions are all there again."""

import pytest

from drafts.errors import InvalidValueError, UnknownNameError
from router.storage import StorageError
from tests.router.tiny_engine import tiny_engine


def test_stop_and_start_again_loses_nothing(tmp_path):
    folder = str(tmp_path / "state")
    with tiny_engine(keep_state=True, state_dir=folder) as engine:
        engine.add_domain("rivers", description="rivers", examples=["river bank water", "river delta"])
        for _ in range(3):
            engine.generate("boat sail harbour", max_tokens=12)
        before = engine.stats()
    with tiny_engine(keep_state=True, state_dir=folder) as engine:
        after = engine.stats()
        names = [row["name"] for row in engine.domains()]
    assert names == ["boats", "trees", "rivers", "base"]
    assert after["overall"] == before["overall"]
    for name in names:
        assert after["domains"][name]["buffer"] == before["domains"][name]["buffer"]
        assert after["domains"][name]["requests"] == before["domains"][name]["requests"]
        speculated = [stats["domains"][name]["speculation"]["counters"] for stats in (before, after)]
        assert speculated[0] == speculated[1]
    assert sum(row["speculation"]["steps"] for row in before["domains"].values()) > 0
    assert set(before["k"]) == {"step_ms", "step_ms_by_rows", "drift", "by_rows"}
    assert 1 in before["k"]["step_ms_by_rows"]
    assert before["k"]["by_rows"][1]["tokens_per_ms"] > 0
    assert before["overall"]["requests"] == 3
    assert sum(row["buffer"]["memory_tokens"] for row in after["domains"].values()) > 0


def test_a_damaged_memory_is_set_aside_and_the_rest_comes_back(tmp_path):
    folder = tmp_path / "state"
    with tiny_engine(keep_state=True, state_dir=str(folder)) as engine:
        engine.generate("boat sail harbour", max_tokens=12, domain="boats")
        engine.generate("tree leaf forest", max_tokens=12, domain="trees")
    memory = folder / "memories" / "boats.safetensors"
    memory.write_bytes(memory.read_bytes()[:20])
    with tiny_engine(keep_state=True, state_dir=str(folder)) as engine:
        rows = {row["name"]: row for row in engine.domains()}
    assert rows["boats"]["buffer"]["memory_tokens"] == 0
    assert rows["trees"]["buffer"]["memory_tokens"] > 0
    assert memory.with_suffix(".corrupt").exists()


def test_a_second_process_on_the_same_folder_is_refused(tmp_path):
    folder = str(tmp_path / "state")
    with (
        tiny_engine(keep_state=True, state_dir=folder),
        pytest.raises(StorageError, match="in use"),
        tiny_engine(keep_state=True, state_dir=folder),
    ):
        pass


def test_domains_come_and_go_while_serving(tmp_path):
    with tiny_engine() as engine:
        engine.add_domain("rivers", description="rivers", examples=["river bank"])
        engine.add_domain("rivers", description="rivers", examples=["river bank"])
        assert engine.generate("x", max_tokens=4, domain="rivers").domain == "rivers"
        with pytest.raises(InvalidValueError, match="rivers"):
            engine.add_domain("rivers", description="other")
        engine.remove_domain("rivers")
        with pytest.raises(UnknownNameError, match="known: base, boats, trees"):
            engine.submit("x", domain="rivers")
        with pytest.raises(InvalidValueError, match="base"):
            engine.remove_domain("base")


def test_a_frozen_engine_keeps_memories_as_they_are():
    with tiny_engine(learn=False) as engine:
        engine.generate("boat sail harbour", max_tokens=12)
        assert all(row["buffer"].get("memory_tokens", 0) == 0 for row in engine.domains())


def test_bad_parameters_name_field_value_and_what_is_allowed():
    with tiny_engine() as engine:
        with pytest.raises(InvalidValueError, match=r"temperature: got -1"):
            engine.submit("x", temperature=-1)
        with pytest.raises(InvalidValueError, match="one of temperature"):
            engine.submit("x", temprature=1)
        with pytest.raises(InvalidValueError, match="either a prompt or messages"):
            engine.submit()
