"""How long recorded steps are kept: as long as the task's results, and as long as its dead letter.

Rules
1. The steps of a task stay while the result store knows one of its runs: a parked or waiting run,
   too.
2. Afterwards they stay while a dead letter of the task exists, which may be replayed at any time.
   Where the service does not show all of its dead letters, they stay.
3. Payloads of removed steps are removed with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Final

from aztask.errors import AztaskError, QueueNotFound
from aztask.message.payload import names_in
from aztask.queues.base import Broker
from aztask.steps.records import StepStore
from aztask.stores.payloads.payloads import Payloads
from aztask.stores.payloads.store import belongs
from aztask.stores.records.base import ResultStore
from aztask.stores.rows import Row

PAGE: Final = 500
PURGED: Final = 10_000


class StepPurge:
    """Removes the steps of tasks that can no longer run. For one purge."""

    def __init__(
        self, store: StepStore, results: ResultStore, broker: Broker, payloads: Payloads | None
    ) -> None:
        self._store = store
        self._results = results
        self._broker = broker
        self._payloads = payloads
        self._dead: dict[str, frozenset[str] | None] = {}

    def purge(self, before: float) -> int:
        """Remove what was last written before a time; returns how many rows, at most some thousand.

        Raises BrokerUnavailable.
        """
        removed = 0
        for task_id, rows in self._tasks(before):
            if not self._needed(task_id, rows):
                removed += self._store.remove(rows)
                if self._payloads is not None:
                    found = (name for row in rows for name in _payloads_in(row))
                    self._payloads.discard(name for name in found if belongs(name, task_id))
            if removed >= PURGED:
                break
        return removed

    def _tasks(self, before: float) -> Iterator[tuple[str, list[Row]]]:
        by_task = groupby(self._store.old(before), key=lambda row: row.place.partition)
        return ((task_id, list(rows)) for task_id, rows in by_task)

    def _needed(self, task_id: str, rows: Iterable[Row]) -> bool:
        try:
            if self._results.get(task_id) is not None:
                return True
        except AztaskError:  # another owner uses the id, or its row is damaged
            return True
        for queue in {record.queue for record in self._store.opened(rows)}:
            dead = self._dead_in(queue)
            if dead is None or task_id in dead:
                return True
        return False

    def _dead_in(self, queue: str) -> frozenset[str] | None:
        """The ids of the queue's dead letters; None if the service does not show all of them."""
        if queue not in self._dead:
            self._dead[queue] = self._read(queue)
        return self._dead[queue]

    def _read(self, queue: str) -> frozenset[str] | None:
        ids: set[str] = set()
        try:
            found, count = self._broker.peek(queue, dead_letter=True, limit=PAGE), 0
            while found:
                count += len(found)
                ids.update(str(each.envelope.headers.get("id")) for each in found)
                if not self._broker.capabilities.paged_peek:
                    break
                after = found[-1].position
                found = self._broker.peek(queue, dead_letter=True, after=after, limit=PAGE)
            shown = self._broker.capabilities.paged_peek
            dead = 0 if shown else self._broker.stats(queue).dead or 0
        except QueueNotFound:
            return frozenset()
        return frozenset(ids) if count >= dead else None


def _payloads_in(row: Row) -> Iterable[str]:
    data = row.values["data"]
    return names_in(data) if isinstance(data, bytes) else ()
