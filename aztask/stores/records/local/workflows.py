"""Workflows in the local result file: their documents, and the index."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Final

from aztask.address.owner import NO_OWNER, Owner
from aztask.queues.engine import Database
from aztask.stores.local.rows import rows_of
from aztask.stores.records.base import UNFINISHED_SECONDS
from aztask.stores.records.documentsigning import SignedDocuments
from aztask.stores.records.owners import foreign_id, is_foreign, is_other_broker
from aztask.stores.records.rowsigning import NO_SIGNER, RowSigner
from aztask.stores.records.workflows import Addition, Document, DocumentChange, ListedWorkflow

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
# A component of its own: an older release still opens the file, and makes rows without an owner.
_OWNER_STEPS: Final = (
    """
    ALTER TABLE workflows ADD COLUMN broker TEXT;
    ALTER TABLE workflow_documents ADD COLUMN broker TEXT;
    """,
)
# A release that knows no signatures raises the version, and leaves the signature of one before.
_SIGNED_STEPS: Final = (
    """
    ALTER TABLE workflow_documents ADD COLUMN signature BLOB;
    ALTER TABLE workflow_documents ADD COLUMN signed INTEGER;
    """,
)
_READ: Final = """
    SELECT data, version, broker, CASE WHEN signed = version THEN signature END
    FROM workflow_documents WHERE workflow = ? AND name = ?
"""
_UNSIGNED: Final = """
    SELECT name FROM workflow_documents
    WHERE workflow = ? AND (signature IS NULL OR signed IS NOT version)
"""
_INSERT: Final = """
    INSERT INTO workflow_documents (workflow, name, version, data, broker, signature, signed)
    VALUES (?, ?, 1, ?, ?, ?, 1)
    ON CONFLICT DO NOTHING
"""
_REPLACE: Final = """
    UPDATE workflow_documents SET data = ?, signature = ?, version = version + 1,
        signed = version + 1, broker = coalesce(broker, ?)
    WHERE workflow = ? AND name = ? AND version = ?
"""
_APPEND: Final = """
    UPDATE workflow_documents SET data = CAST(data || ? AS BLOB), version = version + 1,
        signature = CASE WHEN signed = version THEN CAST(signature || ? AS BLOB) END,
        signed = version + 1
    WHERE workflow = ? AND name = ?
"""
_OURS: Final = "(broker IS NULL OR broker = :mine OR :mine = '')"
_DELETE: Final = f"DELETE FROM workflow_documents WHERE workflow = :workflow AND {_OURS}"
_DELETE_LISTED: Final = f"DELETE FROM workflows WHERE workflow = :workflow AND {_OURS}"
_ANNOUNCE: Final = (
    "INSERT INTO workflows (workflow, at, broker) VALUES (?, ?, ?) ON CONFLICT DO NOTHING"
)
_CLOSE: Final = """
    INSERT INTO workflows (workflow, at, ended_at, broker) VALUES (?, ?, ?, ?)
    ON CONFLICT DO UPDATE SET ended_at = excluded.ended_at,
        broker = coalesce(workflows.broker, excluded.broker)
"""
_REOPEN: Final = """
    INSERT INTO workflows (workflow, at, broker) VALUES (?, ?, ?)
    ON CONFLICT DO UPDATE SET ended_at = NULL,
        broker = coalesce(workflows.broker, excluded.broker)
"""
_LISTED: Final = "SELECT workflow, at, ended_at, broker FROM workflows WHERE"
_OPEN: Final = f"""
    {_LISTED} ended_at IS NULL AND workflow > :after AND (broker = :mine OR :mine = '')
    ORDER BY workflow LIMIT :limit
"""
_NEWEST: Final = f"""
    {_LISTED} ended_at IS NOT NULL AND (broker = :mine OR :mine = '')
    ORDER BY ended_at DESC LIMIT :limit
"""
_OLD: Final = f"""
    {_LISTED} ended_at < :before AND (
        broker = :mine OR :mine = ''
        OR (broker IS NULL AND ended_at < :before - {UNFINISHED_SECONDS}))
    ORDER BY ended_at LIMIT :limit
"""
_ALL_OPEN: Final = f"{_LISTED} ended_at IS NULL ORDER BY at DESC LIMIT :limit"
_ALL_ENDED: Final = f"{_LISTED} ended_at IS NOT NULL ORDER BY ended_at DESC LIMIT :limit"
_OWN_IT: Final = (
    "UPDATE workflows SET broker = ? WHERE workflow = ? AND broker IS NULL",
    "UPDATE workflow_documents SET broker = ? WHERE workflow = ? AND broker IS NULL",
)
_OWNER: Final = "SELECT broker FROM workflows WHERE workflow = ?"
_ADOPT: Final = (
    "UPDATE workflow_documents SET broker = ? WHERE broker = ?",
    "UPDATE workflows SET broker = ? WHERE broker = ?",
)

KEPT: Final = """
    AND NOT EXISTS (
        SELECT 1 FROM workflows WHERE workflows.workflow =
            substr(runs.task_id, 1, length(rtrim(runs.task_id, '0123456789')) - 1))
"""
"""The condition for runs that belong to no workflow: a node's task id is ``WORKFLOW.NUMBER``."""


class LocalWorkflows:
    """The local implementation of `aztask.stores.records.workflows.WorkflowStore`."""

    def __init__(
        self, database: Database, owner: Owner = NO_OWNER, signer: RowSigner = NO_SIGNER
    ) -> None:
        """owner: whose workflows it makes and acts on; NO_OWNER: those of everyone."""
        self._signed = SignedDocuments(signer)
        self._database = database
        self._owner = owner
        database.migrate("workflows", _STEPS)
        database.migrate("workflow_owners", _OWNER_STEPS)
        database.migrate("signed_workflows", _SIGNED_STEPS)

    def announce(self, workflow: str, at: float, summary: bytes = b"") -> None:
        """List it as open since `at`, unless it is listed; no summary is kept."""
        with self._database.transaction() as connection:
            row = (workflow, at, self._owner.broker or None)
            if not connection.execute(_ANNOUNCE, row).rowcount:
                self._check(connection, workflow)

    def describe(self, workflow: str, at: float, summary: bytes) -> None:
        """Do nothing: no summary is kept."""

    def own_workflow(self, workflow: str, at: float) -> None:
        """Adopt a workflow without an owner, with its documents, in one transaction."""
        if not self._owner.known:
            return
        with self._database.transaction() as connection:
            for sql in _OWN_IT:
                connection.execute(sql, (self._owner.broker, workflow))
                self._check(connection, workflow)

    def read(self, names: Sequence[tuple[str, str]]) -> list[Document | None]:
        """The documents with these names; None for missing ones."""
        with self._database.read() as connection:
            return [self._read(connection, *each) for each in names]

    def write(self, changes: Sequence[DocumentChange]) -> list[str | None]:
        """Make each change whose tag is the current one; returns the new tags."""
        with self._database.transaction() as connection:
            return [self._write(connection, each) for each in changes]

    def append(self, additions: Sequence[Addition]) -> list[Document | None]:
        """Append pieces in one transaction, which a document of another owner undoes."""
        with self._database.transaction() as connection:
            for each in additions:
                data, signatures = self._signed.joined_pieces(self._signed.closed_pieces(each))
                connection.execute(_APPEND, (data, signatures, each.workflow, each.name))
            return [self._read(connection, each.workflow, each.name) for each in additions]

    def unsigned_documents(self, workflow: str) -> list[str]:
        """The names of its documents that are not signed; the pieces of a document count as it."""
        if not self._signed.takes_unsigned:
            return []
        with self._database.read() as connection:
            found = rows_of(connection, _UNSIGNED, (workflow,))
        return [name for (name,) in found if isinstance(name, str)]

    def close_workflow(
        self, workflow: str, at: float, ended_at: float, summary: bytes = b""
    ) -> None:
        """List it as ended, once and for all readers; no summary is kept."""
        self._database.change(_CLOSE, (workflow, at, ended_at, self._owner.broker or None))

    def reopen_workflow(self, workflow: str, at: float, ended_at: float) -> None:
        """List it as open again."""
        self._database.change(_REOPEN, (workflow, at, self._owner.broker or None))

    def open_workflows(self, limit: int, after: str = "") -> list[ListedWorkflow]:
        """Own open workflows in the order of their ids, those behind `after`."""
        return self._listed(_OPEN, limit, after=after)

    def ended_workflows(self, limit: int, before: float | None = None) -> list[ListedWorkflow]:
        """The newest own ended workflows, or those that ended before a time."""
        if before is None:
            return self._listed(_NEWEST, limit)
        return self._listed(_OLD, limit, before=before)

    def all_workflows(self, limit: int) -> list[ListedWorkflow]:
        """Workflows of all owners, the newest of the open and of the ended ones."""
        return [*self._listed(_ALL_OPEN, limit), *self._listed(_ALL_ENDED, limit)]

    def delete_workflow(self, listed: ListedWorkflow) -> bool:
        """Delete its documents and its place in the index, in one transaction."""
        values = {"workflow": listed.workflow, "mine": self._owner.broker}
        with self._database.transaction() as connection:
            found = connection.execute(_DELETE, values).rowcount
            connection.execute(_DELETE_LISTED, values)
            return found > 0

    def owners(self) -> set[Owner]:
        """The brokers that open and ended workflows belong to."""
        with self._database.read() as connection:
            found = connection.execute("SELECT DISTINCT broker FROM workflows").fetchall()
        return {Owner(broker) for (broker,) in found if broker and isinstance(broker, str)}

    def unowned(self, before: float) -> int:
        """How many open workflows without an owner were started before a time."""
        sql = "SELECT COUNT(*) FROM workflows WHERE broker IS NULL AND ended_at IS NULL AND at < ?"
        with self._database.read() as connection:
            (count,) = connection.execute(sql, (before,)).fetchone()
        return int(count)

    def adopt(self, old: Owner) -> int:
        """Make the workflows of another owner its own, in one transaction; returns how many."""
        if not is_other_broker(self._owner, old):
            return 0
        moved = 0
        with self._database.transaction() as connection:
            for sql in _ADOPT:
                moved = connection.execute(sql, (self._owner.broker, old.broker)).rowcount
        return moved

    def _check(self, connection: sqlite3.Connection, workflow: str) -> None:
        """Raise ForeignId if the workflow is listed for another owner."""
        found = connection.execute(_OWNER, (workflow,)).fetchone()
        if found is not None:
            self._check_owner(workflow, found[0])

    def _check_owner(self, workflow: str, broker: object) -> str:
        """The owner of a row. Raises ForeignId if it is another one than this store's."""
        known = broker if isinstance(broker, str) else ""
        if is_foreign(self._owner, known):
            raise foreign_id("workflow", workflow, known, self._owner)
        return known

    def _read(self, connection: sqlite3.Connection, workflow: str, name: str) -> Document | None:
        found = connection.execute(_READ, (workflow, name)).fetchone()
        if found is None:
            return None
        data, version, broker, signature = found
        known = self._check_owner(workflow, broker)
        data, refused = self._signed.believed((workflow, name), data, signature)
        return Document(data, str(version), broker=known, refused=refused)

    def _write(self, connection: sqlite3.Connection, change: DocumentChange) -> str | None:
        mine = self._owner.broker or None
        change = self._signed.closed(change)
        signature = self._signed.joined(change)
        if change.tag is None:
            values: tuple[object, ...] = (
                change.workflow,
                change.name,
                change.data,
                mine,
                signature,
            )
            return "1" if connection.execute(_INSERT, values).rowcount else None
        version = int(change.tag)
        values = (change.data, signature, mine, change.workflow, change.name, version)
        return str(version + 1) if connection.execute(_REPLACE, values).rowcount else None

    def _listed(self, sql: str, limit: int, **values: object) -> list[ListedWorkflow]:
        named = {"mine": self._owner.broker, "limit": limit, **values}
        with self._database.read() as connection:
            rows = rows_of(connection, sql, named)
        return [_listed(*row) for row in rows if _is_listed(*row)]


def _listed(workflow: str, at: float, ended_at: float | None, broker: object) -> ListedWorkflow:
    return ListedWorkflow(workflow, at, ended_at, broker if isinstance(broker, str) else "")


def _is_listed(workflow: object, at: object, ended_at: object, broker: object) -> bool:
    """True unless another program wrote the row: SQLite stores any value in any column."""
    times = (at, 0.0 if ended_at is None else ended_at)
    return isinstance(workflow, str) and all(isinstance(each, int | float) for each in times)
