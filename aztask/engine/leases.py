"""Receives messages under leases, renews the leases, and settles the messages.

Rules
1. The holder of the token holds the lease until ``lease_until``. From that instant on the lease is
   lost, even if no other receiver has leased the message yet. A message has at most one lease.
2. Every call takes a batch, answers for each message in order, and is one transaction. A batch is
   settled by one statement. If some of its leases are lost, the batch is rolled back and repeated
   one by one, inside the same transaction.
3. The delivery count rises when a lease is granted, and falls only when the lease is released.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Final, TypeAlias

from aztask.engine.bulk import BatchStatement, Row
from aztask.engine.intake import Intake
from aztask.engine.messages import DEFERRED, LEASED, READY, SCHEDULED, Leased, NewMessage
from aztask.engine.queues import BURY, BURY_EXHAUSTED, EXHAUSTED, GIVE_BACK, Queue
from aztask.errors import ConfigurationError

Lease: TypeAlias = tuple[int, str]
"""The proof of a lease: the message's sequence number and the token."""

_GRANTED: Final = (
    "message_id, session, deliveries, enqueued_at, expires_at, moment, reason, description"
)
_GRANT: Final = (
    f"UPDATE messages SET state = {LEASED}, moment = ?, deliveries = deliveries + 1, "
    "token = lower(hex(randomblob(16))) WHERE {} RETURNING seq, token, payload, " + _GRANTED
)
_REMOVE: Final = (
    "DELETE FROM messages WHERE {} RETURNING seq, '', payload, message_id, session, "
    "deliveries + 1, enqueued_at, expires_at, ?, reason, description"
)
_READY: Final = (
    f"(SELECT seq FROM messages WHERE box = ? AND state = {READY} AND moment IS NULL "
    "AND (expires_at IS NULL OR expires_at > ?) ORDER BY seq LIMIT ?)"
)
_ONE_DEFERRED: Final = (
    f"seq = ? AND box = ? AND state = {DEFERRED} AND (expires_at IS NULL OR expires_at > ?)"
)
_ONE_WAITING: Final = _ONE_DEFERRED.replace(f"= {DEFERRED}", f"IN ({DEFERRED}, {READY})")
_GRANT_NEXT: Final = _GRANT.format(f"seq IN {_READY}")
_GRANT_ONE: Final = _GRANT.format(f"seq = {_READY}")  # with a limit of 1 SQLite needs no list
_REMOVE_NEXT: Final = _REMOVE.format(f"seq IN {_READY}")
_GRANT_DEFERRED: Final = _GRANT.format(_ONE_DEFERRED)
_REMOVE_DEFERRED: Final = _REMOVE.format(_ONE_DEFERRED)
_GRANT_WAITING: Final = _GRANT.format(_ONE_WAITING)
_REMOVE_WAITING: Final = _REMOVE.format(_ONE_WAITING)

_HELD: Final = "seq = ? AND token = ? AND moment > ? AND box = ?"
_LOOK: Final = f"SELECT moment FROM messages WHERE {_HELD}"
_REPLACE_PAYLOAD: Final = f"UPDATE messages SET payload = ?, moment = ? WHERE {_HELD}"
_DELAY: Final = (
    f"UPDATE messages SET state = {SCHEDULED}, home = {READY}, moment = ?, token = NULL "
    f"WHERE {_HELD}"
)
_HELD_AND_EXHAUSTED: Final = f"{BURY_EXHAUSTED} {_HELD}"
_GIVE_BACK_HELD: Final = f"{GIVE_BACK} {_HELD} AND ({EXHAUSTED}) IS NOT TRUE"

_ALL_HELD: Final = (
    "seq IN (SELECT m.seq FROM (VALUES {rows}) AS held CROSS JOIN messages AS m "
    "ON m.seq = held.column1 AND m.token = held.column2 WHERE m.moment > ? AND m.box = ?)"
)


def _for_held(action: str) -> BatchStatement:
    """The statement that does `action` to messages whose leases hold, one or many at once."""
    return BatchStatement(f"{action} WHERE {_HELD}", f"{action} WHERE {_ALL_HELD}", "(?, ?)")


_COMPLETE: Final = _for_held("DELETE FROM messages")
_RENEW: Final = _for_held("UPDATE messages SET moment = ?")
_RELEASE: Final = _for_held(
    "UPDATE messages SET state = home, moment = NULL, token = NULL, "
    "deliveries = max(deliveries - 1, 0)"
)
_DEFER: Final = _for_held(
    f"UPDATE messages SET state = {DEFERRED}, home = {DEFERRED}, moment = NULL, token = NULL"
)
_DEAD: Final = _for_held(f"{BURY} reason = ?, description = ?, payload = coalesce(?, payload)")


class Leases(Intake):
    """Adds receiving, renewing and settling to the engine."""

    def _receive_ready(
        self, name: str, limit: int, lease_seconds: float | None, dead_letter: bool, delete: bool
    ) -> list[Leased]:
        queue = self._queue(name)
        if queue.settings.sessions and not dead_letter:
            raise ConfigurationError(
                f"queue {name!r} has sessions: accept one and receive through it"
            )
        box = queue.box(dead_letter)
        swept = self._sweep_due(box)
        if swept:
            self._sweep(queue, box)
        rows = self._take(queue, box, limit, lease_seconds, delete)
        if not rows and not swept and self._sweep(queue, box):
            rows = self._take(queue, box, limit, lease_seconds, delete)
        if not rows and self._load(name).id != queue.id:
            return self._receive_ready(name, limit, lease_seconds, dead_letter, delete)
        return rows

    def _take(
        self, queue: Queue, box: int, limit: int, lease_seconds: float | None, delete: bool
    ) -> list[Leased]:
        until = self._lease_end(queue, lease_seconds)
        wall = self.clock.wall()
        with self.database.statement() as connection:
            if delete:
                rows = connection.execute(_REMOVE_NEXT, (box, wall, limit, until)).fetchall()
            else:
                grant = _GRANT_ONE if limit == 1 else _GRANT_NEXT
                rows = connection.execute(grant, (until, box, wall, limit)).fetchall()
        return leased(rows)

    def receive_deferred(
        self,
        queue: str,
        seqs: Sequence[int],
        lease_seconds: float | None = None,
        *,
        dead_letter: bool = False,
        delete: bool = False,
        waiting: bool = False,
    ) -> list[Leased]:
        """Lease deferred messages by number; missing and leased ones are skipped.

        delete: remove them instead, at most once. waiting: also accept messages that are not
        deferred. A message that is given back returns to its earlier state.
        """
        found = self._queue(queue)
        box, wall = found.box(dead_letter), self.clock.wall()
        self._sweep(found, box)
        until = self._lease_end(found, lease_seconds)
        grant = _GRANT_WAITING if waiting else _GRANT_DEFERRED
        remove = _REMOVE_WAITING if waiting else _REMOVE_DEFERRED
        rows: list[tuple[object, ...]] = []
        with self.database.transaction() as connection:
            for seq in seqs:
                if delete:
                    cursor = connection.execute(remove, (seq, box, wall, until))
                else:
                    cursor = connection.execute(grant, (until, seq, box, wall))
                rows += cursor.fetchall()
        return [Leased._make(row) for row in rows]

    def renew(
        self,
        queue: str,
        leases: Sequence[Lease],
        seconds: float | None = None,
        *,
        dead_letter: bool = False,
    ) -> list[float | None]:
        """Let each lease end `seconds` from now; returns the new ends, None for a lost lease.

        The leases of a session's messages are renewed with their session. For them, this only
        returns the ends.
        """
        found = self._queue(queue)
        box, now = found.box(dead_letter), self.clock.monotonic()
        if found.settings.sessions and not dead_letter:
            return self._ends(box, leases, now)
        until = self._lease_end(found, seconds)
        held = self._settle(_RENEW, leases, (now, box), (until,))
        return [until if still else None for still in held]

    def _ends(self, box: int, leases: Sequence[Lease], now: float) -> list[float | None]:
        with self.database.transaction() as connection:
            rows = [connection.execute(_LOOK, (s, t, now, box)).fetchone() for s, t in leases]
        return [row[0] if row else None for row in rows]

    def update(
        self,
        queue: str,
        seq: int,
        token: str,
        payload: bytes,
        seconds: float | None = None,
        *,
        dead_letter: bool = False,
    ) -> float | None:
        """Replace the payload in place and renew the lease; returns its end, None if it is lost."""
        found = self._queue(queue)
        box, now = found.box(dead_letter), self.clock.monotonic()
        until = self._lease_end(found, seconds)
        with self.database.transaction() as connection:
            if found.settings.sessions and not dead_letter:
                row = connection.execute(_LOOK, (seq, token, now, box)).fetchone()
                until = row[0] if row else until
            held = connection.execute(_REPLACE_PAYLOAD, (payload, until, seq, token, now, box))
            return until if held.rowcount else None

    def complete(
        self, queue: str, leases: Sequence[Lease], *, dead_letter: bool = False
    ) -> list[bool]:
        """Remove the messages; the answer is False for each lost lease."""
        box, now = self._queue(queue).box(dead_letter), self.clock.monotonic()
        if len(leases) == 1:  # the most frequent call: as `_settle`, without its overhead
            return [self.database.change(_COMPLETE.one, (*leases[0], now, box)) == 1]
        return self._settle(_COMPLETE, leases, (now, box))

    def abandon(
        self,
        queue: str,
        leases: Sequence[Lease],
        delay: float = 0.0,
        *,
        dead_letter: bool = False,
    ) -> list[bool]:
        """Give the messages back: at once and in their old place, or after `delay` seconds.

        A message that has reached the queue's delivery limit becomes a dead letter instead.
        """
        box, now = self._queue(queue).box(dead_letter), self.clock.monotonic()
        rows = [(seq, token, now, box) for seq, token in leases]
        due = (self.clock.wall() + delay,) if delay > 0 else ()
        answers = []
        with self.database.transaction() as connection:
            for row in rows:
                held = connection.execute(_HELD_AND_EXHAUSTED, row).rowcount
                if not held and due:
                    held = connection.execute(_DELAY, due + row).rowcount
                elif not held:
                    held = connection.execute(_GIVE_BACK_HELD, row).rowcount
                answers.append(held == 1)
        return answers

    def release(
        self, queue: str, leases: Sequence[Lease], *, dead_letter: bool = False
    ) -> list[bool]:
        """Give the messages back without counting this delivery."""
        box, now = self._queue(queue).box(dead_letter), self.clock.monotonic()
        return self._settle(_RELEASE, leases, (now, box))

    def defer(
        self, queue: str, leases: Sequence[Lease], *, dead_letter: bool = False
    ) -> list[bool]:
        """Defer the messages: only `receive_deferred` returns them."""
        box, now = self._queue(queue).box(dead_letter), self.clock.monotonic()
        return self._settle(_DEFER, leases, (now, box))

    def dead_letter(
        self,
        queue: str,
        leases: Sequence[Lease],
        reason: str,
        description: str = "",
        payload: bytes | None = None,
        *,
        dead_letter: bool = False,
    ) -> list[bool]:
        """Move the messages to the dead letters; they keep their numbers and never expire.

        payload: replaces the payload; None keeps it.
        """
        box, now = self._queue(queue).box(dead_letter), self.clock.monotonic()
        return self._settle(_DEAD, leases, (now, box), (reason, description, payload))

    def replace(
        self,
        queue: str,
        replacements: Sequence[tuple[int, str, NewMessage]],
        *,
        dead_letter: bool = False,
    ) -> list[bool]:
        """Remove each message and send its clone to the queue: both or neither.

        A clone that duplicate detection drops counts as sent. For a lost lease nothing is sent. For
        dead letters this is a replay.
        """
        box, now = self._queue(queue).box(dead_letter), self.clock.monotonic()
        with self.database.transaction() as connection:
            leases = [(seq, token) for seq, token, _ in replacements]
            answers = self._settle(_COMPLETE, leases, (now, box))
            clones = [
                clone for (_, _, clone), held in zip(replacements, answers, strict=True) if held
            ]
            if clones:
                self._send_within(connection, queue, clones)
        return answers

    def _settle(
        self,
        action: BatchStatement,
        leases: Sequence[Lease],
        held: tuple[float, int],
        values: Row = (),
    ) -> list[bool]:
        """Do `action` to each lease's message; the answer is True if the lease holds (rule 2).

        held: the current time and the box, which decide whether a lease holds.
        values: the values that the action writes.
        """
        if len(leases) == 1:
            return [self.database.change(action.one, (*values, *leases[0], *held)) == 1]
        if not leases:
            return []
        with self.database.transaction() as connection:
            connection.execute("SAVEPOINT batch")
            if action.run(connection, leases, values, held) == len(leases):
                answers = [True] * len(leases)
            else:
                connection.execute("ROLLBACK TO batch")
                rows = [(*values, *lease, *held) for lease in leases]
                answers = [connection.execute(action.one, row).rowcount == 1 for row in rows]
            connection.execute("RELEASE batch")
        return answers

    def _lease_end(self, queue: Queue, seconds: float | None) -> float:
        seconds = queue.settings.lease_seconds if seconds is None else seconds
        if not 0 < seconds < math.inf:
            raise ConfigurationError(f"a lease lasts a number of seconds above 0, not {seconds!r}")
        return self.clock.monotonic() + seconds


_as_leased = partial(tuple.__new__, Leased)  # as `_make`, but without a Python call for each row


def leased(rows: Sequence[Row]) -> list[Leased]:
    """The messages of granted rows, sorted by number: RETURNING guarantees no order."""
    return list(map(_as_leased, sorted(rows)))
