"""A table as a store of rows of all kinds; see `aztask.stores.rows`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, cast

from aztask.errors import BrokerUnavailable
from aztask.stores.rows import Kind, StoreTime
from aztask.stores.tables.client import TableRequests, TimeBudget
from aztask.stores.tables.clock import ServiceClock
from aztask.stores.tables.numbered import NumberedRows
from aztask.stores.tables.rows import TablesRows
from aztask.support import chance
from aztask.support.clock import Clock

_CLOCK: Final = "k-clock-"
"""The partitions of rows for `TablesStore.time`, which are purged as old control entries."""


class TablesStore:
    """The implementation of `aztask.stores.rows.RowStore` in a table."""

    remote = True

    def __init__(self, requests: TableRequests, clock: Clock) -> None:
        self.requests = requests
        self.clock = clock
        self.service_clock = ServiceClock(requests, clock)
        self._own_partition = f"{_CLOCK}{chance.token()}"

    def of(self, kind: Kind) -> TablesRows:
        """The rows of one kind."""
        rows = NumberedRows if kind.number else TablesRows
        return rows(self.requests, self.clock, kind)

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Each call stands alone: a service has no transaction of several calls."""
        yield

    def now(self) -> float:
        """The service's time, see `ServiceClock`."""
        return self.service_clock.now()

    def time(self) -> StoreTime:
        """Write a row of our own, and read the time that the service stamped on it.

        The answer to a request names the time only to the second.
        """
        call = TimeBudget()
        earliest = self.clock.monotonic()
        place = {"PartitionKey": self._own_partition, "RowKey": "d"}
        self.requests.put(call, {**place, "data": b""})
        latest = self.clock.monotonic()
        entity = self.requests.read(call, self._own_partition, "d")
        written = None if entity is None else cast("Any", entity).metadata["timestamp"]
        if written is None:
            raise BrokerUnavailable(f"{self.requests.place} did not tell its time; try again")
        return StoreTime(written.timestamp(), earliest, latest)
