"""Damaged rows in the local result file: which ones, since when, and why.

Rules
1. A row in quarantine stays unchanged in its table, so that you can inspect it. This table has its
   number and the reason; as long as they are here, the row counts as damaged. A row that is here
   for its signature counts if the signature does not fit now (`aztask.stores.records.rowsigning`).
2. The number is deleted together with the row, whatever deletes it: SQLite gives the number to a
   later row.
"""

from __future__ import annotations

import logging
import sqlite3
from typing import Final

from aztask.address.owner import NO_OWNER, Owner
from aztask.queues.engine import Database
from aztask.stores.local.rows import rows_of
from aztask.stores.records.base import UNFINISHED_SECONDS, RunRecord
from aztask.stores.records.damage import KEPT
from aztask.stores.records.local.rows import COLUMNS, StoredRun, run_of
from aztask.stores.records.local.runowners import OURS, PURGED
from aztask.stores.records.rowsigning import NO_SIGNER, RowSigner

logger = logging.getLogger(__name__)

_STEPS: Final = (
    """
    CREATE TABLE damaged_runs (id INTEGER PRIMARY KEY, at REAL NOT NULL, reason TEXT NOT NULL);
    CREATE TRIGGER damaged_run_gone AFTER DELETE ON runs
    BEGIN DELETE FROM damaged_runs WHERE id = OLD.id; END;
    """,
)
_NOTE: Final = "INSERT INTO damaged_runs VALUES (?, ?, ?) ON CONFLICT DO NOTHING"
# CROSS JOIN fixes the order: first the few rows in quarantine, then each one's run
# (sqlite.org/optoverview.html, "Manual control of query plans using CROSS JOIN"). Without it SQLite
# reads all runs, in every purge.
_LIST: Final = (
    f"SELECT {COLUMNS} FROM runs WHERE id IN "  # constants
    f"(SELECT damaged_runs.id FROM damaged_runs CROSS JOIN runs USING (id) WHERE {OURS} "
    "OR typeof(runs.broker) <> 'text' ORDER BY at DESC LIMIT :limit) ORDER BY id DESC"
)
_PURGE: Final = f"""
    DELETE FROM runs WHERE id IN (
        SELECT damaged_runs.id FROM damaged_runs CROSS JOIN runs USING (id)
        WHERE at < CASE WHEN typeof(runs.broker) = 'text' THEN :before ELSE :unowned END
        AND ({PURGED} OR typeof(runs.broker) <> 'text') LIMIT :rows)
"""
PURGE_ROWS: Final = 2_000


class LocalQuarantine:
    """The damaged rows. Each call runs in the caller's transaction or read."""

    def __init__(
        self, database: Database, signer: RowSigner = NO_SIGNER, owner: Owner = NO_OWNER
    ) -> None:
        """signer: verifies them. owner: whose rows it deletes."""
        self._signer = signer
        self._mine = owner.broker
        database.migrate("damaged_runs", _STEPS)

    def note(self, connection: sqlite3.Connection, run: StoredRun, reason: str, at: float) -> None:
        """Put a damaged row into quarantine, and log it the first time."""
        if connection.execute(_NOTE, (run.id, at, reason)).rowcount:
            key = run.record.key
            logger.error(KEPT, key.task_id, key.generation, key.hop, reason)

    def judge(self, connection: sqlite3.Connection, run: StoredRun, at: float) -> None:
        """Put a row that was read into quarantine, or take it out: its signature fits after all."""
        if run.record.damage:
            self.note(connection, run, run.record.damage, at)
        elif run.marked and self._signer:
            connection.execute("DELETE FROM damaged_runs WHERE id = ?", (run.id,))

    def runs(self, connection: sqlite3.Connection, limit: int, mine: str) -> list[RunRecord]:
        """The runs in quarantine, the newest first. mine: whose, "" for those of everyone.

        Without keys, those that are there for their signatures are listed as they were found.
        """
        values = {"mine": mine, "limit": limit}
        found = (
            run_of(row, self._signer, listed=not self._signer).record
            for row in rows_of(connection, _LIST, values)
        )
        return [each for each in found if each.damage]

    def purge(self, connection: sqlite3.Connection, before: float) -> int:
        """Delete rows that were put into quarantine before that time; returns how many."""
        unowned = before - UNFINISHED_SECONDS if self._mine else before
        values = {"mine": self._mine, "before": before, "unowned": unowned, "rows": PURGE_ROWS}
        return connection.execute(_PURGE, values).rowcount
