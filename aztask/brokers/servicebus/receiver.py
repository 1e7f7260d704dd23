"""Receivers of Service Bus: credit as needed, relative deadlines, settlement over a control link.

Rules
1. One connection receives, with exactly as much credit as there is room for and none left over;
   others renew and settle. A renewal never waits behind a settlement.
2. A deadline counts from the instant before the credit was given, or the renewal sent.
3. The queue alone says how long a lease is. What it says is asked for where we may manage, and
   checked against every message; see `aztask.brokers.servicebus.lock`.
4. A connection on which nothing has come for `QUIET_SECONDS` is tried out, so that a silently
   dropped one is found.
5. A settlement that the service refuses after a try that got no answer was done by that try, as
   long as our deadline has not passed: until then the lock is nobody else's.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

from azure.servicebus import ServiceBusReceivedMessage, ServiceBusReceiver

from aztask.brokers.base import (
    Delivery,
    Lost,
    Position,
    ReceiverOptions,
    Renewed,
    Settled,
    Unknown,
)
from aztask.brokers.servicebus import private
from aztask.brokers.servicebus.client import BusClient
from aztask.brokers.servicebus.control import RENEW, Control, LockRequest, Verdict
from aztask.brokers.servicebus.delivery import BusDelivery, delivery_of, unsettled, verb_of
from aztask.brokers.servicebus.errors import SDK_ERRORS, error_of, is_lost
from aztask.brokers.servicebus.lock import LockWatch
from aztask.brokers.servicebus.wire import sequence_number
from aztask.errors import (
    BrokerError,
    BrokerUnavailable,
    CapabilityError,
    ConfigurationError,
)
from aztask.message.envelope import Envelope
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
    """How long one renewal or settlement may take: several fit into what is left at 70 %."""
    return min(10.0, max(1.0, 0.08 * lease))


class BusReceiver:
    """Takes deliveries from one queue, or from its dead letters. Any thread may call."""

    def __init__(
        self,
        client: BusClient,
        options: ReceiverOptions,
        send: Send,
        *,
        clock: Clock,
        watch: LockWatch | None = None,
    ) -> None:
        """watch: checks the lease; None where it does not matter."""
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
        self._heard_at = 0.0
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
        """Without effect: the queue's lock duration is the lease of all its messages."""

    def receive(self, limit: int, wait: float) -> list[Delivery]:
        """Up to `limit` deliveries, as soon as there is one; [] after `wait` seconds.

        Raises ConfigurationError where the lease is not the queue's.
        """
        until = time.monotonic() + max(wait, SHORTEST_WAIT)
        refusal = self._watched()
        limit = min(limit, 1) if refusal else limit
        while limit > 0 and not self._closed:
            # a deadline counts from here: so credit is given anew after a tenth of a lease
            left = min(until - time.monotonic(), max(SHORTEST_WAIT, 0.1 * self._lease))
            with self._link_lock:
                try:
                    link = self._connected()
                    asked_at = self._clock.monotonic()
                    messages = self._pull(link, limit, left)
                    first, self._fresh = self._fresh, False
                except SDK_ERRORS as error:
                    self._disconnect()
                    raise error_of(error, self._queue) from None
            if messages:
                self._check_lease(messages, asked_at if first else -math.inf)
                return self._deliveries(messages, asked_at)
            if time.monotonic() >= until:
                break
            if self._releasing:
                time.sleep(YIELD)
        if refusal and self._watch is not None and self._watch.refusal:
            raise ConfigurationError(self._watch.refusal)
        return []

    def _watched(self) -> str:
        """Begin to watch the lock; why the lease has been refused before, or ""."""
        if self._watch is None:
            return ""
        refusal = self._watch.refusal
        if refusal:
            self._watch.try_again()
        else:
            self._watch.start()
        return refusal

    def _pull(self, link: ServiceBusReceiver, limit: int, wait: float) -> list[Any]:
        now = time.monotonic()
        if now - self._heard_at > QUIET_SECONDS:
            link.peek_messages(max_message_count=1, timeout=request_seconds(self._lease))
            self._heard_at = time.monotonic()
        self._forget(link)
        messages = private.pull(link, limit, wait, lambda: self._releasing)
        if messages:
            self._heard_at = time.monotonic()
        return messages

    def _forget(self, link: ServiceBusReceiver) -> None:
        """The link on which they came learns what was settled over the control link."""
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
            if not self._opened_before:  # side by side: the SDK takes half a second for each
                self._opened_before = True
                self._warm()
            private.open_link(self._link, OPEN_SECONDS)
            self._heard_at = time.monotonic()
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
        """Learn from these how long the lock is; see rule 3.

        asked_at: they cannot have been locked before; what was on its way from an earlier pull can.
        If the lease is refused, they are given back, uncounted, before it raises.
        """
        self._note_locks(messages, asked_at)
        refusal = self._watch.verdict() if self._watch is not None else ""
        if not refusal:
            return
        with self._link_lock:
            link, self._link = self._link, None  # the first pull of a new link tells most
            if link is not None:
                for message in messages:
                    private.release(link, message)
                self._client.close(link)
        raise ConfigurationError(refusal)

    def _note_locks(self, messages: Sequence[ServiceBusReceivedMessage], asked_at: float) -> None:
        if self._watch is not None:
            self._watch.messages(messages, self._clock.monotonic(), asked_at)

    def receive_deferred(self, positions: Sequence[Position]) -> list[Delivery]:
        """Lease deferred messages; those that are gone or leased are left out."""
        numbers = [sequence_number(position) for position in positions]
        asked_at = self._clock.monotonic()
        messages: list[Any] = []
        if numbers:
            messages = self._deferred(numbers)
        self._note_locks(messages, asked_at)
        return self._deliveries(messages, asked_at)

    def _deferred(self, numbers: list[int]) -> list[Any]:
        """One request for all; one by one where one of them is not there."""
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
        """Extend each lease by the queue's own duration, whatever `seconds` says."""
        ours = unsettled(deliveries)
        asked_at = self._clock.monotonic()
        verdicts = self._ask(self._renewing, [(each, (RENEW, "", "")) for each in ours])
        answers: list[Renewed | Lost | Unknown] = []
        for delivery, verdict in zip(ours, verdicts, strict=True):
            if isinstance(verdict, Settled):
                delivery.deadline = asked_at + self._lease
                delivery.lease_seconds = self._lease
                answers.append(Renewed(delivery.deadline))
            elif isinstance(verdict, Lost) and self._may_be_settled(delivery):
                answers.append(Unknown("a settlement without an answer may have been carried out"))
            else:
                answers.append(verdict)
        return answers

    def update(self, delivery: Delivery, envelope: Envelope) -> Renewed | Lost | Unknown:
        """There is nothing like it here: raises CapabilityError."""
        raise CapabilityError(
            "Service Bus cannot change a message in place; checkpoints need a result store"
        )

    def settle(
        self, pairs: Sequence[tuple[Delivery, Settlement]]
    ) -> list[Settled | Lost | Unknown]:
        """Carry out each settlement; clones are sent first.

        If the process dies after a clone was sent and before its original is completed, both are
        there: duplicate detection drops the clone that the redelivery sends again, under the same
        id; without it the run is repeated, and its recorded outcome stands.
        """
        ours = unsettled([delivery for delivery, _ in pairs])
        kinds = [settlement for _, settlement in pairs]
        failed = self._send_clones(kinds)
        released = self._release(ours, kinds)
        verdicts: list[Verdict] = [Unknown()] * len(ours)
        orders = []
        for index, settlement in enumerate(kinds):
            if failed is not None and isinstance(settlement, Resubmit):
                verdicts[index] = Unknown(failed)
            elif index in released:
                verdicts[index] = Settled()
            else:
                orders.append((index, (ours[index], verb_of(settlement))))
        asked = self._ask(self._settling, [order for _, order in orders])
        for (index, (delivery, _)), verdict in zip(orders, asked, strict=True):
            verdicts[index] = self._judged(delivery, kinds[index], verdict)
        for delivery, verdict in zip(ours, verdicts, strict=True):
            delivery.settled = isinstance(verdict, Settled)
            arrival = private.arrival(delivery.message)
            if arrival is not None and not isinstance(verdict, Unknown):
                self._settled_elsewhere.append(arrival)
        return verdicts

    def _judged(self, delivery: BusDelivery, settlement: Settlement, verdict: Verdict) -> Verdict:
        """What the service's verdict on `settlement` means; see rule 5."""
        if isinstance(verdict, Lost) and self._may_be_settled(delivery):
            return Settled()
        return verdict

    def _may_be_settled(self, delivery: BusDelivery) -> bool:
        """Whether a try to settle it got no answer, and nobody else can have had it since."""
        return delivery.attempted and self._clock.monotonic() < delivery.deadline

    def _send_clones(self, settlements: Sequence[Settlement]) -> str | None:
        """Send what is to be resubmitted; why it failed, or None."""
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
        """Which of those that are to be released were given back, uncounted, by their own link.

        The service does not answer. A link that is busy or was opened anew cannot do it: then the
        delivery is abandoned, which counts.
        """
        wanted = [i for i, settlement in enumerate(kinds) if isinstance(settlement, Release)]
        self._releasing = bool(wanted)
        if not wanted or not self._link_lock.acquire(timeout=RELEASE_SECONDS):
            self._releasing = False
            return set()
        try:
            link = self._link
            return {
                index
                for index in wanted
                if link is not None and private.release(link, deliveries[index].message)
            }
        finally:
            self._releasing = False
            self._link_lock.release()

    def _ask(
        self, control: Control, wanted: Sequence[tuple[BusDelivery, tuple[str, str, str]]]
    ) -> list[Verdict]:
        orders = []
        for delivery, (verb, reason, description) in wanted:
            if delivery.lock is None or delivery.message is None:
                raise ConfigurationError("this delivery has no lock; it was received and deleted")
            orders.append(LockRequest(verb, delivery.lock, delivery.message, reason, description))
        if orders:
            control.carry_out(orders)
        for order, (delivery, _) in zip(orders, wanted, strict=True):
            delivery.attempted |= order.unanswered and order.verb != RENEW
        return [order.verdict for order in orders]

    def close(self) -> None:
        """Stop receiving. What is leased stays leased until its lease ends."""
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
