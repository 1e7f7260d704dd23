"""The queues of the service while the number of a queue's shards changes.

A move creates the new shards (`ShardMoves.declare`), is announced in the layout
(`aztask.stores.shardlayouts`), and ends when the former shards are empty (`ShardMoves.end`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from aztask.address.shards import ShardLayout, shard_name
from aztask.errors import ConfigurationError, QueueNotFound
from aztask.queues.base import Broker, QueueOptions
from aztask.queues.sharded.addresses import AddressBroker
from aztask.queues.sharded.layouts import ShardLayouts
from aztask.support import clock

REST_NUMBER: Final = 10.0
"""After a look at the former shards, no other one for so many times as long."""


class ShardMoves:
    """Begins and ends moves at the service. Any thread may call.

    Shards are asked one after the other: this is done some times in a move.
    """

    def __init__(self, broker: Broker, layouts: ShardLayouts) -> None:
        """broker: the one below, whose queues are the shards."""
        self._broker = broker
        self.layouts = layouts
        self._rests_until: dict[str, float] = {}

    def declare(self, queue: str, move: ShardLayout, options: QueueOptions) -> None:
        """Create the shards of this move, if they are missing, before messages are sent to them."""
        for number in move.sent.numbers:
            broker = self._broker
            if isinstance(broker, AddressBroker):  # which goes by the layout before the move
                broker = broker.homes[move.home(number, self.layouts.addresses)].broker
            broker.declare(shard_name(queue, number), options)

    def messages(self, queue: str, numbers: Iterable[int]) -> int:
        """How many messages these shards hold, also leased, delayed and deferred ones."""
        found = 0
        for number in numbers:
            try:
                found += self._broker.stats(shard_name(queue, number)).living
            except QueueNotFound:
                continue
        return found

    def existing(self, queue: str, numbers: Iterable[int]) -> list[str]:
        """The names of those of these shards that exist. Shard 0 is the queue itself, and none."""
        known = set(self._broker.listing().queues)
        names = [shard_name(queue, number) for number in numbers if number]
        return [name for name in names if name in known]

    def end(self, queue: str) -> bool:
        """End the move that is under way, if it is time for that and its former shards are empty.

        True if it did. Raises BrokerUnavailable. Crash window: if the process dies in between, the
        move goes on, and the next look ends it.
        """
        began = clock.monotonic()
        if began < self._rests_until.get(queue, 0.0):
            return False
        layout = self.layouts.unfinished(queue)
        if layout is None:
            return False
        try:
            if any(self._holds(queue, number) for number in layout.leaving()):
                return False
            self.layouts.finish(queue, layout.epoch, self._kept(queue, layout))
        finally:
            # A thread that receives does this: the most of its time is for messages.
            ended = clock.monotonic()
            self._rests_until[queue] = ended + REST_NUMBER * (ended - began)
        return True

    def _holds(self, queue: str, number: int) -> bool:
        """Whether a shard holds a message, in whatever state.

        A service that pages its peeks shows a message in every state, and one at every moment: the
        clone of a retry is there before its original is completed. Its counts are quicker, but may
        be late. Another service counts its messages, and never too few of them.
        """
        name = shard_name(queue, number)
        peeks = self._broker.capabilities.paged_peek
        try:
            if self._broker.stats(name).living:
                return True
        except QueueNotFound:
            return False
        except ConfigurationError:  # a worker may not be allowed to count
            if not peeks:
                raise
        return peeks and bool(self._broker.peek(name, limit=1))

    def _kept(self, queue: str, layout: ShardLayout) -> int:
        """The shards below this number may hold dead letters, beside those that are sent to."""
        for number in reversed(range(layout.top)):
            if number not in layout.sent.numbers and self._dead(queue, number):
                return number + 1
        return 0

    def _dead(self, queue: str, number: int) -> bool:
        try:
            return self._broker.stats(shard_name(queue, number)).dead != 0
        except QueueNotFound:
            return False
        except ConfigurationError:  # a worker may not be allowed to count
            return True
