"""When the state of each session was set last: clients list the sessions that changed since a time.

The engine keeps the states themselves, without their times.
"""

from __future__ import annotations

from aztask.engine import Database

_STEPS = [
    "CREATE TABLE emulator_session_times (queue TEXT NOT NULL, session TEXT NOT NULL,"
    " updated REAL NOT NULL, PRIMARY KEY (queue, session)) WITHOUT ROWID",
]


class SessionTimes:
    """The times, in UTC epoch seconds, by queue path and session."""

    def __init__(self, database: Database) -> None:
        self._database = database
        database.migrate("emulator-session-times", _STEPS)

    def note(self, queue: str, session: str, at: float) -> None:
        """The state of the session was set."""
        with self._database.statement() as connection:
            connection.execute(
                "REPLACE INTO emulator_session_times VALUES (?, ?, ?)", (queue, session, at)
            )

    def forget(self, queue: str, session: str | None = None) -> None:
        """The session has no state any more; without a session, the queue is gone."""
        with self._database.statement() as connection:
            connection.execute(
                "DELETE FROM emulator_session_times"
                " WHERE queue = ? AND session = ifnull(?, session)",
                (queue, session),
            )

    def until(self, queue: str, at: float) -> set[str]:
        """The sessions of the queue whose state was last set at that time or before."""
        with self._database.read() as connection:
            rows = connection.execute(
                "SELECT session FROM emulator_session_times WHERE queue = ? AND updated <= ?",
                (queue, at),
            ).fetchall()
        return {session for (session,) in rows}
