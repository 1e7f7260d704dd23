"""The local broker: the broker protocol over the embedded engine, for one machine.

Rules
1. A queue is created by the first send to it or the first receiver of it. A name that is not
   allowed is refused, never rewritten.
2. Nothing waits for a network, but several processes may share the file. A waiting receiver is
   woken by every write to the file; then it checks the file's change counter.
3. An envelope's expiry travels in the envelope, and the worker checks it. Only a queue's own time
   to live makes the engine move messages to the dead letters.
4. The caller opened the database and closes it: closing the broker leaves it open.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

from aztask.address.owner import file_name
from aztask.errors import LeaseLost, MessageTooLarge, QueueNotFound
from aztask.message.envelope import Envelope
from aztask.queues.base import (
    Delivery,
    Lost,
    MessageState,
    Peeked,
    Position,
    QueueOptions,
    QueueStats,
    Receiver,
    ReceiverOptions,
    Renewed,
    Unknown,
)
from aztask.queues.engine import (
    FIRST_SEQ,
    Database,
    Engine,
    PeekedMessage,
    SessionLease,
    StoredSettings,
    WakeUp,
)
from aztask.queues.local.inspection import LocalInspector
from aztask.queues.local.kind import KIND
from aztask.queues.local.mailboxes import LocalMailboxes
from aztask.queues.local.payload import MESSAGE_LIMIT, envelope_of, new_message, payload_of
from aztask.queues.local.receiver import (
    GONE,
    LocalDelivery,
    LocalReceiver,
    leases,
    renewed,
    sequence_number,
)
from aztask.queues.skeleton import BrokerSkeleton
from aztask.support.clock import SYSTEM_CLOCK, Clock

# -- The local broker's receiver of sessions.
#
# Rules
# 1. A receiver of a named session waits until the session is free, and then holds it. A receiver of
#    any session releases a session that has no messages left, and looks for the next one.
# 2. The session's lease is renewed together with its deliveries. While there are none, nothing
#    renews it; after it expired, the next receive accepts the session again.


class LocalSessionReceiver(LocalReceiver):
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


DEFAULTS: Final = StoredSettings(max_deliveries=1000, dead_letter_expired=True)
"""High limits: aztask has its own delivery limit, which is lower and gives a clearer reason."""

MAILBOX_LEASE: Final = 60.0


class LocalBroker(BrokerSkeleton):
    """Queues in `database`. Any thread may call; other processes may use the same file.

    clock: injected in tests. Raises the errors of the engine (`aztask.queues.engine.engine`, rule
    3).
    """

    title = "local queue"

    def __init__(self, database: Database, *, clock: Clock = SYSTEM_CLOCK) -> None:
        super().__init__(KIND)
        self.engine = Engine(database, clock=clock)
        self._database = database
        self._clock = clock
        self._wakeups: dict[str, WakeUp] = {}
        self._ensured: set[str] = set()
        self._lock = threading.Lock()

    @property
    def identity(self) -> str:
        """The broker's name for `aztask.address.owner`: the id that the file holds."""
        return file_name(self._database.file_id())

    def _declare(self, queue: str, options: QueueOptions) -> None:
        with self._database.transaction():
            if self.engine.create_queue(queue, replace(DEFAULTS, **_changes(options))):
                return
            if changes := _changes(options.explicit()):
                self.engine.update_queue(queue, replace(self.engine.queue(queue), **changes))

    def _delete(self, queue: str) -> None:
        self.engine.delete_queue(queue)
        self._ensured.discard(queue)

    def _names(self) -> list[str]:
        return self.engine.queues()  # an emulator may have created some of them

    def send(self, queue: str, envelopes: Sequence[Envelope]) -> None:
        """Store all envelopes or none; when this returns, they are in the file."""
        self._usable()
        now = self._clock.wall()
        messages = [new_message(envelope, envelope.delay, now) for envelope in envelopes]
        if queue not in self._ensured:  # asked here too, because most queues are known
            self._ensure(queue, sessions=_in_sessions(envelopes))
        try:
            self.engine.send(queue, messages)
        except QueueNotFound:  # another process deleted it since
            self._ensured.discard(queue)
            self._ensure(queue, sessions=_in_sessions(envelopes))
            self.engine.send(queue, messages)
        self._database.at_end(self.wakeup(queue).notify)

    def check(self, envelope: Envelope, *, reserve: int = 0) -> None:
        """Refuse an envelope that could not be stored; see `Broker.check`."""
        payload_of(envelope, MESSAGE_LIMIT - reserve)

    def _cancel_scheduled(self, queue: str, message_ids: Sequence[str]) -> int:
        return len(self.engine.cancel_scheduled_ids(queue, message_ids))

    def _receiver(self, options: ReceiverOptions, poll_ceiling: float | None) -> Receiver:
        """A missing queue is created, with sessions if the options name one."""
        session, queue = options.session, options.queue
        self._ensure(queue, sessions=session is not None)
        kind = LocalReceiver if session is None or options.dead_letter else LocalSessionReceiver
        return kind(self.engine, self.wakeup(queue), options)

    def _stats(self, queue: str) -> QueueStats:
        return QueueStats(queue, *self.engine.stats(queue))

    def _peek(
        self, queue: str, dead_letter: bool, after: Position | None, limit: int
    ) -> list[Peeked]:
        start = FIRST_SEQ if after is None else sequence_number(after) + 1
        return [
            _peeked(message)
            for message in self.engine.peek(queue, start, limit, dead_letter=dead_letter)
        ]

    def _purge(self, queue: str, dead_letter: bool) -> int:
        return self.engine.purge(queue, dead_letter=dead_letter)

    def inspector(self) -> LocalInspector:
        """The inspector that ``aztask doctor`` and a starting worker use."""
        self._usable()
        return LocalInspector(self.engine)

    def mailboxes(self) -> LocalMailboxes:
        """The mailboxes of this file."""
        self._usable()

        def receiver(queue: str, delete: bool) -> Receiver:
            return self.receiver(queue, lease=MAILBOX_LEASE, delete=delete)

        return LocalMailboxes(self._database, self.engine, self.send, receiver)

    def _close(self) -> None:
        for wakeup in list(self._wakeups.values()):
            wakeup.close()

    @property
    def transaction_key(self) -> str:
        """The same for all brokers and stores of one file."""
        return self._database.key

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Everything that this thread does inside is committed together or not at all. Nests."""
        with self._database.transaction():
            yield

    def wakeup(self, queue: str) -> WakeUp:
        """The object that wakes this process's receivers of the queue."""
        wakeup = self._wakeups.get(queue)
        if wakeup is None:
            # Outside the lock, because it may take the database's: a send inside a transaction
            # holds that one already.
            made = WakeUp(self._database.watch)
            with self._lock:
                wakeup = self._wakeups.setdefault(queue, made)
        return wakeup

    def _ensure(self, queue: str, *, sessions: bool = False) -> None:
        if queue not in self._ensured:
            self.check_name(queue)
            self.engine.create_queue(queue, replace(DEFAULTS, sessions=sessions))
            self._ensured.add(queue)


def _in_sessions(envelopes: Sequence[Envelope]) -> bool:
    """Whether a queue created by this send has sessions: only if all envelopes name one."""
    return all(envelope.session is not None for envelope in envelopes) and bool(envelopes)


def _changes(options: QueueOptions) -> dict[str, Any]:
    """The given options as fields of the engine's `StoredSettings`."""
    given = {
        "lease_seconds": options.lease,
        "duplicate_window": options.duplicate_window,
        "max_deliveries": options.max_deliveries,
        "time_to_live": options.time_to_live,
        "sessions": options.sessions,
    }
    return {name: value for name, value in given.items() if value is not None}


class PeekedHere(Peeked):
    """A message of the file. Its payload is unpacked when its envelope is read for the first time.

    A worker looks at hundreds of dead letters at a time, mostly for their reasons alone.
    """

    __slots__ = ("_payload",)
    _payload: bytes

    def __getattr__(self, name: str) -> Any:
        """The envelope, while it is not known; nothing else is missing."""
        if name != "envelope":
            raise AttributeError(name)
        envelope = envelope_of(self._payload)
        object.__setattr__(self, "envelope", envelope)
        return envelope


def _peeked(message: PeekedMessage) -> PeekedHere:
    made, put = object.__new__(PeekedHere), object.__setattr__  # it is frozen
    put(made, "_payload", message.payload)
    put(made, "position", message.seq)
    put(made, "state", MessageState(message.state))
    put(made, "delivery_count", message.delivery_count)
    put(made, "enqueued_at", message.enqueued_at)
    put(made, "due", message.due)
    put(made, "dead_letter_reason", message.reason)
    put(made, "dead_letter_description", message.description)
    return made
