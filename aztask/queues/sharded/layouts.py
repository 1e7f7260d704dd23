"""Which shards a queue has now: the port that a `ShardedBroker` asks, and what the code says.

`aztask.stores.shardlayouts` is the other implementation: rows of the result store.
"""

from __future__ import annotations

from typing import Protocol

from aztask.address.shards import (
    ONE_ADDRESS,
    UNSHARDED,
    AddressNames,
    ShardCount,
    ShardCounts,
    ShardLayout,
    ShardRange,
    read_shard_name,
)


class ShardLayouts(Protocol):
    """The layouts of all queues. Any thread may call."""

    addresses: AddressNames
    """Those of the app."""

    def has(self, queue: str) -> bool:
        """True if the queue may have shards, or several addresses. Asks nothing."""
        ...

    def layout(self, queue: str, *, session: bool = False) -> ShardLayout:
        """The layout, as far as it is known here. Raises BrokerUnavailable if none is.

        session: for a receiver of sessions, which must know it for sure.
        """
        ...

    def wish(self, queue: str) -> ShardCount:
        """What the code says. Asks nothing."""
        ...

    def sending(self, queue: str, *, session: bool) -> ShardRange:
        """Where messages are sent now. Raises BrokerUnavailable if that is not known.

        session: some of them have a session, so it must be known for sure.
        """
        ...

    def unfinished(self, queue: str) -> ShardLayout | None:
        """The layout, if its former shards are to be checked for messages now; usually None."""
        ...

    def finish(self, queue: str, epoch: int, kept: int) -> None:
        """End the move of this epoch: the former shards are empty.

        kept: shards below this number may hold dead letters.
        """
        ...


class DeclaredLayouts:
    """The numbers of the code, for apps without a result store: they stay while programs run."""

    def __init__(self, shards: ShardCounts, addresses: AddressNames = ONE_ADDRESS) -> None:
        """shards: of the queues that have some."""
        self._shards = shards
        self.addresses = addresses

    def has(self, queue: str) -> bool:
        """True if the queue has shards; with several addresses, so has every queue."""
        return bool(self.wish(queue)) or (self.addresses.several and not read_shard_name(queue)[1])

    def layout(self, queue: str, *, session: bool = False) -> ShardLayout:
        """The layout of the code."""
        return ShardLayout.declared(self.wish(queue), self.addresses)

    def wish(self, queue: str) -> ShardCount:
        """The numbers that the code names."""
        return self._shards.get(queue, UNSHARDED)

    def sending(self, queue: str, *, session: bool) -> ShardRange:
        """The shards of the code."""
        return ShardRange(0, self.wish(queue).sent)

    def unfinished(self, queue: str) -> ShardLayout | None:
        """None: the code says until when former shards are read."""
        return None

    def finish(self, queue: str, epoch: int, kept: int) -> None:
        """Changes nothing: there is no move."""
