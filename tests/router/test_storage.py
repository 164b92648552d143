"""Storage: round trips, one process a folder, outside locks, versions, damage."""

from __future__ import annotations

import logging
import os
import sqlite3
import subprocess
import sys
import threading

import pytest

from osd.types import Assignment, Event, Round
from router.storage import Storage, StorageError, folder, schema
from tests.router.fakes import record

EVENTS = [Event("birth", f"d{i}", "Because.", {"size": i}, time=float(i)) for i in range(5)]


@pytest.fixture
def storage(tmp_path):
    made = Storage(tmp_path / "state")
    yield made
    made.close()


def reopened(storage: Storage) -> Storage:
    storage.close()
    return Storage(storage.folder)


def test_everything_is_there_after_a_restart(storage):
    rows = [{"name": "b", "examples": ["é", "\n"]}, {"name": "a", "examples": []}]
    storage.save_router({"domains": rows, "pool": [{"text": "x"}]})
    storage.save_stats({"overall": {"requests": 3}})
    storage.append_events(EVENTS)
    storage.append_requests([record("secret prompt", Assignment("a", 0.9, None, True))] * 3)
    again = reopened(storage)
    assert again.load_router() == {"domains": rows, "pool": [{"text": "x"}]}
    assert again.load_stats() == {"overall": {"requests": 3}}
    assert again.load_events() == EVENTS
    assert again.load_events(limit=2) == EVENTS[-2:]
    assert again.count_requests() == {"a": 3}
    again.close()


def test_an_empty_folder_has_nothing(storage):
    assert storage.load_domains() == []
    assert storage.load_router() == {"domains": []}
    assert storage.load_stats() is None
    assert storage.load_events() == []
    storage.append_events([])
    storage.append_requests([])


def test_saving_domains_replaces_them_and_keeps_their_order(storage):
    storage.save_domains([{"name": "a"}, {"name": "b"}])
    storage.save_domains([{"name": "c"}, {"name": "a", "pinned": True}])
    assert storage.load_domains() == [{"name": "c"}, {"name": "a", "pinned": True}]


def test_the_request_log_holds_no_prompts(storage):
    storage.append_requests([record("secret prompt", rounds=(Round(1, 1, 1, 2, "ngram", 0),))])
    storage.close()
    assert b"secret" not in b"".join(p.read_bytes() for p in storage.folder.iterdir())


def test_b25_every_connection_has_wal_and_a_busy_timeout(storage):
    for _ in range(3):
        with storage._read() as db:
            assert db.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
            assert db.exec_driver_sql("PRAGMA busy_timeout").scalar() == 5000


def test_b25_a_lock_from_outside_is_waited_for_and_no_row_is_lost(storage):
    outside = sqlite3.connect(storage.path, isolation_level=None, check_same_thread=False)
    outside.execute("BEGIN IMMEDIATE")
    release = threading.Timer(0.5, outside.execute, ("COMMIT",))
    release.start()
    storage.append_events(EVENTS)
    release.join()
    assert len(storage.load_events()) == 5
    outside.close()


def test_b25_a_lock_that_stays_is_a_typed_error_while_reading_goes_on(tmp_path):
    storage = Storage(tmp_path, busy_seconds=0.1)
    outside = sqlite3.connect(storage.path, isolation_level=None)
    outside.execute("BEGIN IMMEDIATE")
    with pytest.raises(StorageError, match="locked"):
        storage.append_events(EVENTS)
    assert storage.load_events() == []
    outside.execute("COMMIT")
    storage.append_events(EVENTS)
    assert len(storage.load_events()) == 5
    storage.close()


def test_b25_parallel_writers_and_readers_lose_nothing(storage):
    def work(number: int) -> None:
        for _ in range(10):
            storage.append_events([EVENTS[number % 5]])
            storage.save_document(f"d{number}", {"n": number})
            storage.load_events()

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(storage.load_events()) == 80


def test_a_second_process_is_told_who_has_the_folder(storage):
    code = f"from router.storage import Storage; Storage({str(storage.folder)!r})"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode != 0
    assert f"in use by another process (pid {os.getpid()})" in result.stderr
    with pytest.raises(StorageError, match="in use"):
        Storage(storage.folder)


def test_a_closed_folder_is_free_again(storage):
    storage.close()
    storage.close()
    Storage(storage.folder).close()


def test_b26_a_killed_process_leaves_the_last_complete_save(tmp_path):
    code = (
        "import sys\nfrom router.storage import Storage\n"
        f"s = Storage({str(tmp_path)!r})\nn = 0\n"
        "while True:\n    n += 1\n    s.save_stats({'a': n, 'b': n, 'pad': 'x' * 50_000})\n"
        "    print(n, flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    saved = [int(process.stdout.readline()) for _ in range(20)]
    process.kill()
    process.wait()
    storage = Storage(tmp_path)
    stats = storage.load_stats()
    assert stats is not None
    assert stats["a"] == stats["b"] >= saved[-1]
    storage.close()


@pytest.mark.parametrize("content", [b"not a database at all" * 100, b"SQLite format 3\x00" + b"\xff" * 5000])
def test_b26_a_damaged_file_is_named_kept_aside_and_replaced(tmp_path, content, caplog):
    (tmp_path / "state.db").write_bytes(content)
    with caplog.at_level(logging.ERROR):
        storage = Storage(tmp_path)
    assert "state.db is damaged" in caplog.text
    assert storage.recovered_from is not None
    assert storage.recovered_from.read_bytes() == content
    storage.append_events(EVENTS)
    assert len(storage.load_events()) == 5
    storage.close()


def test_b26_an_empty_file_is_a_new_database(tmp_path):
    (tmp_path / "state.db").write_bytes(b"")
    storage = Storage(tmp_path)
    assert storage.recovered_from is None
    storage.close()


def test_a_newer_schema_says_so_and_lets_the_folder_go(storage):
    with storage._write() as db:
        db.execute(schema.meta.update().values(value="99"))
    storage.close()
    for _ in range(2):
        with pytest.raises(StorageError, match="newer version"):
            Storage(storage.folder)


def test_an_older_schema_is_migrated_or_says_why_not(storage, monkeypatch):
    storage.close()
    monkeypatch.setattr(schema, "SCHEMA_VERSION", 2)
    with pytest.raises(StorageError, match="no longer read"):
        Storage(storage.folder)
    monkeypatch.setitem(schema.MIGRATIONS, 1, ("ALTER TABLE events ADD COLUMN undone INTEGER",))
    again = Storage(storage.folder)
    with again._read() as db:
        assert "undone" in list(db.exec_driver_sql("SELECT * FROM events").keys())
        assert db.execute(schema.meta.select()).one().value == "2"
    again.close()


def test_a_database_of_something_else_is_left_alone(tmp_path):
    other = sqlite3.connect(tmp_path / "state.db")
    other.execute("CREATE TABLE books (id INTEGER)")
    other.commit()
    other.close()
    with pytest.raises(StorageError, match="something else"):
        Storage(tmp_path)


def test_a_folder_that_cannot_be_written_is_a_clear_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="not writable"):
        Storage(tmp_path / "file")

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(folder, "open", refuse, raising=False)
    with pytest.raises(StorageError, match=r"not writable: Permission denied"):
        Storage(tmp_path / "other")


def test_old_rows_give_way(storage, monkeypatch):
    monkeypatch.setattr("router.storage.database.EVENTS_KEPT", 3)
    storage.append_events(EVENTS)
    assert storage.load_events() == EVENTS[-3:]
