"""Workflows in the local result file: their documents, and the index."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Final

from aztask.engine import Database
from aztask.results.local.rows import rows_of
from aztask.results.workflows import Addition, Change, Document, Listed

_STEPS: Final = (
    """
    CREATE TABLE workflow_documents (
        id INTEGER PRIMARY KEY,
        workflow TEXT NOT NULL, name TEXT NOT NULL, version INTEGER NOT NULL, data BLOB NOT NULL);
    CREATE UNIQUE INDEX workflow_documents_key ON workflow_documents (workflow, name);
    CREATE TABLE workflows (workflow TEXT PRIMARY KEY, at REAL NOT NULL, ended_at REAL)
    WITHOUT ROWID;
    CREATE INDEX workflows_ended ON workflows (ended_at);
    """,
)
_READ: Final = "SELECT data, version FROM workflow_documents WHERE workflow = ? AND name = ?"
_INSERT: Final = """
    INSERT INTO workflow_documents (workflow, name, version, data) VALUES (?, ?, 1, ?)
    ON CONFLICT DO NOTHING
"""
_REPLACE: Final = """
    UPDATE workflow_documents SET data = ?, version = version + 1
    WHERE workflow = ? AND name = ? AND version = ?
"""
_APPEND: Final = """
    UPDATE workflow_documents SET data = CAST(data || ? AS BLOB), version = version + 1
    WHERE workflow = ? AND name = ?
"""
_DELETE: Final = "DELETE FROM workflow_documents WHERE workflow = ?"
_ANNOUNCE: Final = "INSERT INTO workflows (workflow, at) VALUES (?, ?) ON CONFLICT DO NOTHING"
_CLOSE: Final = """
    INSERT INTO workflows (workflow, at, ended_at) VALUES (?, ?, ?)
    ON CONFLICT DO UPDATE SET ended_at = excluded.ended_at
"""
_REOPEN: Final = """
    INSERT INTO workflows (workflow, at) VALUES (?, ?)
    ON CONFLICT DO UPDATE SET ended_at = NULL
"""
_OPEN: Final = """
    SELECT workflow, at, ended_at FROM workflows WHERE ended_at IS NULL AND workflow > ?
    ORDER BY workflow LIMIT ?
"""
_NEWEST: Final = """
    SELECT workflow, at, ended_at FROM workflows WHERE ended_at IS NOT NULL
    ORDER BY ended_at DESC LIMIT ?
"""
_OLD: Final = """
    SELECT workflow, at, ended_at FROM workflows WHERE ended_at < ? ORDER BY ended_at LIMIT ?
"""

KEPT: Final = """
    AND NOT EXISTS (
        SELECT 1 FROM workflows WHERE workflows.workflow =
            substr(runs.task_id, 1, length(rtrim(runs.task_id, '0123456789')) - 1))
"""
"""The condition for runs that belong to no workflow: a node's task id is ``WORKFLOW.NUMBER``."""


class LocalWorkflows:
    """The local implementation of `aztask.results.workflows.WorkflowStore`."""

    def __init__(self, database: Database) -> None:
        self._database = database
        database.migrate("workflows", _STEPS)

    def announce(self, workflow: str, at: float) -> None:
        """List it as open since `at`, unless it is listed."""
        self._database.change(_ANNOUNCE, (workflow, at))

    def read(self, names: Sequence[tuple[str, str]]) -> list[Document | None]:
        """The documents with these names; None for missing ones."""
        with self._database.read() as connection:
            return [_read(connection, *each) for each in names]

    def write(self, changes: Sequence[Change]) -> list[str | None]:
        """Make each change whose tag is the current one; returns the new tags."""
        with self._database.transaction() as connection:
            return [_write(connection, each) for each in changes]

    def append(self, additions: Sequence[Addition]) -> list[Document | None]:
        """Append pieces in one transaction; returns the documents."""
        with self._database.transaction() as connection:
            for each in additions:
                data = b"".join(each.pieces.values())
                connection.execute(_APPEND, (data, each.workflow, each.name))
            return [_read(connection, each.workflow, each.name) for each in additions]

    def close_workflow(self, workflow: str, at: float, ended_at: float) -> None:
        """List it as ended, once and for all readers."""
        self._database.change(_CLOSE, (workflow, at, ended_at))

    def reopen_workflow(self, workflow: str, at: float, ended_at: float) -> None:
        """List it as open again."""
        self._database.change(_REOPEN, (workflow, at))

    def open_workflows(self, limit: int, after: str = "") -> list[Listed]:
        """Open workflows in the order of their ids, those behind `after`."""
        return self._listed(_OPEN, (after, limit))

    def ended_workflows(self, limit: int, before: float | None = None) -> list[Listed]:
        """The newest ended workflows, or those that ended before a time."""
        if before is None:
            return self._listed(_NEWEST, (limit,))
        return self._listed(_OLD, (before, limit))

    def delete_workflow(self, listed: Listed) -> bool:
        """Delete its documents and its place in the index, in one transaction."""
        with self._database.transaction() as connection:
            found = connection.execute(_DELETE, (listed.workflow,)).rowcount
            connection.execute("DELETE FROM workflows WHERE workflow = ?", (listed.workflow,))
            return found > 0

    def _listed(self, sql: str, values: Sequence[object]) -> list[Listed]:
        with self._database.read() as connection:
            rows = rows_of(connection, sql, values)
        return [Listed(*row) for row in rows if _is_listed(*row)]


def _read(connection: sqlite3.Connection, workflow: str, name: str) -> Document | None:
    found = connection.execute(_READ, (workflow, name)).fetchone()
    if found is None:
        return None
    data, version = found
    return Document(data if isinstance(data, bytes) else b"", str(version))


def _write(connection: sqlite3.Connection, change: Change) -> str | None:
    if change.tag is None:
        values: tuple[object, ...] = (change.workflow, change.name, change.data)
        return "1" if connection.execute(_INSERT, values).rowcount else None
    version = int(change.tag)
    values = (change.data, change.workflow, change.name, version)
    return str(version + 1) if connection.execute(_REPLACE, values).rowcount else None


def _is_listed(workflow: object, at: object, ended_at: object) -> bool:
    """True unless another program wrote the row: SQLite stores any value in any column."""
    times = (at, 0.0 if ended_at is None else ended_at)
    return isinstance(workflow, str) and all(isinstance(each, int | float) for each in times)
