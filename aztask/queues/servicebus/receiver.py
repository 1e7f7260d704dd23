"""Receivers of Service Bus: credit as needed, relative deadlines, settlement over a control link.

Rules
1. One connection receives, with exactly as much credit as the caller has room for, and none is left
   over. Two other connections renew and settle, so a renewal never waits for a settlement.
2. A deadline counts from the instant before the credit was given, or the renewal was sent.
3. Only the queue decides how long a lease lasts. We read its setting if we have the permission to
   manage, and check it against every message; see `aztask.queues.servicebus.lock`.
4. A connection on which nothing came for `QUIET_SECONDS` is tested with a peek, to find connections
   that were dropped silently.
5. If a settlement got no answer and its repetition is refused before our deadline, the first
   request took effect: until the deadline, no other receiver can hold the lock.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

from azure.servicebus import ServiceBusReceivedMessage, ServiceBusReceiver

from aztask.errors import (
    BrokerError,
    BrokerUnavailable,
    CapabilityError,
    ConfigurationError,
)
from aztask.message.envelope import Envelope
from aztask.queues.base import (
    Delivery,
    Lost,
    Position,
    ReceiverOptions,
    Renewed,
    Settled,
    Unknown,
)
from aztask.queues.servicebus import private
from aztask.queues.servicebus.client import BusClient
from aztask.queues.servicebus.clock import is_probe, without_probes
from aztask.queues.servicebus.control import RENEW, Control, LockRequest, Verdict
from aztask.queues.servicebus.errors import SDK_ERRORS, error_of, is_lost
from aztask.queues.servicebus.lock import LockWatch
from aztask.queues.servicebus.wire import (
    BusDelivery,
    all_unsettled,
    delivery_of,
    sequence_number,
    verb_of,
)
from aztask.settlement import Release, Resubmit, Settlement
from aztask.support.clock import Clock
from aztask.support.failpoint import hit

SHORTEST_WAIT: Final = 0.1
QUIET_SECONDS: Final = 60.0
OPEN_SECONDS: Final = 10.0
RELEASE_SECONDS: Final = 0.5
YIELD: Final = 0.01

Send = Callable[[str, Sequence[Envelope]], None]


def request_seconds(lease: float) -> float:
    """Time-out of one renewal or settlement: several fit into the last 30 % of the lease."""
    return min(10.0, max(1.0, 0.08 * lease))


class BusReceiver:
    """Receives from one queue, or from its dead letters. Any thread may call."""

    def __init__(
        self,
        client: BusClient,
        options: ReceiverOptions,
        send: Send,
        *,
        clock: Clock,
        watch: LockWatch | None = None,
    ) -> None:
        """watch: checks the lease; None if the lease does not matter."""
        self._client = client
        self._queue = options.queue
        self._lease = options.lease
        self._send = send
        self._watch = watch
        self._clock = clock
        self._dead_letter = options.dead_letter
        self._delete = options.delete
        self._closed = False
        self._releasing = False
        self._link: ServiceBusReceiver | None = None
        self._link_lock = threading.Lock()
        self._last_read_at = 0.0
        self._fresh = True
        self._opened_before = False
        self._settled_elsewhere: deque[tuple[int, bytes]] = deque()
        seconds = request_seconds(options.lease)

        def connect() -> ServiceBusReceiver:
            return client.receiver(
                options.queue, dead_letter=options.dead_letter, request_seconds=seconds
            )

        self._settling = Control(client, connect, options.queue, seconds)
        self._renewing = Control(client, connect, options.queue, seconds)

    # -- receiving ---------------------------------------------------------------------------

    def set_lease(self, seconds: float) -> None:
        """Has no effect: the queue's lock duration is the lease of all its messages."""

    def receive(self, limit: int, wait: float) -> list[Delivery]:
        """Up to `limit` deliveries, as soon as there is one; [] after `wait` seconds.

        Raises LeaseRefused if the lease differs from the queue's lock duration.
        """
        until = self._clock.monotonic() + max(wait, SHORTEST_WAIT)
        refusal = self._watched()
        limit = min(limit, 1) if refusal else limit
        while limit > 0 and not self._closed:
            # Deadlines count from here, so give credit anew after a tenth of a lease.
            left = min(until - self._clock.monotonic(), max(SHORTEST_WAIT, 0.1 * self._lease))
            with self._link_lock:
                try:
                    link = self._connected()
                    asked_at = self._clock.monotonic()
                    messages = self._pull(link, limit, left)
                    first, self._fresh = self._fresh, False
                except SDK_ERRORS as error:
                    self._disconnect()
                    raise error_of(error, self._queue) from None
                except BaseException:
                    self._disconnect()
                    raise
            if messages:
                made = self._deliveries(messages, asked_at)
                # A clock probe is no task: what it says of the lock is said by the next message.
                # Its id is read from the envelope, because the SDK's may be of any AMQP type.
                pairs = zip(messages, made, strict=True)
                if real := [each for each, one in pairs if not is_probe(one.envelope.message_id)]:
                    self._check_lease(real, asked_at if first else -math.inf)
                if found := without_probes(made, self.settle, delete=self._delete):
                    return found
            if self._clock.monotonic() >= until:
                break
            if self._releasing:
                self._clock.sleep(YIELD)
        if refusal and self._watch is not None and self._watch.refusal:
            raise self._watch.error()
        return []

    def _watched(self) -> str:
        """Start checking the lock; returns why the lease was refused earlier, or ""."""
        if self._watch is None:
            return ""
        refusal = self._watch.refusal
        if refusal:
            self._watch.try_again()
        else:
            self._watch.start()
        return refusal

    def _pull(self, link: ServiceBusReceiver, limit: int, wait: float) -> list[Any]:
        now = self._clock.monotonic()
        if now - self._last_read_at > QUIET_SECONDS:
            link.peek_messages(max_message_count=1, timeout=request_seconds(self._lease))
            self._last_read_at = self._clock.monotonic()
        self._forget(link)
        messages = private.pull(link, limit, wait, lambda: self._releasing)
        if messages:
            self._last_read_at = self._clock.monotonic()
        return messages

    def _forget(self, link: ServiceBusReceiver) -> None:
        """Tell the receiving link which deliveries were settled over the control link."""
        settled = self._settled_elsewhere
        if settled:
            private.forget(link, [settled.popleft() for _ in range(len(settled))])

    def _connected(self) -> ServiceBusReceiver:
        if self._closed:
            raise BrokerUnavailable("the receiver was closed; make another one")
        if self._link is None:
            self._link = self._client.receiver(
                self._queue, dead_letter=self._dead_letter, delete=self._delete
            )
        if not private.is_open(self._link):
            if not self._opened_before:  # in parallel: the SDK needs half a second for each
                self._opened_before = True
                self._warm()
            private.open_link(self._link, OPEN_SECONDS)
            self._last_read_at = self._clock.monotonic()
            self._fresh = True
            self._warm()
        return self._link

    def _warm(self) -> None:
        if not self._delete:
            self._renewing.warm()
            self._settling.warm()

    def _disconnect(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            self._client.drop(link)

    def _deliveries(
        self, messages: Sequence[ServiceBusReceivedMessage], asked_at: float
    ) -> list[Delivery]:
        return [
            delivery_of(
                message,
                self._queue,
                asked_at + self._lease,
                self._lease,
                dead_letter=self._dead_letter,
                delete=self._delete,
            )
            for message in messages
        ]

    def _check_lease(self, messages: Sequence[ServiceBusReceivedMessage], asked_at: float) -> None:
        """Check the lock duration with these messages (rule 3).

        asked_at: they were locked after it; minus infinity if they may come from an earlier pull.
        If the lease is refused, the messages are released uncounted; raises LeaseRefused.
        """
        self._note_locks(messages, asked_at)
        if self._watch is None or not self._watch.verdict():
            return
        with self._link_lock:
            link, self._link = self._link, None  # the first pull of a new link is the best evidence
            if link is not None:
                for message in messages:
                    private.release(link, message)
                self._client.close(link)
        raise self._watch.error()

    def _note_locks(self, messages: Sequence[ServiceBusReceivedMessage], asked_at: float) -> None:
        if self._watch is not None:
            self._watch.messages(messages, self._clock.monotonic(), asked_at)

    def receive_deferred(self, positions: Sequence[Position]) -> list[Delivery]:
        """Lease deferred messages by position; missing and leased ones are skipped."""
        numbers = [sequence_number(position) for position in positions]
        asked_at = self._clock.monotonic()
        messages: list[Any] = []
        if numbers:
            messages = self._deferred(numbers)
        self._note_locks(messages, asked_at)
        return self._deliveries(messages, asked_at)

    def _deferred(self, numbers: list[int]) -> list[Any]:
        """Receive all in one request; one by one if one of them is missing."""
        try:
            found: list[Any] = self._settling.call(
                lambda link: link.receive_deferred_messages(numbers)
            )
        except SDK_ERRORS as error:
            if not is_lost(error):
                raise error_of(error, self._queue) from None
            if len(numbers) == 1:
                return []
            return [message for number in numbers for message in self._deferred([number])]
        return found

    # -- leases ------------------------------------------------------------------------------

    def renew(
        self, deliveries: Sequence[Delivery], seconds: float | None = None
    ) -> list[Renewed | Lost | Unknown]:
        """Extend each lease by the queue's lock duration; `seconds` is ignored."""
        ours = all_unsettled(deliveries)
        asked_at = self._clock.monotonic()
        verdicts = self._ask(self._renewing, [(each, (RENEW, "", "")) for each in ours])
        answers: list[Renewed | Lost | Unknown] = []
        for delivery, verdict in zip(ours, verdicts, strict=True):
            if isinstance(verdict, Settled):
                delivery.deadline = asked_at + self._lease
                delivery.lease_seconds = self._lease
                answers.append(Renewed(delivery.deadline))
            elif isinstance(verdict, Lost) and self._may_be_settled(delivery):
                answers.append(Unknown("a settlement without an answer may have taken effect"))
            else:
                answers.append(verdict)
        return answers

    def update(self, delivery: Delivery, envelope: Envelope) -> Renewed | Lost | Unknown:
        """Not supported by Service Bus: raises CapabilityError."""
        raise CapabilityError(
            "Service Bus cannot change a message in place; checkpoints need a result store"
        )

    def settle(
        self, pairs: Sequence[tuple[Delivery, Settlement]]
    ) -> list[Settled | Lost | Unknown]:
        """Carry out each settlement; the clones of resubmissions are sent first.

        Crash window: if the process dies after a clone was sent and before its original is
        completed, both are in the queue. The redelivered original sends the clone again under the
        same id, and duplicate detection drops it. Without duplicate detection the run is repeated,
        and the outcome that was recorded first stays.
        """
        ours = all_unsettled([delivery for delivery, _ in pairs])
        kinds = [settlement for _, settlement in pairs]
        failed = self._send_clones(kinds)
        released = self._release(ours, kinds)
        verdicts: list[Verdict] = [Unknown()] * len(ours)
        actions = []
        for index, settlement in enumerate(kinds):
            if failed is not None and isinstance(settlement, Resubmit):
                verdicts[index] = Unknown(failed)
            elif index in released:
                verdicts[index] = Settled()
            else:
                actions.append((index, (ours[index], verb_of(settlement))))
        answers = self._ask(self._settling, [action for _, action in actions])
        for (index, (delivery, _)), verdict in zip(actions, answers, strict=True):
            verdicts[index] = self._judged(delivery, kinds[index], verdict)
        for delivery, verdict in zip(ours, verdicts, strict=True):
            delivery.settled = isinstance(verdict, Settled)
            arrival = private.arrival(delivery.message)
            if arrival is not None and not isinstance(verdict, Unknown):
                self._settled_elsewhere.append(arrival)
        return verdicts

    def _judged(self, delivery: BusDelivery, settlement: Settlement, verdict: Verdict) -> Verdict:
        """The answer for the service's verdict on `settlement` (rule 5)."""
        if isinstance(verdict, Lost) and self._may_be_settled(delivery):
            return Settled()
        return verdict

    def _may_be_settled(self, delivery: BusDelivery) -> bool:
        """Whether a settlement got no answer, and no other receiver can hold the lock yet."""
        return delivery.attempted and self._clock.monotonic() < delivery.deadline

    def _send_clones(self, settlements: Sequence[Settlement]) -> str | None:
        """Send the clones of resubmissions; returns why it failed, or None."""
        clones = []
        for settlement in settlements:
            if isinstance(settlement, Resubmit):
                if settlement.envelope is None:
                    raise ConfigurationError(
                        "a resubmission needs its clone; give it with "
                        "aztask.settlement.with_envelope"
                    )
                clones.append(replace(settlement.envelope, delay=settlement.delay))
        if not clones:
            return None
        try:
            self._send(self._queue, clones)
        except BrokerError as error:
            return str(error)
        hit("cloned", len(clones))
        return None

    def _release(self, deliveries: Sequence[BusDelivery], kinds: Sequence[Settlement]) -> set[int]:
        """Release deliveries over their own link; returns the indexes of those released.

        The service does not answer. If the link is busy or was reopened, it cannot release them;
        then the caller abandons the delivery, which counts as a delivery.
        """
        indexes = [i for i, settlement in enumerate(kinds) if isinstance(settlement, Release)]
        self._releasing = bool(indexes)
        if not indexes or not self._link_lock.acquire(timeout=RELEASE_SECONDS):
            self._releasing = False
            return set()
        try:
            link = self._link
            return {
                index
                for index in indexes
                if link is not None and private.release(link, deliveries[index].message)
            }
        finally:
            self._releasing = False
            self._link_lock.release()

    def _ask(
        self, control: Control, actions: Sequence[tuple[BusDelivery, tuple[str, str, str]]]
    ) -> list[Verdict]:
        requests = []
        for delivery, (verb, reason, description) in actions:
            if delivery.lock is None or delivery.message is None:
                raise ConfigurationError("this delivery was received and deleted: do not settle it")
            requests.append(LockRequest(verb, delivery.lock, delivery.message, reason, description))
        if requests:
            control.carry_out(requests)
        for request, (delivery, _) in zip(requests, actions, strict=True):
            delivery.attempted |= request.unanswered and request.verb != RENEW
        return [request.verdict for request in requests]

    def close(self) -> None:
        """Stop receiving. Leased messages stay leased until their leases end."""
        self._closed = True
        if self._watch is not None:
            self._watch.close()
        self._settling.close()
        self._renewing.close()
        if self._link_lock.acquire(timeout=2.0):
            try:
                link, self._link = self._link, None
            finally:
                self._link_lock.release()
            if link is not None:
                self._client.close(link)
