"""Inspects Service Bus queues and our permissions on them, and peeks at their messages.

Rules
1. Settings are read if we have the permission to manage. The permissions to listen and to send are
   checked by opening links and by a peek: nothing is received and nothing is sent.
2. The clock is learned from a message that is scheduled ahead, peeked at and cancelled.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final

from azure.servicebus import ServiceBusReceiver, ServiceBusSender

from aztask.address.addresses import ServiceBusAddress
from aztask.errors import AztaskError, BrokerError, BrokerUnavailable, QueueNotFound
from aztask.queues.base import MessageState, Peeked, Permission, Position, QueueFacts, QueueStats
from aztask.queues.servicebus import private
from aztask.queues.servicebus.admin import Administration
from aztask.queues.servicebus.client import REQUEST_SECONDS, BusClient
from aztask.queues.servicebus.clock import BusClock, is_probe
from aztask.queues.servicebus.control import Control
from aztask.queues.servicebus.errors import SDK_ERRORS, error_of, is_refusal
from aztask.queues.servicebus.kind import KIND
from aztask.queues.servicebus.wire import peeked_of, sequence_number
from aztask.support.clock import monotonic
from aztask.support.finding import Finding, fine, warning

# -- peeking ---------------------------------------------------------------------------------
#
# Peeks at the queues of a namespace, page by page, without leasing messages.
#
# Each queue has one connection for its peeks, and one for peeks at its dead letters. Peeking needs
# the permission to listen. A queue with sessions refuses receivers without one, so peeks at it go
# over the management node of a sender's connection, which needs the permission to send as well.


PAGE: Final = 250
MAX_COUNTED: Final = 10_000
NOT_ALLOWED: Final = "amqp:not-allowed"

MOST_SEARCHED: Final = 100
"""Up to so many dead letters are searched for clock probes, to count without them."""

FEW_SCHEDULED: Final = 16
"""Up to so many scheduled messages may all be clock probes."""

SEARCHED_SECONDS: Final = 60.0
"""How long the result of that search is used while the service's count stays the same."""


class Peeking:
    """Peeks at all queues of a namespace. Any thread may call."""

    def __init__(self, client: BusClient) -> None:
        self._client = client
        self._controls: dict[tuple[str, bool], Control] = {}
        self._lock = threading.Lock()
        self._with_sessions: set[str] = set()
        self._senders: dict[str, ServiceBusSender] = {}
        self._sending = threading.Lock()
        self._searched: dict[str, tuple[int, float, int]] = {}

    def note_sessions(self, queue: str) -> None:
        """The queue has sessions: the first look at it need not find that out, for seconds."""
        self._with_sessions.add(queue)

    def messages(
        self,
        queue: str,
        start: int,
        limit: int,
        *,
        dead_letter: bool = False,
        sessions: bool = False,
    ) -> list[Any]:
        """Up to `limit` of the SDK's messages, from sequence number `start` on.

        sessions: True if the queue is known to have sessions; False: find out.
        """
        if (sessions or queue in self._with_sessions) and not dead_letter:
            return self._over_sender(queue, start, limit)
        control = self._control(queue, dead_letter=dead_letter)
        try:
            found: list[Any] = control.call(
                lambda link: link.peek_messages(max_message_count=limit, sequence_number=start)
            )
        except SDK_ERRORS as error:
            failure = error_of(error, queue)
            if dead_letter or NOT_ALLOWED not in str(failure):
                raise failure from None
        else:
            return found
        found = self._over_sender(queue, start, limit)
        self._with_sessions.add(queue)
        return found

    def _over_sender(self, queue: str, start: int, limit: int) -> list[Any]:
        """Peek over a sender's connection; reconnect once if the connection has ended."""
        with self._sending:
            for last in (False, True):
                sender = self._senders.pop(queue, None) or self._client.sender(queue)
                try:
                    if not private.is_open(sender):
                        private.open_link(sender, REQUEST_SECONDS)
                    receiver = self._client.receiver(queue)
                    found = private.peek_over(sender, receiver, start, limit, REQUEST_SECONDS)
                except SDK_ERRORS as error:
                    self._client.drop(sender)
                    if last or is_refusal(error):
                        raise error_of(error, queue) from None
                except BaseException:
                    self._client.drop(sender)
                    raise
                else:
                    self._senders[queue] = sender
                    return found
        raise AssertionError("the last attempt returns or raises")

    def without_probes(self, queue: str, dead: int) -> int:
        """The service's count of dead letters, without the clock probes, which no peek shows.

        A probe whose sender died is a dead letter where the queue keeps what expires. Without this
        the count would say 1 of a queue whose list is empty. More than `MOST_SEARCHED` dead letters
        are not searched, and neither are those that we may not peek at: one more is in the count.
        """
        if not 0 < dead <= MOST_SEARCHED:
            return dead
        now = monotonic()
        known, until, probes = self._searched.get(queue, (-1, 0.0, 0))
        if known != dead or now >= until:
            try:
                probes = self._dead_probes(queue)
            except AztaskError:
                return dead
            self._searched[queue] = (dead, now + SEARCHED_SECONDS, probes)
        return max(0, dead - probes)

    def _dead_probes(self, queue: str) -> int:
        """How many of the first `MOST_SEARCHED` dead letters are clock probes."""
        start, searched, probes = 1, 0, 0
        while searched < MOST_SEARCHED and (
            page := self._read(queue, start, MOST_SEARCHED, dead_letter=True)
        ):
            searched += len(page)
            start = int(page[-1].position) + 1
            probes += sum(is_probe(each.envelope.message_id) for each in page)
        return probes

    def _read(self, queue: str, start: int, limit: int, *, dead_letter: bool) -> list[Peeked]:
        """Up to `limit` messages from sequence number `start` on, clock probes among them.

        One that is damaged and has no number gets the number at which the next page can begin.
        """
        found: list[Peeked] = []
        for message in self.messages(queue, start, limit, dead_letter=dead_letter):
            peeked = peeked_of(message, dead_letter=dead_letter)
            if not peeked.position:
                peeked = replace(peeked, position=start)
            start = int(peeked.position) + 1
            found.append(peeked)
        return found

    def page(
        self, queue: str, *, dead_letter: bool = False, after: Position | None = None, limit: int
    ) -> list[Peeked]:
        """Up to `limit` messages in order of position, starting behind `after`.

        Clock probes are skipped; an empty page still means that there are no more.
        """
        start = 1 if after is None else sequence_number(after) + 1
        found: list[Peeked] = []
        while not found and (page := self._read(queue, start, limit, dead_letter=dead_letter)):
            start = int(page[-1].position) + 1
            found = [each for each in page if not is_probe(each.envelope.message_id)]
        return found

    def all(
        self, queue: str, matches: Callable[[Peeked], bool], *, dead_letter: bool = False
    ) -> list[Peeked]:
        """The messages that match, of the first `MAX_COUNTED` ones."""
        found: list[Peeked] = []
        after: Position | None = None
        count = 0
        while count < MAX_COUNTED:
            page = self.page(queue, dead_letter=dead_letter, after=after, limit=PAGE)
            if not page:
                break
            count += len(page)
            after = page[-1].position
            found += filter(matches, page)
        return found

    def counted(self, queue: str) -> QueueStats:
        """Counts the messages by peeking; leased ones count as active."""
        states = [each.state for each in self.all(queue, lambda _: True)]
        return QueueStats(
            queue,
            active=states.count(MessageState.ACTIVE),
            leased=None,
            scheduled=states.count(MessageState.SCHEDULED),
            deferred=states.count(MessageState.DEFERRED),
            dead=len(self.all(queue, lambda _: True, dead_letter=True)),
        )

    def probes(self, queue: str, scheduled: int) -> int:
        """How many of the queue's scheduled messages are clock probes.

        0 without a look where more are scheduled than processes are likely to have left behind:
        the question is whether anything else waits, and there it does.
        """
        if not 0 < scheduled <= FEW_SCHEDULED:
            return 0
        found = [peeked_of(each, dead_letter=False) for each in self.messages(queue, 1, PAGE)]
        return sum(
            each.state is MessageState.SCHEDULED and is_probe(each.envelope.message_id)
            for each in found
        )

    def close(self) -> None:
        """Close the connections of all queues."""
        for control in self._controls.values():
            control.close()
        for sender in self._senders.values():
            self._client.close(sender)
        self._senders.clear()

    def _control(self, queue: str, *, dead_letter: bool) -> Control:
        key = (queue, dead_letter)
        with self._lock:
            control = self._controls.get(key)
            if control is None:

                def connect() -> ServiceBusReceiver:
                    return self._client.receiver(queue, dead_letter=dead_letter)

                control = Control(self._client, connect, queue, REQUEST_SECONDS)
                self._controls[key] = control
            return control


# -- inspection ------------------------------------------------------------------------------


BASIC: Final = "Basic"
ACTIVE: Final = "Active"
TIER: Final = "tier"
MANAGE: Final = "needs the permission to manage"


class BusInspector:
    """Inspects the queues of a namespace.

    listen, send: use the permission without effect, and raise the service's refusal.
    learn: learn the service's time, if possible.
    """

    def __init__(
        self,
        address: ServiceBusAddress,
        admin: Administration,
        clock: BusClock,
        *,
        listen: Callable[[str], Any],
        send: Callable[[str], Any],
        learn: Callable[[str], Any],
    ) -> None:
        self._address = address
        self._admin = admin
        self._clock = clock
        self._listen = listen
        self._send = send
        self._learn = learn

    def facts(self, queue: str) -> QueueFacts:
        """The queue's settings, in one request. Unread without the permission to manage."""
        KIND.check_name(queue)
        self._address.check_entity(queue)
        try:
            known = self._admin.recent(queue)
        except QueueNotFound:
            return QueueFacts(queue, exists=False)
        except BrokerUnavailable:
            # the administration is another service, on another port; a worker does not need it
            unread = f"the administration does not answer{self._admin.hint()}"
            return QueueFacts(queue, unread=unread)
        except BrokerError as error:
            return QueueFacts(queue, unread=str(error))
        except AztaskError as error:
            lacking = MANAGE if MANAGE in str(error) else str(error)
            return QueueFacts(queue, unread=lacking)
        facts = QueueFacts(
            queue,
            exists=True,
            duplicate_window=0.0,
            sessions=bool(known.requires_session),
            max_deliveries=known.max_delivery_count,
            dead_letters=True,
            active=known.status == ACTIVE,
            partitioned=bool(known.enable_partitioning),
        )
        if known.requires_duplicate_detection:
            window = _seconds(known.duplicate_detection_history_time_window)
            facts = replace(facts, duplicate_window=window)
        return replace(facts, lease_seconds=_seconds(known.lock_duration))

    def rights(self, queue: str) -> list[Permission]:
        """The permissions Listen and Send. Raises BrokerUnavailable."""
        found = []
        for name, attempt in (("listen", self._listen), ("send", self._send)):
            try:
                attempt(queue)
            except BrokerUnavailable:
                raise
            except AztaskError as error:
                found.append(Permission(name, error))
            else:
                found.append(Permission(name))
        return found

    def clock_offset(self, queue: str) -> float | None:
        """Seconds that the service's clock is ahead of ours; None if unknown."""
        if not self._clock.known:
            self._learn(queue)
        return self._clock.offset if self._clock.known else None

    def surroundings(self) -> list[Finding]:
        """The tier, and whether the SDK has the calls that make settling fast."""
        found = []
        with suppress(AztaskError):
            found.append(self._tier(self._admin.tier()))
        if not private.available():
            found.append(
                warning(
                    "azure-servicebus",
                    "sdk",
                    "this version renews and settles one message at a time",
                    "install a version that aztask was tested with: azure-servicebus>=7.15,<8",
                )
            )
        if self._address.entity:
            found.append(
                fine("broker", "entity", f"the connection string is for {self._address.entity!r}")
            )
        return found

    @staticmethod
    def _tier(tier: str) -> Finding:
        if tier != BASIC:
            return fine("broker", TIER, f"the namespace has the {tier} tier")
        return warning(
            "broker",
            TIER,
            "the namespace has the Basic tier: no duplicate detection, no sessions",
            "a retry whose worker dies at the wrong moment may run twice; Standard avoids it",
        )


def _seconds(value: object) -> float | None:
    return value.total_seconds() if isinstance(value, timedelta) else None
