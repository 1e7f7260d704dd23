"""Deletes all messages of a queue. The service has no request for that, so this receives them.

Rules
1. Waiting messages are received and deleted, session by session on a queue with sessions. Scheduled
   ones are cancelled. Deferred ones are received by number and completed.
2. Leased messages stay, and so do the messages of a session that a worker holds. Deferred messages
   of a queue with sessions stay too: only a receiver of their session gets them.
3. If the process dies in between, some messages are deleted and the others are as before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from aztask.errors import BrokerError
from aztask.queues.base import ANY_SESSION, AnySession, MessageState, Peeked, Receiver
from aztask.queues.delivery import Settled
from aztask.queues.servicebus.peeking import NOT_ALLOWED, PAGE, Peeking
from aztask.queues.servicebus.senders import Senders
from aztask.settlement import Complete

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
