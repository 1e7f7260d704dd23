"""The Service Bus broker: the broker protocol over ``azure-servicebus``.

Rules
1. Sending, receiving and settling need only the permissions Send and Listen. `declare`, `delete`
   and `queues` need Manage. `stats` reads the service's counts with Manage, and otherwise counts by
   peeking.
2. Connections of one process: at most four for each queue it sends to; three for each receiver
   (receiving, settling, renewing; each opened when it is first needed), but one for a receiver of
   sessions; and one for peeking at each queue.
3. The queue's lock duration is the lease. A receiver with another lease is refused: at once if we
   have the permission to manage, otherwise as soon as its messages show the difference; see
   `aztask.queues.servicebus.lock`.
4. The service's schedules are absolute times: delays are added to its own time, once it is known.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Final

from azure.core.credentials import TokenCredential
from azure.servicebus import ServiceBusReceivedMessage

from aztask.address.addresses import ServiceBusAddress
from aztask.address.owner import service_name
from aztask.errors import AztaskError, BrokerError, ConfigurationError
from aztask.message.envelope import Envelope
from aztask.queues.base import (
    ANY_SESSION,
    AnySession,
    MessageState,
    Peeked,
    Position,
    QueueOptions,
    QueueStats,
    Receiver,
    ReceiverOptions,
)
from aztask.queues.delivery import Settled
from aztask.queues.servicebus.admin import Administration
from aztask.queues.servicebus.client import BusClient
from aztask.queues.servicebus.clock import BusClock, ClockCalibration
from aztask.queues.servicebus.errors import SDK_ERRORS
from aztask.queues.servicebus.inspection import NOT_ALLOWED, PAGE, BusInspector, Peeking
from aztask.queues.servicebus.kind import CAPABILITIES, KIND, MESSAGE_LIMIT
from aztask.queues.servicebus.lock import LockWatch
from aztask.queues.servicebus.mailboxes import BusMailboxes
from aztask.queues.servicebus.receiver import BusReceiver
from aztask.queues.servicebus.senders import Pair, Senders
from aztask.queues.servicebus.session import BusSessionReceiver
from aztask.queues.servicebus.wire import message_of
from aztask.queues.skeleton import BrokerSkeleton
from aztask.settlement import Complete
from aztask.support.clock import SYSTEM_CLOCK, Clock

# -- Deletes all messages of a queue. The service has no request for that, so this receives them.
#
# Rules
# 1. Waiting messages are received and deleted, session by session on a queue with sessions.
#    Scheduled ones are cancelled. Deferred ones are received by number and completed.
# 2. Leased messages stay, and so do the messages of a session that a worker holds. Deferred
#    messages of a queue with sessions stay too: only a receiver of their session gets them.
# 3. If the process dies in between, some messages are deleted and the others are as before.

AT_ONCE: Final = 0.001
"""Seconds until a timer that is due already."""

WAIT: Final = 0.5
"""Seconds without a message after which the queue is empty."""

Open = Callable[[AnySession | None, bool], Receiver]


class Purge:
    """Deletes the messages of one queue.

    open: makes a receiver, of sessions or not, that deletes what it receives or not.
    """

    def __init__(self, queue: str, open: Open, peeking: Peeking, senders: Senders) -> None:
        self._queue = queue
        self._open = open
        self._peeking = peeking
        self._senders = senders
        self._session: AnySession | None = None

    def all(self) -> int:
        """Delete all messages that can be deleted; returns how many were."""
        count = 0
        try:
            count += self.waiting()
        except BrokerError as error:
            if NOT_ALLOWED not in str(error):
                raise
            self._session = ANY_SESSION
            count += self.waiting()
        while removed := self._apart():
            count += removed
        return count

    def waiting(self) -> int:
        """Delete the messages that can be received now; returns how many were."""
        receiver = self._open(self._session, True)
        count = 0
        try:
            while deleted := receiver.receive(PAGE, WAIT):
                count += len(deleted)
        finally:
            receiver.close()
        return count

    def _apart(self) -> int:
        """Delete scheduled and deferred messages, of the first ones of the queue."""
        found = self._peeking.all(
            self._queue, lambda each: each.state in (MessageState.SCHEDULED, MessageState.DEFERRED)
        )
        scheduled = [each for each in found if each.state is MessageState.SCHEDULED]
        deferred = [each for each in found if each.state is MessageState.DEFERRED]
        count = sum(self._senders.cancelled(int(each.position)) for each in scheduled)
        return count + (0 if self._session is not None else self._recalled(deferred))

    def _recalled(self, deferred: list[Peeked]) -> int:
        """Complete these deferred messages; returns how many were completed."""
        if not deferred:
            return 0
        receiver, count = self._open(None, False), 0
        try:
            for start in range(0, len(deferred), PAGE):
                positions = [each.position for each in deferred[start : start + PAGE]]
                pairs = [(each, Complete()) for each in receiver.receive_deferred(positions)]
                answers = receiver.settle(pairs)
                count += sum(isinstance(answer, Settled) for answer in answers)
        finally:
            receiver.close()
        return count


LEASE_TOLERANCE: Final = 0.5


class ServiceBusBroker(BrokerSkeleton):
    """The queues of a namespace. Any thread may call; a forked child makes its own."""

    title = "Service Bus queue"

    def __init__(
        self,
        address: ServiceBusAddress,
        *,
        credential: TokenCredential | None = None,
        admin: str | None = None,
        websockets: bool | None = None,
        endpoint: str | None = None,
        max_message_bytes: int = MESSAGE_LIMIT,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Make a broker; nothing connects before the first call.

        credential: replaces azure-identity's default.
        admin: see rule 3 of the module `admin`.
        websockets, endpoint: see the module `connecting`.
        max_message_bytes: raise it for the Premium tier.
        clock: injected in tests.
        """
        super().__init__(KIND, replace(CAPABILITIES, max_message_bytes=max_message_bytes))
        self._client = BusClient(
            address, credential=credential, websockets=websockets, endpoint=endpoint
        )
        self._admin = Administration(address, credential=credential, admin=admin)
        self._clock = clock
        self._service_clock = BusClock(clock)
        self._address = address
        self._senders: dict[str, Senders] = {}
        self._peeking = Peeking(self._client)
        self._lock_seconds: dict[str, float | None] = {}
        self._receivers: list[Receiver] = []
        self._lock = threading.Lock()

    @property
    def identity(self) -> str:
        """The broker's name for `aztask.address.owner`."""
        return service_name(self._address)

    @property
    def server(self) -> tuple[str, int | None]:
        """The namespace's host name, and the port if the address names one."""
        return self._address.host, self._address.port

    # -- queues ------------------------------------------------------------------------------

    def _declare(self, queue: str, options: QueueOptions) -> None:
        self._admin.declare(queue, options)
        self._lock_seconds.pop(queue, None)

    def _delete(self, queue: str) -> None:
        self._admin.delete(queue)
        self._forget(queue)

    def _names(self) -> list[str]:
        return self._admin.queues()  # needs the permission to manage

    def _stats(self, queue: str) -> QueueStats:
        """The service counts clock probes of processes that died. In a queue with few messages,
        where a worker that empties it or a repair would wait for them, they are taken off.
        """
        try:
            found = self._admin.stats(queue)
        except ConfigurationError:  # no permission to manage
            return self._peeking.counted(queue)
        dead = self._peeking.without_probes(queue, found.dead or 0)
        scheduled = found.scheduled
        if scheduled and found.living <= PAGE:
            with suppress(AztaskError, *SDK_ERRORS):  # without the permission to listen
                scheduled = max(0, scheduled - self._peeking.probes(queue, scheduled))
        return replace(found, dead=dead, scheduled=scheduled)

    def _peek(
        self, queue: str, dead_letter: bool, after: Position | None, limit: int
    ) -> list[Peeked]:
        return self._peeking.page(queue, dead_letter=dead_letter, after=after, limit=limit)

    def _purge(self, queue: str, dead_letter: bool) -> int:
        """Scheduled messages are cancelled, which needs the permission to send."""
        lease = self._capabilities.max_lease_seconds

        def open_receiver(session: AnySession | None, delete: bool) -> Receiver:
            options = ReceiverOptions(queue, lease, session, dead_letter, delete)
            if session is None:
                return BusReceiver(self._client, options, self.send, clock=self._clock)
            peek = partial(self._peeking.messages, queue, limit=1, sessions=True)
            return BusSessionReceiver(
                self._client, options, self.send, peek=peek, clock=self._clock
            )

        purge = Purge(queue, open_receiver, self._peeking, self._senders_of(queue))
        return purge.waiting() if dead_letter else purge.all()

    # -- messages ----------------------------------------------------------------------------

    def send(self, queue: str, envelopes: Sequence[Envelope]) -> None:
        """Store all envelopes; see `Broker.send` for the errors."""
        if pairs := self._pairs(queue, envelopes):
            self._senders_of(queue).send(pairs)

    def _pairs(self, queue: str, envelopes: Sequence[Envelope]) -> list[Pair]:
        """What is to be sent to a queue. Raises what shows that before it is sent."""
        if queue in self._senders:
            self._usable()
        else:
            self._usable_for(queue)
        if not envelopes:
            return []
        if not self._service_clock.known and any(envelope.delay for envelope in envelopes):
            self._learn_time(queue, envelopes[0].session)
        now = self._service_clock.now()
        limit = self._capabilities.max_message_bytes
        return [(envelope, message_of(envelope, now, limit)) for envelope in envelopes]

    def check(self, envelope: Envelope, *, reserve: int = 0) -> None:
        """Refuse an envelope that could not be sent; see `Broker.check`."""
        limit = self._capabilities.max_message_bytes - reserve
        message_of(envelope, self._service_clock.now(), limit)

    def _cancel_scheduled(self, queue: str, message_ids: Sequence[str]) -> int:
        """The service cancels by sequence number, so this peeks through the whole queue."""
        ids = frozenset(message_ids)
        found = self._peeking.all(
            queue,
            lambda each: each.state is MessageState.SCHEDULED and each.envelope.message_id in ids,
        )
        senders = self._senders_of(queue)
        return sum(senders.cancelled(int(each.position)) for each in found)

    def send_timer(self, queue: str, envelope: Envelope) -> int:
        """Schedule one message: a request of its own, which gives its sequence number.

        One that is due is scheduled, too, by the service's clock: only so it has a number.
        """
        (pair,) = self._pairs(queue, [replace(envelope, delay=envelope.delay or AT_ONCE)])
        return self._senders_of(queue).timed(pair[1])

    def cancel_timer(self, queue: str, number: int) -> bool:
        """Cancel by sequence number: one request."""
        self._usable_for(queue)
        return self._senders_of(queue).cancelled(number)

    def _receiver(self, options: ReceiverOptions, poll_ceiling: float | None) -> Receiver:
        """The queue's lock decides: the lease must equal it.

        Raises ConfigurationError if the lock duration is known to be another. If it is not known,
        the receiver's `receive` raises the error as soon as its messages prove the difference.
        """
        queue, session, dead_letter = options.queue, options.session, options.dead_letter
        lease = self._checked_lease(queue, options.lease, dead_letter=dead_letter)
        watch = None
        if not (options.delete or dead_letter):
            watch = self._watch(queue, lease, in_session=session is not None)
        options = replace(options, lease=lease)
        receiver: Receiver
        if session is None or dead_letter:
            receiver = BusReceiver(self._client, options, self.send, clock=self._clock, watch=watch)
        else:
            self._peeking.note_sessions(queue)
            receiver = BusSessionReceiver(
                self._client,
                options,
                self.send,
                peek=lambda number: self._peeking.messages(queue, number, 1, sessions=True),
                clock=self._clock,
                watch=watch,
            )
        self._receivers.append(receiver)
        return receiver

    def _checked_lease(self, queue: str, lease: float, *, dead_letter: bool) -> float:
        """The queue's lock duration if it can be read, otherwise `lease`.

        Raises ConfigurationError if the two differ.
        """
        if queue not in self._lock_seconds:
            self._lock_seconds[queue] = self._admin.lock_seconds(queue)
        actual = self._lock_seconds[queue]
        if actual is None:
            return lease
        if abs(actual - lease) > LEASE_TOLERANCE and not dead_letter:
            raise ConfigurationError(
                f"queue {queue!r} holds its messages for {actual:g} s, not for {lease:g} s: its "
                f"lease is fixed; remove --lease and set app.queue({queue!r}, lease={actual:g})"
                ", or change the queue's lock duration"
            )
        return actual

    def _watch(self, queue: str, lease: float, *, in_session: bool) -> LockWatch:
        def peek(number: int) -> ServiceBusReceivedMessage | None:
            found = self._peeking.messages(queue, number, 1, sessions=in_session)
            return found[0] if found else None

        def ask() -> float | None:
            self._lock_seconds[queue] = self._admin.lock_seconds(queue, anew=True)
            return self._lock_seconds[queue]

        probe = partial(self._probe, queue, in_session=in_session)
        calibration = ClockCalibration(self._service_clock, self._clock, probe, peek)
        managed = self._lock_seconds.get(queue) is not None
        return LockWatch(queue, lease, calibration, ask, managed=managed)

    def mailboxes(self) -> BusMailboxes:
        """The mailboxes of this namespace; see the module `mailboxes` for the permissions."""
        self._usable()

        def receiver(entity: str, lease: float, delete: bool) -> Receiver:
            options = ReceiverOptions(entity, lease, delete=delete)
            opened = BusReceiver(self._client, options, self.send, clock=self._clock)
            self._receivers.append(opened)
            return opened

        return BusMailboxes(self._admin, self.send, receiver, self._peeking)

    def inspector(self) -> BusInspector:
        """The inspector that ``aztask doctor`` and a starting worker use."""
        self._usable()
        return BusInspector(
            self._client.address,
            self._admin,
            self._service_clock,
            listen=lambda queue: self.peek(queue, limit=1),
            send=self._open_sender,
            learn=self._learn_time,
        )

    def _close(self) -> None:
        for receiver in self._receivers:
            receiver.close()
        for queue in list(self._senders):
            self._forget(queue)
        self._peeking.close()
        self._admin.close()
        self._client.finish()

    # -- inside ------------------------------------------------------------------------------

    def _open_sender(self, queue: str) -> None:
        """Open a connection for sending; raises the service's refusal."""
        self._usable_for(queue)
        with self._senders_of(queue).sender():
            pass

    def _senders_of(self, queue: str) -> Senders:
        senders = self._senders.get(queue)
        if senders is None:
            with self._lock:
                senders = self._senders.setdefault(queue, Senders(self._client, queue))
        return senders

    def _forget(self, queue: str) -> None:
        senders = self._senders.pop(queue, None)
        if senders is not None:
            senders.close()

    def _learn_time(self, queue: str, session: str | None = None) -> None:
        """Learn the service's time from a probe message.

        If that fails, for example without the permission to listen, our own clock is used.
        """
        with suppress(AztaskError, *SDK_ERRORS):
            self._probe(queue, in_session=session is not None)

    def _probe(self, queue: str, *, in_session: bool) -> None:
        found = self._senders_of(queue).probed(
            self._clock,
            lambda number: self._peeking.messages(queue, number, 1, sessions=in_session),
            in_session=in_session,
        )
        self._service_clock.pin(found.time, found.after, found.before)
        self._service_clock.learn(found.time)

    def _usable_for(self, queue: str) -> None:
        super()._usable_for(queue)
        self._address.check_entity(queue)
