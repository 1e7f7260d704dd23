"""Receives messages under leases, in the order of their numbers, and deferred ones by number.

Rules
1. The holder of the token holds the lease until ``lease_until``. From that instant on the lease is
   lost, even if no other receiver has leased the message yet. A message has at most one lease.
2. The delivery count rises when a lease is granted, and falls only when the lease is released.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

from aztask.errors import ConfigurationError
from aztask.queues.engine.bulk import Row
from aztask.queues.engine.messages import DEFERRED, LEASED, READY, Leased
from aztask.queues.engine.queues import Queue, QueueTable
from aztask.queues.engine.sweeper import Sweeper

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


class Receiving:
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
