"""Tables of the state folder's database, and its version."""

from __future__ import annotations

from sqlalchemy import JSON, Boolean, Column, Float, Integer, MetaData, String, Table, Text

SCHEMA_VERSION = 1
"""Raised with every change of a table, together with a migration in ``MIGRATIONS``."""

MIGRATIONS: dict[int, tuple[str, ...]] = {}
"""SQL that takes a database of the version that is the key to the next one."""

metadata = MetaData()

meta = Table("meta", metadata, Column("key", String, primary_key=True), Column("value", Text, nullable=False))

domains = Table(
    "domains",
    metadata,
    Column("name", String, primary_key=True),
    Column("position", Integer, nullable=False),
    Column("content", JSON, nullable=False),
)

documents = Table(
    "documents",
    metadata,
    Column("name", String, primary_key=True),
    Column("saved", Float, nullable=False),
    Column("content", JSON, nullable=False),
)

events = Table(
    "events",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("time", Float, nullable=False, index=True),
    Column("kind", String, nullable=False),
    Column("domain", String, nullable=False),
    Column("reason", Text, nullable=False),
    Column("numbers", JSON, nullable=False),
)

requests = Table(
    "requests",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("time", Float, nullable=False, index=True),
    Column("request_id", String, nullable=False),
    Column("domain", String, nullable=False, index=True),
    Column("assigned", String, nullable=False),
    Column("confidence", Float, nullable=False),
    Column("known", Boolean, nullable=False),
    Column("finish", String, nullable=False),
    Column("prompt_tokens", Integer, nullable=False),
    Column("output_tokens", Integer, nullable=False),
    Column("proposed_tokens", Integer, nullable=False),
    Column("accepted_tokens", Integer, nullable=False),
    Column("target_passes", Integer, nullable=False),
    Column("seconds", Float, nullable=False),
    Column("first_token_seconds", Float, nullable=False),
    Column("total_seconds", Float, nullable=False),
)
