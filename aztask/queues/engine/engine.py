"""The embedded queue engine: queues with leases, schedules, dead letters and sessions in one file.

Why not a queue library: we know of none with renewable leases, delays, dead letters and sessions in
one SQLite file that several processes share.

The engine knows nothing about tasks, envelopes or protocols: a payload is bytes. It owns its
parts, one file each: `queues`, `sending`, `receiving`, `settling`, `sessions` and
`inspection`. What they offer are the engine's calls, without anything in between.

Rules
1. An accepted message stays in the file until it is completed, purged, or expired. A process that
   dies at any instant leaves either the state before a call or the state after it.
2. Any thread of any process on the machine may make any call.
3. Any call can raise QueueNotFound, QueueFull, BrokerUnavailable (the file was locked for too long)
   and, after the file was closed, deleted or replaced, BrokerError. Then it has changed nothing.
"""

from __future__ import annotations

from typing import Any, Final

from aztask.queues.engine.database import Database
from aztask.queues.engine.messages import (
    DEFERRED,
    FIRST_SEQ,
    LEASED,
    PARTITIONS,
    READY,
    SCHEDULED,
    STATES,
    Counts,
    Leased,
    PeekedMessage,
    SessionLease,
)
from aztask.queues.engine.queues import EngineSending, QueueTable
from aztask.queues.engine.receiving import SWEEP_SECONDS, EngineReceiving, Sweeper
from aztask.queues.engine.sessions import Sessions
from aztask.queues.engine.settling import EngineSettling
from aztask.support.clock import SYSTEM_CLOCK, Clock

# -- Peeks at queues, counts their messages, and purges them.

_FROM: Final = (
    "(SELECT seq FROM messages INDEXED BY messages_line "
    "WHERE box = :box AND state = {} AND seq >= :seq ORDER BY seq LIMIT :limit)"
)
# Rows with moment NULL are indexed in the order of their numbers, so nothing has to be sorted.
_KINDS: Final = (
    f"{READY} AND moment IS NULL",
    f"{DEFERRED} AND moment IS NULL",
    LEASED,
    SCHEDULED,
)
_PEEKED: Final = (
    "SELECT seq, payload, message_id, session, deliveries, enqueued_at, expires_at, state, moment, "
    "reason, description FROM messages WHERE "
)
_PEEK: Final = (
    f"{_PEEKED} seq IN (SELECT seq FROM ("
    + " UNION ALL ".join(f"SELECT seq FROM {_FROM.format(kind)}" for kind in _KINDS)
    + ") ORDER BY seq LIMIT :limit) ORDER BY seq"
)
# In the order of the numbers that users see. All of the box is read: no index has this order.
_PARTITION: Final = f"seq & {PARTITIONS}"
_PEEK_PARTITIONS: Final = (
    f"{_PEEKED} box = :box AND ({_PARTITION}, seq) >= (:{_PARTITION}, :seq) "
    f"ORDER BY {_PARTITION}, seq LIMIT :limit"
)
_HAS_PARTITIONS: Final = "SELECT EXISTS (SELECT 1 FROM partitions WHERE id = ?)"
_COUNT: Final = "SELECT state, count(*) FROM messages WHERE box = ? GROUP BY state"
_PENDING: Final = (
    f"SELECT EXISTS (SELECT 1 FROM messages WHERE box = ? AND state = {READY}), "
    f"(SELECT min(moment) FROM messages WHERE box = ? AND state = {SCHEDULED}), "
    f"(SELECT min(moment) FROM messages WHERE box = ? AND state = {LEASED})"
)
_PURGE_LIMIT: Final = 10_000
_PURGE: Final = (
    f"DELETE FROM messages WHERE seq IN (SELECT seq FROM messages WHERE box = ? AND state IN "
    f"({READY}, {SCHEDULED}, {DEFERRED}) LIMIT {_PURGE_LIMIT})"
)
_REMOVE_OLDEST: Final = (
    f"DELETE FROM messages WHERE seq IN (SELECT seq FROM messages WHERE box = ? AND state = {READY}"
    " AND moment IS NULL AND enqueued_at < ? AND (expires_at IS NULL OR expires_at > ?)"
    " ORDER BY seq LIMIT ?)"
)


class Inspection:
    """The part of the engine that peeks, counts and purges."""

    def __init__(self, queues: QueueTable, sweeper: Sweeper) -> None:
        self._queues = queues
        self._database = queues.database
        self._clock = queues.clock
        self._sweeper = sweeper

    def peek(
        self, queue: str, from_seq: int = FIRST_SEQ, limit: int = 100, *, dead_letter: bool = False
    ) -> list[PeekedMessage]:
        """Up to `limit` messages of any state, in order, from number `from_seq` on.

        Those of a queue with partitions are in the order of `number_of`: one partition after the
        other.
        """
        found = self._queues.find(queue)
        box = found.box(dead_letter)
        self._sweeper.sweep(found, box)
        values = {"box": box, "seq": from_seq, "limit": max(limit, 0)}
        with self._database.read() as connection:
            (parted,) = connection.execute(_HAS_PARTITIONS, (found.id,)).fetchone()
            rows = connection.execute(_PEEK_PARTITIONS if parted else _PEEK, values).fetchall()
        if not rows:
            self._queues.load(queue)
        return list(map(_peeked, rows))

    def stats(self, queue: str) -> Counts:
        """The number of messages by state. It counts an index: about 60 ms per million messages."""
        found = self._queues.load(queue)
        self._sweeper.sweep(found, found.id)
        with self._database.transaction() as connection:
            counts = dict(connection.execute(_COUNT, (found.id,)).fetchall())
            dead = sum(count for _, count in connection.execute(_COUNT, (-found.id,)))
        active, leased, scheduled, deferred = (counts.get(state, 0) for state in range(4))
        return Counts(active, leased, scheduled, deferred, dead)

    def pending(self, queue: str, *, dead_letter: bool = False) -> float:
        """Seconds until there may be a message to receive: 0.0 now; infinity: no message."""
        box = self._queues.find(queue).box(dead_letter)
        with self._database.read() as connection:
            ready, due, lapse = connection.execute(_PENDING, (box, box, box)).fetchone()
        if ready:
            return 0.0
        waits = [float("inf")]
        if due is not None:
            waits.append(due - self._clock.wall())
        if lapse is not None:
            waits.append(lapse - self._clock.monotonic())
        return max(0.0, min(waits))

    def purge(self, queue: str, *, dead_letter: bool = False) -> int:
        """Delete all messages that are not leased; returns how many were deleted.

        Deletes in portions, so that other callers can work in between. If the process dies, some
        portions are deleted.
        """
        found = self._queues.load(queue)
        box, deleted = found.box(dead_letter), 0
        self._sweeper.sweep(found, box)
        while True:
            with self._database.statement() as connection:
                portion = connection.execute(_PURGE, (box,)).rowcount
            deleted += portion
            if portion < _PURGE_LIMIT:
                return deleted

    def remove_oldest(
        self, queue: str, limit: int, before: float, *, dead_letter: bool = False
    ) -> int:
        """Delete the first ready messages that were enqueued before a time; return how many.

        Leased, scheduled and deferred messages stay. before: UTC epoch seconds.
        """
        found = self._queues.load(queue)
        box, wall = found.box(dead_letter), self._clock.wall()
        self._sweeper.sweep(found, box)
        with self._database.statement() as connection:
            return connection.execute(_REMOVE_OLDEST, (box, before, wall, limit)).rowcount


def _peeked(row: tuple[Any, ...]) -> PeekedMessage:
    *common, state, moment, reason, description = row
    due = moment if state == SCHEDULED else None
    lease_until = moment if state == LEASED else None
    return PeekedMessage._make((*common, STATES[state], due, lease_until, reason, description))


class Engine:
    """The queues of one database.

    Several engines, also in several processes, may use one file.

    clock: injected in tests, and by a server that shifts its wall clock.
    sweep_seconds: see `aztask.queues.engine.receiving`.
    """

    def __init__(
        self,
        database: Database,
        *,
        clock: Clock = SYSTEM_CLOCK,
        sweep_seconds: float = SWEEP_SECONDS,
    ) -> None:
        self.database = database
        self.clock = clock
        self.queue_table = table = QueueTable(database, clock=clock)
        self.create_queue, self.update_queue = table.create, table.update
        self.delete_queue, self.queue, self.queues = table.delete, table.settings, table.names
        self.seq_of, self.adopt = table.seq_of, table.adopt

        self.sweeper = Sweeper(table, sweep_seconds)

        sending = EngineSending(table)
        self.send, self.send_dead = sending.send, sending.send_dead
        self.reserve = sending.reserve
        self.cancel_scheduled = sending.cancel_scheduled
        self.cancel_scheduled_ids = sending.cancel_scheduled_ids

        self._receiving = EngineReceiving(table, self.sweeper)
        self.receive_deferred = self._receiving.receive_deferred

        settling = EngineSettling(table, sending)
        self.renew, self.update = settling.renew, settling.update
        self.complete, self.replace = settling.complete, settling.replace
        self.abandon, self.release = settling.abandon, settling.release
        self.defer, self.dead_letter = settling.defer, settling.dead_letter

        self._sessions = sessions = Sessions(table, self.sweeper)
        self.accept_session, self.renew_session = sessions.accept, sessions.renew
        self.release_session, self.sessions = sessions.release, sessions.names
        self.get_session_state = sessions.state
        self.set_session_state = sessions.set_state

        inspection = Inspection(table, self.sweeper)
        self.peek, self.purge = inspection.peek, inspection.purge
        self.stats, self.pending = inspection.stats, inspection.pending
        self.remove_oldest = inspection.remove_oldest

    def receive(
        self,
        queue: str,
        limit: int,
        lease_seconds: float | None = None,
        *,
        session: SessionLease | None = None,
        dead_letter: bool = False,
        delete: bool = False,
    ) -> list[Leased]:
        """Receive up to `limit` messages in the order of their numbers, each under a new lease.

        session: from `accept_session`, required for queues with sessions. Its lease covers the
        messages; raises LeaseLost if it is lost.
        delete: receive and delete, at most once and without a lease. If the process dies before it
        has processed the messages, they are lost.
        """
        if limit <= 0:
            return []
        if session is not None and not dead_letter:
            return self._sessions.receive(queue, session, limit, delete)
        return self._receiving.receive(queue, limit, lease_seconds, dead_letter, delete)
