"""What the parts of the broker share: one object, made once."""

from __future__ import annotations

from dataclasses import dataclass

from aztask.emulator.broker.access import Access
from aztask.emulator.broker.committer import Committer
from aztask.emulator.broker.dispatch import DeliveryDispatcher
from aztask.emulator.broker.forwarding import Forwarder
from aztask.emulator.broker.locks import Locks
from aztask.emulator.broker.namespace import Namespace
from aztask.engine import Engine
from aztask.support.clock import Clock


@dataclass(frozen=True, slots=True)
class Broker:
    """The store and everything around it that belongs to no single connection."""

    engine: Engine
    namespace: Namespace
    committer: Committer
    dispatcher: DeliveryDispatcher
    forwarder: Forwarder
    locks: Locks
    access: Access
    clock: Clock

    def queue_changed(self, queue: str, dead: bool = False) -> None:
        """Something was stored or given back in a queue (or its dead letters), or left it for
        the dead letters: whoever waits for any of it looks again this turn."""
        self.dispatcher.queue_changed(queue, dead)
        self.dispatcher.queue_changed(queue, True)
        self.forwarder.queues_changed()

    def lock_token_offset(self) -> float:
        """What turns the lease clock into UTC epoch seconds."""
        return self.clock.wall() - self.clock.monotonic()
