"""The time at which the state of each session was last set.

Clients list the sessions whose state changed since a time. The engine stores the states without
their times.
"""

from __future__ import annotations

from aztask.queues.engine import Database

_STEPS = [
    "CREATE TABLE emulator_session_times (queue TEXT NOT NULL, session TEXT NOT NULL,"
    " updated REAL NOT NULL, PRIMARY KEY (queue, session)) WITHOUT ROWID",
]


class SessionTimes:
    """Stores the times, in UTC epoch seconds, by queue path and session."""

    def __init__(self, database: Database) -> None:
        self._database = database
        database.migrate("emulator-session-times", _STEPS)

    def note(self, queue: str, session: str, at: float) -> None:
        """Remember that the state of a session was set at this time."""
        with self._database.statement() as connection:
            connection.execute(
                "REPLACE INTO emulator_session_times VALUES (?, ?, ?)", (queue, session, at)
            )

    def forget(self, queue: str, session: str | None = None) -> None:
        """Forget a session whose state was deleted, or all sessions of a deleted queue."""
        with self._database.statement() as connection:
            connection.execute(
                "DELETE FROM emulator_session_times"
                " WHERE queue = ? AND session = ifnull(?, session)",
                (queue, session),
            )

    def until(self, queue: str, at: float) -> set[str]:
        """Return the sessions of a queue whose state was last set at this time or before."""
        with self._database.read() as connection:
            rows = connection.execute(
                "SELECT session FROM emulator_session_times WHERE queue = ? AND updated <= ?",
                (queue, at),
            ).fetchall()
        return {session for (session,) in rows}
