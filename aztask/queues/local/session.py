"""The local broker's receiver of sessions.

Rules
1. A receiver of a named session waits until the session is free, and then holds it. A receiver of
   any session releases a session that has no messages left, and looks for the next one.
2. The session's lease is renewed together with its deliveries. While there are none, nothing renews
   it; after it expired, the next receive accepts the session again.
"""

from __future__ import annotations

from collections.abc import Sequence

from aztask.errors import LeaseLost, MessageTooLarge
from aztask.message.envelope import Envelope
from aztask.queues.base import Delivery, Lost, ReceiverOptions, Renewed, Unknown
from aztask.queues.engine import Engine, SessionLease
from aztask.queues.local.receiver import (
    GONE,
    LocalDelivery,
    LocalReceiver,
    WakeUp,
    leases,
    renewed,
)


class SessionReceiver(LocalReceiver):
    """Receives one session, or one session after another. Renewing one delivery renews all.

    Closing the receiver releases the session, and its leased messages go back uncounted. The
    database's own lock guards the receiver's state: with a second lock, two threads could deadlock.
    """

    def __init__(self, engine: Engine, wakeup: WakeUp, options: ReceiverOptions) -> None:
        super().__init__(engine, wakeup, options)
        self._name = options.session if isinstance(options.session, str) else None
        self._max_state_bytes = options.max_state_bytes
        self._session: SessionLease | None = None
        self._deadline = 0.0
        self._held: list[Delivery] = []
        self._serial = engine.database.statement()

    def _take(self, limit: int) -> list[Delivery]:
        with self._serial:
            while self._accepted():
                try:
                    messages = self._engine.receive(
                        self._queue, limit, session=self._session, delete=self._delete
                    )
                except LeaseLost:
                    self._session = None
                    continue
                deliveries = self._deliveries(messages, self._deadline, self._lease)
                self._held = [d for d in self._held if self._is_held(d)] + deliveries
                if deliveries or self._name is not None or self._held:
                    return deliveries
                self.let_go()
            return []

    def _accepted(self) -> bool:
        if self._session is None:
            deadline = self._clock.monotonic() + self._lease
            self._session = self._engine.accept_session(self._queue, self._name, self._lease)
            self._deadline = deadline
        return self._session is not None

    def _is_held(self, delivery: Delivery) -> bool:
        settled = isinstance(delivery, LocalDelivery) and delivery.settled
        return not settled and self._clock.monotonic() < delivery.deadline

    def let_go(self) -> None:
        """Release the session and its leased messages now."""
        with self._serial:
            session, self._session = self._session, None
            if session is not None:
                self._engine.release_session(self._queue, session)
        self._held = []
        self._engine.database.at_end(self._wakeup.notify)

    def session_state(self, session: str) -> bytes | None:
        """The bytes that were last stored with the session. Raises LeaseLost."""
        return self._engine.get_session_state(self._queue, self._ours(session))

    def set_session_state(self, session: str, state: bytes | None) -> None:
        """Store bytes with the session. Raises LeaseLost, MessageTooLarge."""
        limit = self._max_state_bytes
        if state is not None and len(state) > limit:
            raise MessageTooLarge(
                f"a session's state of {len(state)} bytes is too large; {limit} are allowed"
            )
        self._engine.set_session_state(self._queue, self._ours(session), state)

    def _ours(self, session: str) -> SessionLease:
        lease = self._session
        if lease is None or lease.session != session:
            raise LeaseLost(f"session {session!r} is no longer held here")
        return lease

    def renew(
        self, deliveries: Sequence[Delivery], seconds: float | None = None
    ) -> list[Renewed | Lost | Unknown]:
        """Extend the session's lease, and with it the leases of all its messages."""
        lease = self._lease if seconds is None else seconds
        with self._serial:
            deadline = self._clock.monotonic() + lease
            session = self._session
            if session is not None:
                session = self._engine.renew_session(self._queue, session, lease)
            if session is None:
                self._session = None
                return [GONE] * len(deliveries)
            self._session, self._deadline = session, deadline
            ends = self._engine.renew(self._queue, leases(deliveries))
            for other in self._held:
                other.deadline = deadline
            return renewed(deliveries, ends, deadline, lease)

    def update(self, delivery: Delivery, envelope: Envelope) -> Renewed | Lost | Unknown:
        """Replace the message's content in place, and renew the session."""
        answer = self.renew([delivery])[0]
        if not isinstance(answer, Renewed):
            return answer
        deadline = delivery.deadline
        answer = super().update(delivery, envelope)
        delivery.deadline = deadline
        return Renewed(deadline) if isinstance(answer, Renewed) else answer

    def close(self) -> None:
        """Stop receiving and release the session. In a forked child the session is left alone."""
        super().close()
        if self._session is not None and not self._engine.database.closed:
            self.let_go()
