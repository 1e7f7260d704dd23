"""The embedded queue engine on SQLite; see `aztask.queues.engine.engine`."""

from aztask.queues.engine.database import IN_MEMORY, Database, Durability
from aztask.queues.engine.engine import Engine
from aztask.queues.engine.messages import (
    DELIVERIES_EXCEEDED,
    DUPLICATE,
    TIME_TO_LIVE_EXPIRED,
    Counts,
    Leased,
    NewMessage,
    PeekedMessage,
    QueueSettings,
    SessionLease,
)
from aztask.queues.engine.watch import Waiter, Watch

__all__ = [
    "Database",
    "Durability",
    "IN_MEMORY",
    "Engine",
    "QueueSettings",
    "NewMessage",
    "Leased",
    "PeekedMessage",
    "Counts",
    "SessionLease",
    "DUPLICATE",
    "DELIVERIES_EXCEEDED",
    "TIME_TO_LIVE_EXPIRED",
    "Waiter",
    "Watch",
]
