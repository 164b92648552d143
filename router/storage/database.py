"""Storage of domains, events, statistics and the request log in one SQLite file.

Weights and memories are safetensors beside it; prompts are stored only as examples of domains and in
the router's pool of unknowns, never in the request log.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, create_engine, delete, event, func, insert, inspect, select
from sqlalchemy.exc import DatabaseError, OperationalError, SQLAlchemyError

from osd.types import Event, FinishedRecord
from router.storage import schema
from router.storage.folder import FolderLock, StorageError

DATABASE = "state.db"
EVENTS_KEPT = 100_000
REQUESTS_KEPT = 1_000_000

log = logging.getLogger(__name__)


class Storage:
    """The database of a state folder; one process, one writer at a time.

    Write-ahead log, a busy timeout on every connection, and write transactions that begin
    immediately: a reader never blocks the writer, and a second writer waits instead of failing.

    Args:
        folder: The state folder; made if need be.
        busy_seconds: How long a write waits for a lock held from outside.

    Raises:
        StorageError: not writable, in use, or written by a newer version.
    """

    def __init__(self, folder: str | Path, *, busy_seconds: float = 5.0) -> None:
        self.folder = Path(folder)
        self.path = self.folder / DATABASE
        self.recovered_from: Path | None = None
        self._writer = threading.Lock()
        self._busy_ms = int(busy_seconds * 1000)
        self._folder_lock = FolderLock(self.folder)
        try:
            self._open()
        except BaseException:
            self._folder_lock.release()
            raise

    def close(self) -> None:
        """Let go of file and folder. Idempotent."""
        self._engine.dispose()
        self._folder_lock.release()

    def save_domains(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Replace the stored domains by ``rows``, each with at least a ``name``."""
        with self._write() as db:
            db.execute(delete(schema.domains))
            for position, row in enumerate(rows):
                values = {"name": row["name"], "position": position, "content": dict(row)}
                db.execute(insert(schema.domains).values(values))

    def load_domains(self) -> list[dict[str, Any]]:
        """The stored domains in order."""
        with self._read() as db:
            query = select(schema.domains.c.content).order_by(schema.domains.c.position)
            return [dict(content) for content in db.execute(query).scalars()]

    def save_router(self, state: Mapping[str, Any]) -> None:
        """Store what :meth:`router.mind.router.Router.state` returns."""
        self.save_domains(state["domains"])
        self.save_document("router", {key: value for key, value in state.items() if key != "domains"})

    def load_router(self) -> dict[str, Any]:
        """The router's state; without domains where nothing was stored."""
        return {**(self.load_document("router") or {}), "domains": self.load_domains()}

    def save_stats(self, state: Mapping[str, Any]) -> None:
        """Store what :meth:`router.mind.stats.Stats.state` returns."""
        self.save_document("stats", state)

    def load_stats(self) -> dict[str, Any] | None:
        """The statistics' state, ``None`` where none was stored."""
        return self.load_document("stats")

    def save_document(self, name: str, content: Mapping[str, Any]) -> None:
        """Store a JSON document under ``name``, replacing the earlier one."""
        with self._write() as db:
            db.execute(delete(schema.documents).where(schema.documents.c.name == name))
            values = {"name": name, "saved": time.time(), "content": dict(content)}
            db.execute(insert(schema.documents).values(values))

    def load_document(self, name: str) -> dict[str, Any] | None:
        """The document under ``name``, ``None`` if there is none."""
        with self._read() as db:
            query = select(schema.documents.c.content).where(schema.documents.c.name == name)
            content = db.execute(query).scalar_one_or_none()
        return None if content is None else dict(content)

    def append_events(self, events: Iterable[Event]) -> None:
        """Add events to the log."""
        rows = [asdict(item) for item in events]
        if rows:
            with self._write() as db:
                db.execute(insert(schema.events), rows)
                _prune(db, schema.events, EVENTS_KEPT)

    def load_events(self, limit: int = 1000) -> list[Event]:
        """The latest events, oldest first."""
        table = schema.events.c
        query = select(table.kind, table.domain, table.reason, table.numbers, table.time)
        with self._read() as db:
            rows = db.execute(query.order_by(table.id.desc()).limit(limit)).all()
        return [Event(*row) for row in reversed(rows)]

    def append_requests(self, records: Iterable[FinishedRecord]) -> None:
        """Add finished requests to the log, without a word of their text."""
        now = time.time()
        rows = [_request_row(record, now) for record in records]
        if rows:
            with self._write() as db:
                db.execute(insert(schema.requests), rows)
                _prune(db, schema.requests, REQUESTS_KEPT)

    def count_requests(self) -> dict[str, int]:
        """Logged requests by domain."""
        domain = schema.requests.c.domain
        with self._read() as db:
            rows = db.execute(select(domain, func.count()).group_by(domain)).all()
        return {str(name): int(count) for name, count in rows}

    def _open(self) -> None:
        try:
            self._connect()
        except OperationalError as error:
            raise StorageError(f"{self.path}: {_reason(error)}") from None
        except DatabaseError as error:
            self.recovered_from = self.path.with_name(f"{DATABASE}.damaged-{int(time.time())}")
            log.error("%s is damaged (%s); kept as %s", self.path, _reason(error), self.recovered_from.name)
            self._engine.dispose()
            self.path.rename(self.recovered_from)
            for suffix in ("-wal", "-shm"):
                self.path.with_name(DATABASE + suffix).unlink(missing_ok=True)
            self._connect()

    def _connect(self) -> None:
        self._engine = create_engine(f"sqlite:///{self.path}", connect_args={"timeout": self._busy_ms / 1000})
        event.listen(self._engine, "connect", self._prepare)
        event.listen(self._engine, "begin", _begin)
        with self._write() as db:
            _bring_up_to_date(db, str(self.path))

    def _prepare(self, connection: Any, _: object) -> None:
        connection.isolation_level = None
        for pragma in ("journal_mode=WAL", "synchronous=NORMAL", f"busy_timeout={self._busy_ms}"):
            connection.execute(f"PRAGMA {pragma}")

    @contextmanager
    def _write(self) -> Iterator[Connection]:
        with self._writer, self._connection(write=True) as db:
            yield db

    @contextmanager
    def _read(self) -> Iterator[Connection]:
        with self._connection(write=False) as db:
            yield db

    @contextmanager
    def _connection(self, *, write: bool) -> Iterator[Connection]:
        try:
            with self._engine.connect().execution_options(write=write) as db, db.begin():
                yield db
        except OperationalError as error:
            raise StorageError(f"{self.path}: {_reason(error)}") from error
        except DatabaseError:
            raise
        except SQLAlchemyError as error:
            raise StorageError(f"{self.path}: {error}") from error


def _begin(connection: Connection) -> None:
    write = connection.get_execution_options().get("write", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")


def _bring_up_to_date(db: Connection, path: str) -> None:
    """Make the tables, or migrate older ones; refuse newer and foreign ones."""
    tables = inspect(db).get_table_names()
    if not tables:
        schema.metadata.create_all(db)
        db.execute(insert(schema.meta).values(key="schema_version", value=str(schema.SCHEMA_VERSION)))
        return
    if "meta" not in tables:
        raise StorageError(f"{path} is a database of something else (tables: {', '.join(sorted(tables))})")
    query = select(schema.meta.c.value).where(schema.meta.c.key == "schema_version")
    version = int(db.execute(query).scalar_one())
    if version > schema.SCHEMA_VERSION:
        raise StorageError(
            f"{path} was written by a newer version (schema {version}, this one knows "
            f"{schema.SCHEMA_VERSION}); upgrade polydraft or take another state folder"
        )
    while version < schema.SCHEMA_VERSION:
        if version not in schema.MIGRATIONS:
            raise StorageError(f"{path} has schema {version}, which this version can no longer read")
        for statement in schema.MIGRATIONS[version]:
            db.exec_driver_sql(statement)
        version += 1
        db.execute(
            schema.meta.update().where(schema.meta.c.key == "schema_version").values(value=str(version))
        )


def _prune(db: Connection, table: Any, kept: int) -> None:
    newest = db.execute(select(func.max(table.c.id))).scalar_one()
    db.execute(delete(table).where(table.c.id <= newest - kept))


def _request_row(record: FinishedRecord, now: float) -> dict[str, Any]:
    return {
        "time": now,
        "request_id": record.request.request_id,
        "domain": record.domain,
        "assigned": record.assignment.domain,
        "confidence": record.assignment.confidence,
        "known": record.assignment.known,
        "finish": record.finish.value,
        "prompt_tokens": len(record.request.prompt_ids),
        "output_tokens": len(record.output_ids),
        "proposed_tokens": sum(item.proposed for item in record.rounds),
        "accepted_tokens": sum(item.accepted for item in record.rounds),
        "target_passes": len(record.rounds),
        "seconds": record.seconds,
        "first_token_seconds": record.first_token_seconds,
        "total_seconds": record.total_seconds,
    }


def _reason(error: DatabaseError) -> str:
    return str(error.orig).rstrip(".")
