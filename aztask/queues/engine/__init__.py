"""The embedded queue engine on SQLite; see `aztask.queues.engine.engine`."""

from aztask.queues.engine.database import IN_MEMORY, Database, Durability
from aztask.queues.engine.engine import Engine
from aztask.queues.engine.messages import (
    DELIVERIES_EXCEEDED,
    DUPLICATE,
    FIRST_SEQ,
    PARTITIONS,
    TIME_TO_LIVE_EXPIRED,
    Counts,
    Leased,
    NewMessage,
    PeekedMessage,
    SessionLease,
    StoredSettings,
    number_of,
)
from aztask.queues.engine.watch import Waiter, WakeUp, Watch

__all__ = [
    "DELIVERIES_EXCEEDED",
    "DUPLICATE",
    "FIRST_SEQ",
    "IN_MEMORY",
    "PARTITIONS",
    "TIME_TO_LIVE_EXPIRED",
    "Counts",
    "Database",
    "Durability",
    "Engine",
    "Leased",
    "NewMessage",
    "PeekedMessage",
    "SessionLease",
    "StoredSettings",
    "Waiter",
    "WakeUp",
    "Watch",
    "number_of",
]
