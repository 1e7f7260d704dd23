"""The Storage queue service: what it keeps, and what it does with each request.

Rules of the service
1. A message is visible or hidden until a time. A receive hides it, counts a delivery, and makes a
   new pop receipt; an update makes a new receipt too, and from then on the old one is refused.
2. A receipt is valid until the next one is made, even if the message is visible again: who was slow
   can still delete it while no other worker has received it.
3. A message that has expired does not exist, whether it is hidden or not. Texts have at most 64
   KiB, and nothing is hidden for more than seven days.
4. Messages come in the order of the times at which they became visible.

Source: the service's REST reference ("Put Message", "Get Messages", "Update Message", "Delete
Message"), and Azurite.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count, islice
from math import inf
from typing import Final

from aztask.queues.storagequeue.kind import RECEIVE_LIMIT
from aztask.queues.storagequeue.wire import LONGEST_DELAY, TEXT_LIMIT
from aztask.support.clock import Clock

from .wire import Refused


@dataclass(slots=True, eq=False)
class StoredText:
    """A message as the service keeps it. Times are the service's."""

    number: int
    text: str
    put_at: float
    visible_at: float
    expires_at: float
    count: int = 0
    receipts: int = 0

    @property
    def name(self) -> str:
        """Its id."""
        return f"m-{self.number}"

    @property
    def receipt(self) -> str:
        """The pop receipt that is valid now."""
        return f"{self.number}.{self.receipts}"


@dataclass(slots=True, eq=False)
class StoredQueue:
    """One queue: its messages by id, and when each of them is visible.

    The heap has an entry for every change; those that are outdated are skipped.
    """

    metadata: dict[str, str] = field(default_factory=dict)
    messages: dict[str, StoredText] = field(default_factory=dict)
    heap: list[tuple[float, int]] = field(default_factory=list)

    def show_at(self, message: StoredText, at: float) -> None:
        """Hide the message until this time."""
        message.visible_at = at
        heapq.heappush(self.heap, (at, message.number))

    def living(self, message: StoredText | None, now: float) -> StoredText | None:
        """The message, unless it has expired; then it is removed."""
        if message is not None and message.expires_at <= now:
            del self.messages[message.name]
            return None
        return message

    def visible(self, now: float) -> Iterator[StoredText]:
        """Take visible messages off the heap, in order. Those taken have to be shown again."""
        seen: set[int] = set()  # a message that was hidden twice until the same time is there twice
        while self.heap and self.heap[0][0] <= now:
            at, number = heapq.heappop(self.heap)
            message = self.living(self.messages.get(f"m-{number}"), now)
            if message is not None and message.visible_at == at and number not in seen:
                seen.add(number)
                yield message


@dataclass(frozen=True, slots=True)
class Received:
    """What the answer to a receive, or to a peek, says of a message."""

    name: str
    receipt: str
    count: int
    put_at: float
    text: str


class StorageQueues:
    """All queues of one account.

    * `queues`: what it keeps, by the names of the queues.
    """

    def __init__(self, clock: Clock) -> None:
        """clock: the service's."""
        self.clock = clock
        self.queues: dict[str, StoredQueue] = {}
        self._numbers = count(1)

    def until_change(self, name: str | None = None) -> float:
        """Seconds until a hidden message becomes visible; infinite if none is hidden.

        name: only of this queue.
        """
        now = self.clock.wall()
        queues = self.queues.values() if name is None else (self._queue(name),)
        times = (message.visible_at for queue in queues for message in queue.messages.values())
        return min((at - now for at in times if at > now), default=inf)

    # -- queues ------------------------------------------------------------------------------

    def create(self, name: str, metadata: Mapping[str, str]) -> None:
        """Create a queue; one that exists must have the same metadata."""
        found = self.queues.setdefault(name, StoredQueue(dict(metadata)))
        if found.metadata != dict(metadata):
            raise Refused(409, "QueueAlreadyExists")

    def delete_queue(self, name: str) -> None:
        """Delete a queue with its messages."""
        self._queue(name)
        del self.queues[name]

    def set_metadata(self, name: str, metadata: Mapping[str, str]) -> None:
        """Replace a queue's metadata."""
        self._queue(name).metadata = dict(metadata)

    def listed(self, prefix: str = "") -> list[tuple[str, dict[str, str]]]:
        """Names and metadata of all queues, sorted."""
        names = sorted(name for name in self.queues if name.startswith(prefix))
        return [(name, dict(self.queues[name].metadata)) for name in names]

    def count(self, name: str) -> int:
        """How many messages a queue has, hidden ones too."""
        queue, now = self._queue(name), self.clock.wall()
        return sum(each.expires_at > now for each in queue.messages.values())

    def clear(self, name: str) -> None:
        """Delete all messages of a queue."""
        queue = self._queue(name)
        queue.messages.clear()
        queue.heap.clear()

    def _queue(self, name: str) -> StoredQueue:
        if name not in self.queues:
            raise Refused(404, "QueueNotFound", "The specified queue does not exist.")
        return self.queues[name]

    # -- messages ----------------------------------------------------------------------------

    def put(self, name: str, text: str, delay: int, time_to_live: float = -1) -> None:
        """Store a message that is visible after `delay` seconds. time_to_live: -1: no end."""
        _check_text(text)
        _check_hidden(delay, 0)
        queue, now = self._queue(name), self.clock.wall()
        ends = inf if time_to_live < 0 else now + time_to_live
        message = StoredText(next(self._numbers), text, now, now, ends)
        queue.messages[message.name] = message
        queue.show_at(message, now + delay)

    def receive(self, name: str, limit: int, hidden: int) -> list[Received]:
        """Hide up to `limit` visible messages for `hidden` seconds, with new receipts."""
        if not 1 <= limit <= RECEIVE_LIMIT:
            raise Refused(400, "OutOfRangeQueryParameterValue", "numofmessages")
        _check_hidden(hidden, 1)
        queue, now = self._queue(name), self.clock.wall()
        taken = list(islice(queue.visible(now), limit))
        for message in taken:
            message.count += 1
            message.receipts += 1
            queue.show_at(message, now + hidden)
        return [_received(each) for each in taken]

    def update(self, name: str, message: str, receipt: str, delay: int, text: str | None) -> str:
        """Hide a message for `delay` seconds, perhaps with a new text; returns its new receipt."""
        if text is not None:
            _check_text(text)
        _check_hidden(delay, 0)
        queue, found = self._held(name, message, receipt)
        if text is not None:
            found.text = text
        found.receipts += 1
        queue.show_at(found, self.clock.wall() + delay)
        return found.receipt

    def delete(self, name: str, message: str, receipt: str) -> None:
        """Delete a message."""
        queue, found = self._held(name, message, receipt)
        del queue.messages[found.name]

    def peek(self, name: str, limit: int) -> list[Received]:
        """The first visible messages, as they are."""
        queue, now = self._queue(name), self.clock.wall()
        seen = list(islice(queue.visible(now), limit))
        for message in seen:
            heapq.heappush(queue.heap, (message.visible_at, message.number))
        return [_received(each) for each in seen]

    def _held(self, name: str, message: str, receipt: str) -> tuple[StoredQueue, StoredText]:
        queue = self._queue(name)
        found = queue.living(queue.messages.get(message), self.clock.wall())
        if found is None:
            raise Refused(404, "MessageNotFound", "The specified message does not exist.")
        if found.receipt != receipt:
            raise Refused(400, "PopReceiptMismatch", "The pop receipt does not match.")
        return queue, found


MOST_BYTES: Final = TEXT_LIMIT


def _check_text(text: str) -> None:
    if len(text) > MOST_BYTES and len(text.encode()) > MOST_BYTES:
        raise Refused(413, "RequestBodyTooLarge")


def _check_hidden(seconds: int, least: int) -> None:
    if not least <= seconds <= LONGEST_DELAY:
        raise Refused(400, "OutOfRangeQueryParameterValue", "visibilitytimeout")


def _received(message: StoredText) -> Received:
    return Received(
        message.name, message.receipt, message.count, float(int(message.put_at)), message.text
    )
