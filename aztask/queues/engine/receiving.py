"""Receives messages under leases, in the order of their numbers, and deferred ones by number.

Rules
1. The holder of the token holds the lease until ``lease_until``. From that instant on the lease is
   lost, even if no other receiver has leased the message yet. A message has at most one lease.
2. The delivery count rises when a lease is granted, and falls only when the lease is released.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from functools import partial
from typing import Final

from aztask.errors import ConfigurationError
from aztask.queues.engine.messages import (
    DEFERRED,
    LEASED,
    NUMBER_STEP,
    PARTITIONS,
    READY,
    SCHEDULED,
    TIME_TO_LIVE_EXPIRED,
    Leased,
    first_seq,
)
from aztask.queues.engine.queues import (
    BURY,
    BURY_EXHAUSTED,
    EXHAUSTED,
    GIVE_BACK,
    Queue,
    QueueTable,
    Row,
)

# -- Sweeping --------------------------------------------------------------------------------------
#
# Applies the passage of time: scheduled messages become due, leases lapse, messages expire.
#
# Rules
# 1. Nothing runs in the background. A receive or a peek sweeps the queue first, at most every
#    `SWEEP_SECONDS` per queue. A receive always sweeps before it returns nothing.
# 2. One sweep moves at most `SWEEP_LIMIT` messages of a kind, so that a million due messages do not
#    lock the file for seconds.
# 3. A message that becomes due gets a new sequence number, so it goes to the end of the queue, as
#    on Service Bus (learn.microsoft.com, "Message sequencing and timestamps": scheduled messages).

SWEEP_SECONDS: Final = 0.02
SWEEP_LIMIT: Final = 1000

_LINE = "(SELECT seq FROM messages WHERE box = ? AND state = {} AND moment <= ? {})"
_DUE = _LINE.format(SCHEDULED, f"ORDER BY moment, seq LIMIT {SWEEP_LIMIT}")
_LAPSED = _LINE.format(LEASED, f"LIMIT {SWEEP_LIMIT}")
_EXPIRED = (
    f"(SELECT seq FROM messages WHERE box = ? AND expires_at <= ? AND state IN ({READY}, "
    f"{DEFERRED}) LIMIT {SWEEP_LIMIT})"
)
_WORK = f"SELECT EXISTS {_DUE}, EXISTS {_LAPSED}, EXISTS {_EXPIRED}"
_COPIED = (
    "INSERT INTO messages (seq, box, state, deliveries, enqueued_at, expires_at, message_id, "
    f"session, reason, description, payload) SELECT {{}}, box, {READY}, deliveries, moment, "
    "expires_at, message_id, session, reason, description, payload "
    f"FROM messages WHERE seq IN {_DUE} ORDER BY moment, seq"
)
_ARRIVE = _COPIED.format("NULL")  # SQLite chooses the number
# A numbered queue gives its next ones, in the partition of each message.
_PARTITION = f"CASE WHEN seq < 0 THEN seq & {PARTITIONS} ELSE 0 END"
_LAST = (
    f"CASE {_PARTITION} WHEN 0 THEN (SELECT last FROM numbered WHERE id = abs(messages.box)) "
    "ELSE (SELECT last FROM partitions WHERE id = abs(messages.box) "
    f"AND partition = messages.seq & {PARTITIONS}) END"
)
_ARRIVE_NUMBERED = _COPIED.format(
    f"? + {NUMBER_STEP} * ({_LAST} + row_number() OVER (PARTITION BY {_PARTITION} "
    f"ORDER BY moment, seq)) + {_PARTITION}"
)
_ARRIVED_OF = f"(SELECT count(*) FROM messages WHERE seq IN {_DUE} AND {_PARTITION} = {{}})"
_ARRIVED = f"UPDATE numbered SET last = last + {_ARRIVED_OF.format(0)} WHERE id = ?"
_ARRIVED_IN = (
    f"UPDATE partitions SET last = last + {_ARRIVED_OF.format('partitions.partition')} WHERE id = ?"
)


class Sweeper:
    """The part of the engine that brings a queue's messages up to date before it is read.

    swept: when each box was swept last, on the lease clock.
    """

    def __init__(self, queues: QueueTable, sweep_seconds: float = SWEEP_SECONDS) -> None:
        self._queues = queues
        self._database = queues.database
        self._clock = queues.clock
        self._sweep_seconds = sweep_seconds
        self.swept: dict[int, float] = {}

    def due(self, box: int) -> bool:
        """Whether the box was not swept within the last `sweep_seconds`."""
        return not 0 <= self._clock.monotonic() - self.swept.get(box, -1e9) < self._sweep_seconds

    def sweep(self, queue: Queue, box: int) -> bool:
        """Bring the box up to date; returns True if messages may have become ready."""
        boot, wall = self._clock.monotonic(), self._clock.wall()
        self.swept[box] = boot
        with self._database.read() as connection:
            due, lapsed, expired = connection.execute(
                _WORK, (box, wall, box, boot, box, wall)
            ).fetchone()
        if not (due or lapsed or expired):
            return False
        with self._database.transaction() as connection:
            if lapsed:
                lapse(connection, box, boot)
            if due:
                if queue.numbered:
                    connection.execute(_ARRIVE_NUMBERED, (first_seq(abs(box)), box, wall))
                    for count in (_ARRIVED, _ARRIVED_IN):
                        connection.execute(count, (box, wall, abs(box)))
                else:
                    connection.execute(_ARRIVE, (box, wall))
                connection.execute(f"DELETE FROM messages WHERE seq IN {_DUE}", (box, wall))
            expire(connection, self._queues.load(queue.name), box, wall)
        return True


def lapse(connection: sqlite3.Connection, box: int, boot: float) -> None:
    """Give back messages with expired leases; those at their delivery limit become dead letters."""
    connection.execute(f"{BURY_EXHAUSTED} seq IN {_LAPSED}", (box, boot))
    connection.execute(f"{GIVE_BACK} seq IN {_LAPSED} AND ({EXHAUSTED}) IS NOT TRUE", (box, boot))


def expire(connection: sqlite3.Connection, queue: Queue, box: int, wall: float) -> None:
    """Delete expired messages, or make them dead letters if the queue is set up so."""
    if queue.settings.dead_letter_expired and box > 0:
        connection.execute(
            f"{BURY} reason = ?, description = 'the time to live ended' WHERE seq IN {_EXPIRED}",
            (TIME_TO_LIVE_EXPIRED, box, wall),
        )
    else:
        connection.execute(f"DELETE FROM messages WHERE seq IN {_EXPIRED}", (box, wall))


# -- Receiving -------------------------------------------------------------------------------------


_GRANTED: Final = (
    "message_id, session, deliveries, enqueued_at, expires_at, moment, reason, description"
)
GRANT: Final = (
    f"UPDATE messages SET state = {LEASED}, moment = ?, deliveries = deliveries + 1, "
    "token = lower(hex(randomblob(16))) WHERE {} RETURNING seq, token, payload, " + _GRANTED
)
REMOVE: Final = (
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
_GRANT_NEXT: Final = GRANT.format(f"seq IN {_READY}")
_GRANT_ONE: Final = GRANT.format(f"seq = {_READY}")  # with a limit of 1 SQLite needs no list
_REMOVE_NEXT: Final = REMOVE.format(f"seq IN {_READY}")
_GRANT_DEFERRED: Final = GRANT.format(_ONE_DEFERRED)
_REMOVE_DEFERRED: Final = REMOVE.format(_ONE_DEFERRED)
_GRANT_WAITING: Final = GRANT.format(_ONE_WAITING)
_REMOVE_WAITING: Final = REMOVE.format(_ONE_WAITING)


class EngineReceiving:
    """The part of the engine that leases messages, or removes them at once."""

    def __init__(self, queues: QueueTable, sweeper: Sweeper) -> None:
        self._queues = queues
        self._database = queues.database
        self._clock = queues.clock
        self._sweeper = sweeper

    def receive(
        self, name: str, limit: int, lease_seconds: float | None, dead_letter: bool, delete: bool
    ) -> list[Leased]:
        """Lease or remove the first ready messages; see `Engine.receive`."""
        queue = self._queues.find(name)
        if queue.settings.sessions and not dead_letter:
            raise ConfigurationError(
                f"queue {name!r} has sessions: accept one and receive through it"
            )
        box = queue.box(dead_letter)
        swept = self._sweeper.due(box)
        if swept:
            self._sweeper.sweep(queue, box)
        rows = self._take(queue, box, limit, lease_seconds, delete)
        if not rows and not swept and self._sweeper.sweep(queue, box):
            rows = self._take(queue, box, limit, lease_seconds, delete)
        if not rows and self._queues.load(name).id != queue.id:
            return self.receive(name, limit, lease_seconds, dead_letter, delete)
        return rows

    def _take(
        self, queue: Queue, box: int, limit: int, lease_seconds: float | None, delete: bool
    ) -> list[Leased]:
        until = self._queues.lease_end(queue, lease_seconds)
        wall = self._clock.wall()
        with self._database.statement() as connection:
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
        found = self._queues.find(queue)
        box, wall = found.box(dead_letter), self._clock.wall()
        self._sweeper.sweep(found, box)
        until = self._queues.lease_end(found, lease_seconds)
        grant = _GRANT_WAITING if waiting else _GRANT_DEFERRED
        remove = _REMOVE_WAITING if waiting else _REMOVE_DEFERRED
        rows: list[tuple[object, ...]] = []
        with self._database.transaction() as connection:
            for seq in seqs:
                if delete:
                    cursor = connection.execute(remove, (seq, box, wall, until))
                else:
                    cursor = connection.execute(grant, (until, seq, box, wall))
                rows += cursor.fetchall()
        return [Leased._make(row) for row in rows]


_as_leased = partial(tuple.__new__, Leased)  # as `_make`, but without a Python call for each row


def leased(rows: Sequence[Row]) -> list[Leased]:
    """The messages of granted rows, sorted by number: RETURNING guarantees no order."""
    return list(map(_as_leased, sorted(rows)))
