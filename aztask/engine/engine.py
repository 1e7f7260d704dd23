"""The embedded queue engine: queues with leases, schedules, dead letters and sessions in one file.

Why not a queue library: we know of none with renewable leases, delays, dead letters and sessions in
one SQLite file that several processes share.

The engine knows nothing about tasks, envelopes or protocols: a payload is bytes. Its parts are in
separate files, each built on the one before: `queues`, `sweeper`, `intake`, `leases`, `sessions`,
`inspection`.

Rules
1. An accepted message stays in the file until it is completed, purged, or expired. A process that
   dies at any instant leaves either the state before a call or the state after it.
2. Any thread of any process on the machine may make any call.
3. Any call can raise QueueNotFound, QueueFull, BrokerUnavailable (the file was locked for too long)
   and, after the file was closed, deleted or replaced, BrokerError. Then it has changed nothing.
"""

from __future__ import annotations

from aztask.engine.inspection import Inspection
from aztask.engine.messages import Leased, SessionLease


class Engine(Inspection):
    """The queues of one database.

    Several engines, also in several processes, may use one file.

    clock: injected in tests, and by a server that shifts its wall clock.
    sweep_seconds: see `aztask.engine.sweeper`.
    """

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
            return self._receive_in_session(queue, session, limit, delete)
        return self._receive_ready(queue, limit, lease_seconds, dead_letter, delete)
