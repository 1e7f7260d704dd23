"""Applies the passage of time: scheduled messages become due, leases lapse, messages expire.

Rules
1. Nothing runs in the background. A receive or a peek sweeps the queue first, at most every
   `SWEEP_SECONDS` per queue. A receive always sweeps before it returns nothing.
2. One sweep moves at most `SWEEP_LIMIT` messages of a kind, so that a million due messages do not
   lock the file for seconds.
3. A message that becomes due gets a new sequence number, so it goes to the end of the queue, as on
   Service Bus (learn.microsoft.com, "Message sequencing and timestamps": scheduled messages).
"""

from __future__ import annotations

import sqlite3
from typing import Final

from aztask.queues.engine.messages import DEFERRED, LEASED, READY, SCHEDULED, TIME_TO_LIVE_EXPIRED
from aztask.queues.engine.queues import (
    BURY,
    BURY_EXHAUSTED,
    EXHAUSTED,
    GIVE_BACK,
    Queue,
    QueueTable,
)

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
_ARRIVE = (
    "INSERT INTO messages (box, state, deliveries, enqueued_at, expires_at, message_id, session, "
    f"reason, description, payload) SELECT box, {READY}, deliveries, moment, expires_at, "
    f"message_id, session, reason, description, payload FROM messages WHERE seq IN {_DUE} "
    "ORDER BY moment, seq"
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
