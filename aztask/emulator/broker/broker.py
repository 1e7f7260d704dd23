"""The one object that all parts of the broker share, and the locks that it keeps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from aztask.emulator.broker.access import Access
from aztask.emulator.broker.dispatch import Committer, DeliveryDispatcher
from aztask.emulator.broker.forwarding import Forwarder
from aztask.emulator.broker.namespace import Namespace
from aztask.emulator.faults import NO_FAULTS, Faults
from aztask.queues.engine import Engine
from aztask.support.clock import Clock

# -- Locks -----------------------------------------------------------------------------------------
#
# Their tokens, and the message that each one locks.
#
# Rules
# 1. A lock token is the engine's lease token as a uuid. Only this process knows which message it
#    locks, so lock tokens do not survive a restart.
# 2. Tokens of expired locks are forgotten in sweeps. The engine alone decides whether a lock is
#    lost.

_SWEEP_EVERY = 20_000  # new tokens between two sweeps


class Lock(NamedTuple):
    """The lock of one message.

    queue: the engine's name of the queue. dead: the message is in the dead letters. seq: the
    sequence number. token: hexadecimal. until: the expiry, by the lease clock.
    """

    queue: str
    dead: bool
    seq: int
    token: str
    session: str | None
    until: float


class Locks:
    """All locks of the namespace, by token (hexadecimal)."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._locks: dict[str, Lock] = {}
        self._added = 0

    def __len__(self) -> int:
        return len(self._locks)

    def add(self, lock: Lock) -> None:
        """Remember the lock of a delivered message."""
        self._locks[lock.token] = lock
        self._added += 1
        if self._added > _SWEEP_EVERY:
            self._sweep()

    def get(self, token: str) -> Lock | None:
        """Return the lock of a token, or None if the token is unknown."""
        return self._locks.get(token)

    def renewed(self, token: str, until: float) -> None:
        """Set a new expiry, by the lease clock; an unknown token is ignored."""
        lock = self._locks.get(token)
        if lock is not None:
            self._locks[token] = lock._replace(until=until)

    def discard(self, token: str) -> None:
        """Forget a lock whose message was settled."""
        self._locks.pop(token, None)

    def _sweep(self) -> None:
        """Forget expired locks.

        The messages of a session are locked as long as the session is, whose renewals are not
        noted here. Their locks are kept for one more hour.
        """
        self._added = 0
        now = self._monotonic()
        kept = {
            key: lock
            for key, lock in self._locks.items()
            if lock.until + (3600.0 if lock.session is not None else 0.0) > now
        }
        self._locks = kept


# -- What is shared --------------------------------------------------------------------------------


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
    faults: Faults = NO_FAULTS

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
