"""The one object that all parts of the broker share."""

from __future__ import annotations

from dataclasses import dataclass

from aztask.emulator.broker.access import Access
from aztask.emulator.broker.dispatch import Committer, DeliveryDispatcher
from aztask.emulator.broker.forwarding import Forwarder
from aztask.emulator.broker.locks import Locks
from aztask.emulator.broker.namespace import Namespace
from aztask.queues.engine import Engine
from aztask.support.clock import Clock


@dataclass(frozen=True, slots=True)
class Service:
    """The store and everything around it that does not belong to one connection."""

    engine: Engine
    namespace: Namespace
    committer: Committer
    dispatcher: DeliveryDispatcher
    forwarder: Forwarder
    locks: Locks
    access: Access
    clock: Clock

    def queue_changed(self, queue: str, dead: bool = False) -> None:
        """Check for deliveries at the end of this turn, because messages of a queue changed.

        dead: the dead letters changed. A change of the queue itself may also add dead letters, so
        their receivers are always checked.
        """
        self.dispatcher.queue_changed(queue, dead)
        self.dispatcher.queue_changed(queue, True)
        self.forwarder.queues_changed()

    def lock_token_offset(self) -> float:
        """Return the seconds to add to a time of the lease clock to get UTC epoch seconds."""
        return self.clock.wall() - self.clock.monotonic()
