"""Sessions: one holder at a time receives a session's messages in order.

Rules
1. A session has its own lease, and the leases of its messages end with it. Renewing the session
   renews them, and releasing it gives them back.
2. Releasing a session does not count as a delivery of its unsettled messages; losing it does
   (learn.microsoft.com, "Message sessions", impact of delivery count).
3. The order of sessions is not guaranteed, but they take turns, so each one is received eventually.
"""

from __future__ import annotations

import secrets
import sqlite3
from typing import Final

from aztask.errors import ConfigurationError, LeaseLost
from aztask.queues.engine.messages import LEASED, READY, Leased, SessionLease
from aztask.queues.engine.queues import BURY_EXHAUSTED, GIVE_BACK, Queue, QueueTable
from aztask.queues.engine.receiving import GRANT, REMOVE, Sweeper, leased

_NEXT: Final = f"""
WITH RECURSIVE candidates (session) AS (
    SELECT min(session) FROM messages WHERE box = :box AND state = {READY} AND session > :after
    UNION ALL
    SELECT (SELECT min(m.session) FROM messages m
            WHERE m.box = :box AND m.state = {READY} AND m.session > candidates.session)
    FROM candidates WHERE candidates.session IS NOT NULL
)
SELECT session FROM candidates WHERE session IS NOT NULL AND NOT EXISTS (
    SELECT 1 FROM sessions held
    WHERE held.box = :box AND held.session = candidates.session AND held.until > :now)
LIMIT 1
"""
_ACCEPT: Final = (
    "INSERT INTO sessions (box, session, token, until) VALUES (?, ?, ?, ?) "
    "ON CONFLICT (box, session) DO UPDATE SET token = excluded.token, until = excluded.until "
    "WHERE until <= ?"
)
_MINE: Final = "box = ? AND session = ? AND token = ? AND until > ?"
_FORGET: Final = "DELETE FROM sessions WHERE box = ? AND until <= ? AND state IS NULL"
_IN_SESSION: Final = (
    f"seq IN (SELECT seq FROM messages WHERE box = ? AND state = {READY} AND session = ? "
    "AND (expires_at IS NULL OR expires_at > ?) ORDER BY seq LIMIT ?)"
)
_GRANT_IN_SESSION: Final = GRANT.format(_IN_SESSION)
_REMOVE_IN_SESSION: Final = REMOVE.format(_IN_SESSION)
_LEASED_IN_SESSION: Final = f"box = ? AND session = ? AND state = {LEASED}"


class Sessions:
    """The part of the engine that leases sessions with their messages, and stores their state."""

    def __init__(self, queues: QueueTable, sweeper: Sweeper) -> None:
        self._queues = queues
        self._database = queues.database
        self._clock = queues.clock
        self._sweeper = sweeper
        self._turns: dict[int, str] = {}

    def accept(
        self, queue: str, session: str | None = None, lease_seconds: float | None = None
    ) -> SessionLease | None:
        """Accept the named session, or any session that has ready messages and no holder.

        Returns None if the session is held, or no session is available. A named session may be
        empty. Raises ConfigurationError if the queue has no sessions.
        """
        found = self._with_sessions(queue)
        self._sweeper.sweep(found, found.id)
        until = self._queues.lease_end(found, lease_seconds)
        now, token = self._clock.monotonic(), secrets.token_hex(16)
        with self._database.transaction() as connection:
            name = self._next_session(connection, found, now) if session is None else session
            if name is None:
                return None
            if connection.execute(_ACCEPT, (found.id, name, token, until, now)).rowcount == 0:
                return None
            connection.execute(f"{BURY_EXHAUSTED} {_LEASED_IN_SESSION}", (found.id, name))
            connection.execute(f"{GIVE_BACK} {_LEASED_IN_SESSION}", (found.id, name))
        return SessionLease(name, token, until)

    def _next_session(self, connection: sqlite3.Connection, queue: Queue, now: float) -> str | None:
        for after in (self._turns.get(queue.id, ""), ""):
            values = {"box": queue.id, "after": after, "now": now}
            row = connection.execute(_NEXT, values).fetchone()
            if row is not None:
                name = self._turns[queue.id] = str(row[0])
                return name
        return None

    def renew(
        self, queue: str, lease: SessionLease, seconds: float | None = None
    ) -> SessionLease | None:
        """Let the leases of the session and its messages end `seconds` from now; None if lost."""
        found = self._with_sessions(queue)
        until = self._queues.lease_end(found, seconds)
        mine = (found.id, lease.session, lease.token, self._clock.monotonic())
        with self._database.transaction() as connection:
            renewed = connection.execute(
                f"UPDATE sessions SET until = ? WHERE {_MINE}", (until, *mine)
            )
            if renewed.rowcount == 0:
                return None
            connection.execute(
                f"UPDATE messages SET moment = ? WHERE {_LEASED_IN_SESSION}",
                (until, found.id, lease.session),
            )
        return lease._replace(until=until)

    def release(self, queue: str, lease: SessionLease) -> bool:
        """Release the session and its leased messages; returns False if it was lost."""
        found, now = self._with_sessions(queue), self._clock.monotonic()
        mine = (found.id, lease.session, lease.token, now)
        with self._database.transaction() as connection:
            released = connection.execute(
                f"UPDATE sessions SET token = NULL, until = ? WHERE {_MINE}", (now, *mine)
            ).rowcount
            if released:
                connection.execute(
                    "UPDATE messages SET state = home, moment = NULL, token = NULL, "
                    f"deliveries = max(deliveries - 1, 0) WHERE {_LEASED_IN_SESSION}",
                    (found.id, lease.session),
                )
            connection.execute(_FORGET, (found.id, now))
        return released == 1

    def receive(self, name: str, lease: SessionLease, limit: int, delete: bool) -> list[Leased]:
        """Lease or remove the session's first messages; see `Engine.receive`."""
        queue = self._with_sessions(name)
        box, wall = queue.id, self._clock.wall()
        if self._sweeper.due(box):
            self._sweeper.sweep(queue, box)
        with self._database.transaction() as connection:
            until = self._held_until(connection, queue, lease)
            chosen = (box, lease.session, wall, limit)
            if delete:
                rows = connection.execute(_REMOVE_IN_SESSION, (*chosen, until)).fetchall()
            else:
                rows = connection.execute(_GRANT_IN_SESSION, (until, *chosen)).fetchall()
        return leased(rows)

    def state(self, queue: str, lease: SessionLease) -> bytes | None:
        """The bytes that were last stored with the session. Raises LeaseLost."""
        found = self._with_sessions(queue)
        with self._database.transaction() as connection:
            self._held_until(connection, found, lease)
            (state,) = connection.execute(
                "SELECT state FROM sessions WHERE box = ? AND session = ?",
                (found.id, lease.session),
            ).fetchone()
        return None if state is None else bytes(state)

    def set_state(self, queue: str, lease: SessionLease, state: bytes | None) -> None:
        """Store bytes with the session; they outlive its messages. Raises LeaseLost."""
        found = self._with_sessions(queue)
        with self._database.transaction() as connection:
            self._held_until(connection, found, lease)
            connection.execute(
                "UPDATE sessions SET state = ? WHERE box = ? AND session = ?",
                (state, found.id, lease.session),
            )

    def names(self, queue: str, *, with_state: bool = False) -> list[str]:
        """The sorted sessions that have messages, or with `with_state` those that have a state."""
        found = self._with_sessions(queue)
        source = (
            "sessions WHERE box = ? AND state IS NOT NULL"
            if with_state
            else "messages WHERE box = ? AND session IS NOT NULL"
        )
        with self._database.read() as connection:
            rows = connection.execute(
                f"SELECT DISTINCT session FROM {source} ORDER BY session", (found.id,)
            )
            return [session for (session,) in rows]

    def _with_sessions(self, name: str) -> Queue:
        queue = self._queues.find(name)
        if not queue.settings.sessions:
            raise ConfigurationError(
                f"queue {name!r} has no sessions; create it with sessions, or receive without one"
            )
        return queue

    def _held_until(
        self, connection: sqlite3.Connection, queue: Queue, lease: SessionLease
    ) -> float:
        mine = (queue.id, lease.session, lease.token, self._clock.monotonic())
        row = connection.execute(f"SELECT until FROM sessions WHERE {_MINE}", mine).fetchone()
        if row is None:
            raise LeaseLost(
                f"the lease of session {lease.session!r} of queue {queue.name!r} has ended; "
                "accept it again"
            )
        return float(row[0])
