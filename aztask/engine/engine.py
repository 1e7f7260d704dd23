"""The embedded queue engine: queues with leases, schedules, dead letters and sessions in one file.

It knows nothing of tasks, envelopes or protocols: a payload is bytes. Its parts, each in its file
and each standing on the one before: `queues`, `sweeper`, `intake`, `leases`, `sessions`,
`inspection`.

Rules
1. An accepted message is in the file until it is completed, purged, or expired; a process that
   dies at any instant leaves either the state before a call or the state after it.
2. Every call may come from any thread and any process of the machine.
3. Any call can raise QueueNotFound, QueueFull, BrokerUnavailable (locked for too long) and, once
   the file is closed, BrokerError; then it has changed nothing.
"""

from __future__ import annotations

from aztask.engine.inspection import Inspection
from aztask.engine.messages import Leased, SessionLease


class Engine(Inspection):
    """The queues of one database.

    Several engines, in several processes too, may use one file. clock: injected in tests, and
    where a server shifts its wall clock. sweep_seconds: see `aztask.engine.sweeper`.
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
        """Up to `limit` messages in the order of their numbers, each under a new lease.

        session: one from `accept_session`, on queues that have sessions; its lease holds, and once
        it is lost LeaseLost is raised. delete: receive and delete: no lease, at most once; if the
        process dies before it has worked on them, the messages are gone.
        """
        if limit <= 0:
            return []
        if session is not None and not dead_letter:
            return self._receive_in_session(queue, session, limit, delete)
        return self._receive_ready(queue, limit, lease_seconds, dead_letter, delete)
