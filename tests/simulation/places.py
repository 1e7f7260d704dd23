"""Where the messages and the rows of an app are: a file, or modelled services.

Each is made once for an app, and opened by every actor as a process would.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from aztask.address.owner import Owner
from aztask.address.shards import MOST_SHARDS, ShardCount, shard_names
from aztask.queues.engine import Database
from aztask.queues.local.broker import LocalBroker
from aztask.queues.sharded.broker import sharded
from aztask.queues.sharded.positions import STRIDE
from aztask.stores.records.local.store import LocalResults
from aztask.stores.shardlayouts import StoredLayouts

from .services import (
    Blobs,
    Line,
    ServiceBus,
    StorageQueues,
    Tables,
    Wire,
    service_bus_broker,
    storage_queue_broker,
    tables_results,
)

if TYPE_CHECKING:
    from .actors import Actor


SHARDED: Final = ("default", "steps")
"""The queues that have shards in some courses."""

_BOX: Final = "box = (SELECT id FROM queues WHERE name = :queue)"
_NEXT: Final = f"""
    SELECT
        (SELECT min(moment) FROM messages WHERE {_BOX} AND state = 1 AND moment > :now),
        (SELECT min(moment) FROM messages WHERE {_BOX} AND state = 2 AND moment > :wall),
        (SELECT min(until) FROM sessions WHERE {_BOX} AND until > :now)
"""


class Site(Protocol):
    """The place of one app."""

    label: str
    remote: bool

    def open(self, actor: Actor) -> tuple[Any, Any]:
        """The broker and the result store of one actor."""

    @property
    def owner(self) -> str | None:
        """What `App(owner=...)` says; None if the broker has a name of its own."""

    def locked(self) -> bool:
        """Whether a transaction is open."""

    def tell(self, fact: Callable[[], None]) -> None:
        """Call `fact` now, or when the open transaction is committed."""

    def next_due(self, now: float, soon: float, wall: float) -> float:
        """When the next message can be received; soon: if one could be received already.

        * `now`: on the clock of the deadlines; `wall`: what the wall clock is ahead of that.
        """

    def next_change(self, queue: str, now: float, wall: float) -> float:
        """When a message of this queue, of which none can be received now, can be; `next_due`."""

    def living(self) -> float:
        """How many messages wait or are held; infinite where none expires by itself."""

    def has(self, queue: str, position: Any) -> bool:
        """Whether a message is there, or among the dead letters."""

    def close(self) -> None:
        """The end of the world."""


def memory_file(number: int) -> Database:
    """A file in memory, whose id is the same in every run: ids of tasks are made from it."""
    made = Database(":memory:")
    made.file_id()
    made.change("UPDATE file SET id = ?", (f"{number:032x}",))
    return made


@dataclass
class LocalSite:
    """Two files, or one."""

    label: str
    queues: Database
    rows: Database
    shards: int = 0
    remote = False
    owner = None

    def open(self, actor: Actor) -> tuple[Any, Any]:
        """The broker and the result store of one actor."""
        broker: Any = LocalBroker(self.queues, clock=actor.world.clock)
        owner = Owner(broker.identity, self.label)
        results = LocalResults(self.rows, clock=actor.world.clock, owner=owner)
        count = actor.world.course.shards
        if count:
            shards = {name: ShardCount(count, count, declared=True) for name in SHARDED}
            layouts = StoredLayouts(shards)
            layouts.attach(results.controls)
            broker = sharded(broker, shards, layouts, clock=actor.world.clock)
        return broker, results

    def locked(self) -> bool:
        """Whether a transaction is open."""
        return self.queues.in_transaction() or self.rows.in_transaction()

    def tell(self, fact: Callable[[], None]) -> None:
        """Call `fact` now, or when the open transaction is committed."""
        for database in (self.queues, self.rows):
            if database.in_transaction():
                database.at_end(lambda committed: fact() if committed else None)
                return
        fact()

    def next_due(self, now: float, soon: float, wall: float) -> float:
        """When the next message can be received."""
        with self.queues.read() as connection:
            rows = connection.execute(
                "SELECT state, min(coalesce(moment, 0)) FROM messages "
                "WHERE box > 0 AND state < 3 GROUP BY state"
            ).fetchall()
        due = math.inf
        for state, moment in rows:
            at = soon if state == 0 else moment if state == 1 else moment - wall
            due = min(due, at if at > now else soon)
        return due

    def next_change(self, queue: str, now: float, wall: float) -> float:
        """When a message of this queue, of which none can be received now, can be."""
        names = shard_names(queue, MOST_SHARDS) if queue in SHARDED else (queue,)
        return min(self._next_change(name, now, wall) for name in names)

    def _next_change(self, queue: str, now: float, wall: float) -> float:
        with self.queues.read() as connection:
            rows = connection.execute(_NEXT, {"queue": queue, "now": now, "wall": now + wall})
            ((leased, scheduled, session),) = rows.fetchall()
        times = (leased, scheduled - wall if scheduled is not None else None, session)
        return min((at for at in times if at is not None), default=math.inf)

    def living(self) -> float:
        """Workers find what has expired as they receive it."""
        return math.inf

    def has(self, queue: str, position: Any) -> bool:
        """Whether a message is there."""
        with self.queues.read() as connection:
            sql = "SELECT 1 FROM messages WHERE seq = ?"
            number = int(position) // STRIDE if self.shards and queue in SHARDED else int(position)
            return bool(connection.execute(sql, (number,)).fetchall())

    def close(self) -> None:
        """Close the files."""
        self.queues.close()
        self.rows.close()


@dataclass
class ServiceSite:
    """An account of Azure: Storage queues or a Service Bus namespace, and tables.

    The tables may be those of other apps, too.
    """

    label: str
    queues: StorageQueues | ServiceBus
    tables: Tables
    blobs: Blobs
    wire: Wire
    remote = True

    @property
    def owner(self) -> str:
        """The name of its account."""
        return f"account-of-{self.label}"

    def open(self, actor: Actor) -> tuple[Any, Any]:
        """The broker and the result store of one actor."""
        line: Line = self.wire.line(actor.name, actor.world.clock)
        if isinstance(self.queues, ServiceBus):
            broker: Any = service_bus_broker(self.queues, line)
        else:
            broker = storage_queue_broker(self.queues, line)
        owner = Owner(self.owner, self.label)
        return broker, tables_results(self.tables, self.blobs, line, owner=owner)

    def locked(self) -> bool:
        """There are no transactions."""
        return False

    def tell(self, fact: Callable[[], None]) -> None:
        """There are no transactions."""
        fact()

    def next_due(self, now: float, soon: float, wall: float) -> float:
        """When the next message can be received."""
        due = now + self.queues.until_change()
        return min(due, soon) if self._has_messages() else due

    def _has_messages(self) -> bool:
        if isinstance(self.queues, ServiceBus):
            return any(each.living.can_be_received() for each in self.queues.queues.values())
        wall = self.queues.clock.wall()
        return any(
            message.visible_at <= wall
            for name, queue in self.queues.queues.items()
            if not name.endswith("-poison")
            for message in queue.messages.values()
        )

    def next_change(self, queue: str, now: float, wall: float) -> float:
        """When a message of this queue, of which none can be received now, can be."""
        return now + self.queues.until_change(queue)

    def living(self) -> float:
        """How many messages wait or are held; infinite in Storage queues."""
        if not isinstance(self.queues, ServiceBus):
            return math.inf
        return sum(len(each.living.messages) for each in self.queues.queues.values())

    def has(self, queue: str, position: Any) -> bool:
        """Whether a message is there, or among the dead letters."""
        if isinstance(self.queues, ServiceBus):
            found = self.queues.queues[queue]
            return int(position) in found.living.messages or int(position) in found.dead.messages
        return str(position) in self.queues.queues[queue].messages

    def close(self) -> None:
        """Nothing is open."""
