"""A pointer that was received: the message that called for a deferred one."""

from __future__ import annotations

from dataclasses import dataclass

from aztask.brokers.delivery import Delivery
from aztask.lease.state import Lease


@dataclass(frozen=True, slots=True)
class Pointer:
    """Held beside the deferred message, under a lease of its own, until that is settled."""

    delivery: Delivery
    lease: Lease
