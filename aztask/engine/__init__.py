"""The embedded queue engine on SQLite; see `aztask.engine.engine`."""

from aztask.engine.database import IN_MEMORY, Database, Durability
from aztask.engine.engine import Engine
from aztask.engine.messages import (
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
from aztask.engine.watch import Waiter, Watch

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
