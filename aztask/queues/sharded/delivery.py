"""A delivery of a sharded queue: that of one of its shards, with the name of the whole queue."""

from __future__ import annotations

from aztask.errors import ConfigurationError
from aztask.message.envelope import Envelope
from aztask.queues.delivery import Delivery
from aztask.queues.sharded.positions import outer_position


class ShardDelivery(Delivery):
    """Shows the queue and the position in it; the rest is that of the delivery of the shard.

    `inner`: the delivery of the shard, for its receiver. What a receiver changes is read from it:
    the renewal of one delivery of a session moves the deadlines of the others.
    """

    __slots__ = ("inner", "shard")

    def __init__(self, queue: str, shard: int, inner: Delivery) -> None:
        self.shard, self.inner = shard, inner
        self.queue = queue
        self.position = outer_position(shard, inner.position)
        self.token = inner.token
        self.delivery_count = inner.delivery_count
        self.enqueued_at = inner.enqueued_at
        self.session = inner.session
        self.dead_letter_reason = inner.dead_letter_reason
        self.dead_letter_description = inner.dead_letter_description

    @property
    def envelope(self) -> Envelope:  # type: ignore[override]  # a field of the base
        """The message as it is now."""
        return self.inner.envelope

    @property
    def deadline(self) -> float:  # type: ignore[override]  # a field of the base
        """The end of the lease, on the broker's clock."""
        return self.inner.deadline

    @property
    def lease_seconds(self) -> float:  # type: ignore[override]  # a field of the base
        """The duration that was granted last."""
        return self.inner.lease_seconds


def own_shard(delivery: Delivery) -> ShardDelivery:
    """The delivery, which a sharded queue made. Raises ConfigurationError for another one."""
    if not isinstance(delivery, ShardDelivery):
        raise ConfigurationError("this delivery came from another broker; settle it there")
    return delivery
