"""The embedded queue engine: queues with leases, schedules, dead letters and sessions in one file.

Why not a queue library: we know of none with renewable leases, delays, dead letters and sessions in
one SQLite file that several processes share.

The engine knows nothing about tasks, envelopes or protocols: a payload is bytes. It owns its
parts, one file each: `queues`, `sweeper`, `sending`, `receiving`, `settling`, `sessions` and
`inspection`. What they offer are the engine's calls, without anything in between.

Rules
1. An accepted message stays in the file until it is completed, purged, or expired. A process that
   dies at any instant leaves either the state before a call or the state after it.
2. Any thread of any process on the machine may make any call.
3. Any call can raise QueueNotFound, QueueFull, BrokerUnavailable (the file was locked for too long)
   and, after the file was closed, deleted or replaced, BrokerError. Then it has changed nothing.
"""

from __future__ import annotations

from aztask.queues.engine.database import Database
from aztask.queues.engine.inspection import Inspection
from aztask.queues.engine.messages import Leased, SessionLease
from aztask.queues.engine.queues import QueueTable
from aztask.queues.engine.receiving import Receiving
from aztask.queues.engine.sending import Sending
from aztask.queues.engine.sessions import Sessions
from aztask.queues.engine.settling import Settling
from aztask.queues.engine.sweeper import SWEEP_SECONDS, Sweeper
from aztask.support.clock import SYSTEM_CLOCK, Clock


class Engine:
    """The queues of one database.

    Several engines, also in several processes, may use one file.

    clock: injected in tests, and by a server that shifts its wall clock.
    sweep_seconds: see `aztask.queues.engine.sweeper`.
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

        self.sweeper = Sweeper(table, sweep_seconds)

        sending = Sending(table)
        self.send, self.send_dead = sending.send, sending.send_dead
        self.cancel_scheduled = sending.cancel_scheduled
        self.cancel_scheduled_ids = sending.cancel_scheduled_ids

        self._receiving = Receiving(table, self.sweeper)
        self.receive_deferred = self._receiving.receive_deferred

        settling = Settling(table, sending)
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
