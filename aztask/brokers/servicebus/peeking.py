"""Peeks at the queues of a namespace, page by page, without leasing messages.

Each queue has one connection for its peeks, and one for peeks at its dead letters. Peeking needs
the permission to listen. A queue with sessions refuses receivers without one, so peeks at it go
over the management node of a sender's connection, which needs the permission to send as well.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from azure.servicebus import ServiceBusReceiver, ServiceBusSender

from aztask.brokers.base import MessageState, Peeked, Position, QueueStats
from aztask.brokers.servicebus import private
from aztask.brokers.servicebus.client import REQUEST_SECONDS, BusClient
from aztask.brokers.servicebus.control import Control
from aztask.brokers.servicebus.errors import SDK_ERRORS, error_of, is_refusal
from aztask.brokers.servicebus.wire import peeked_of, sequence_number

PAGE: Final = 250
MAX_COUNTED: Final = 10_000
NOT_ALLOWED: Final = "amqp:not-allowed"


class Peeking:
    """Peeks at all queues of a namespace. Any thread may call."""

    def __init__(self, client: BusClient) -> None:
        self._client = client
        self._controls: dict[tuple[str, bool], Control] = {}
        self._lock = threading.Lock()
        self._with_sessions: set[str] = set()
        self._senders: dict[str, ServiceBusSender] = {}
        self._sending = threading.Lock()

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
                else:
                    self._senders[queue] = sender
                    return found
        raise AssertionError("the last attempt returns or raises")

    def page(
        self, queue: str, *, dead_letter: bool = False, after: Position | None = None, limit: int
    ) -> list[Peeked]:
        """Up to `limit` messages in order of position, starting behind `after`."""
        start = 1 if after is None else sequence_number(after) + 1
        found: list[Peeked] = []
        for message in self.messages(queue, start, limit, dead_letter=dead_letter):
            peeked = peeked_of(message, dead_letter=dead_letter)
            if not peeked.position:  # damaged and without a number: the next page must skip it
                peeked = replace(peeked, position=start)
            start = int(peeked.position) + 1
            found.append(peeked)
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
