"""A table as a store of rows of all kinds, with the service's clock; see `aztask.stores.rows`."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from threading import Lock
from typing import Any, Final, cast

from aztask.errors import BrokerUnavailable
from aztask.stores.layout import key_text, number_key
from aztask.stores.rows import Change, Kind, Place, Row, StoreTime
from aztask.stores.tables.client import TableRequests, TimeBudget
from aztask.stores.tables.errors import AlreadyExists, OutcomeUnknown, RowNotFound
from aztask.stores.tables.rows import TablesRows, packed, unpacked
from aztask.support import chance
from aztask.support.clock import Clock

# -- clock -----------------------------------------------------------------------------------
#
# The table service's clock, learned from the ``Date`` of its answers.
#
# Rules
# 1. The time is a lower bound. The service writes ``Date`` in whole seconds, rounded down, before
#    the answer is received. So ``Date`` plus the time since the answer came is never ahead of the
#    service, and the largest such sum of the last answers is the best one.
# 2. Only the clock of the deadlines measures the time since an answer: the wall clock of this
#    machine may be wrong and may jump.


SAMPLES: Final = 32
SAMPLE_SECONDS: Final = 900.0
"""How long an answer counts: clocks drift by less than 0.1 s in this time."""

FRESH_SECONDS: Final = 300.0
_ROW: Final = ("w", "-")
"""The row that is read for the answer alone: no worker has this name."""


class ServiceClock:
    """The time of a service. Any thread may call."""

    def __init__(self, requests: TableRequests, clock: Clock) -> None:
        """clock: this machine's; only its clock of the deadlines counts."""
        self._requests = requests
        self._clock = clock
        self._samples: deque[tuple[float, float]] = deque(maxlen=SAMPLES)
        self._lock = Lock()

    def now(self) -> float:
        """The service's time, UTC epoch seconds. Asks the service if no answer is fresh.

        Raises BrokerUnavailable, and LookupError for an answer without a time.
        """
        with self._lock:
            newest = self._samples[-1][0] if self._samples else None
        if newest is None or self._clock.monotonic() - newest > FRESH_SECONDS:
            self.learn()
        now = self._clock.monotonic()
        with self._lock:
            ahead = [
                date - received
                for received, date in self._samples
                if now - received <= SAMPLE_SECONDS
            ]
        return now + max(ahead)

    def learn(self) -> None:
        """Ask the service for its time."""
        date = self._requests.date(TimeBudget(), *_ROW)
        received = self._clock.monotonic()
        if date is None:
            raise LookupError("the table service's answer has no Date header")
        with self._lock:
            self._samples.append((received, parsedate_to_datetime(date).timestamp()))


# -- store -----------------------------------------------------------------------------------


# -- Rows with numbers over Azure Tables; see `aztask.stores.rows.Kind.number`.
#
# A row is ``n-NUMBER``, so rows of a partition are in the order of their numbers. In the same
# partition, ``k-KEY`` has the number. Both are written and deleted together.
#
# Numbers are nanoseconds of the writer's clock. If the clocks of two machines differ, a row that is
# made while you page through the partition may get a number that you have passed.

TRIES: Final = 5
_MARK: Final = "k-"
_NUMBER: Final = re.compile(r"[0-9]{20}")


class NumberedRows(TablesRows):
    """The rows of one kind with numbers in a table."""

    def __init__(self, requests: TableRequests, clock: Clock, kind: Kind) -> None:
        super().__init__(requests, clock, kind)
        self._clock = clock

    def _read(self, call: TimeBudget, place: Place) -> Row | None:
        number = self._number(call, place)
        entity = self._requests.read(call, self._keys(place)[0], number) if number else None
        return self._row(place, entity) if entity else None

    def _number(self, call: TimeBudget, place: Place) -> str | None:
        """The row key of this place; "" if its mark is damaged, None if there is none."""
        entity = self._requests.read(call, self._keys(place)[0], _mark_of(place))
        if entity is None:
            return None
        row = str(entity.get(self._kind.number))
        return row if _number_in(row, self._layout.row) is not None else ""

    def _key_in(self, entity: Mapping[str, Any]) -> str:
        """The key of a row; "" if it is damaged."""
        key = unpacked(entity.get(self._layout.key))
        return key if isinstance(key, str) else ""

    def _row(self, place: Place, entity: Mapping[str, Any]) -> Row:
        row = super()._row(place, entity)
        number = _number_in(entity["RowKey"], self._layout.row)
        return row._replace(values={**row.values, self._kind.number: number})

    def _change(self, call: TimeBudget, changes: Sequence[Change]) -> list[Row] | None:
        (change,) = changes
        place, _, before, _ = change
        if before is None:
            return self._make(call, change)
        number = before.values[self._kind.number]
        row = "" if number is None else f"{self._layout.row}{number_key(number)}"
        return [before] if self._delete(call, place, row) else None

    def _make(self, call: TimeBudget, change: Change) -> list[Row] | None:
        """Make a row. If the process dies here, both of its rows exist or neither."""
        place, values, doubtful = change.place, change.values or {}, False
        self._kind.check(place, values)
        entity = self._entity(place, values)
        known = {
            name: each for name, each in self._place(place).items() if name != self._layout.key
        }
        for _ in range(TRIES):
            if (there := self._number(call, place)) is not None:
                number = _number_in(there, self._layout.row)
                change = change._replace(values={**values, self._kind.number: number})
                return self._made(call, [change]) if doubtful else None
            # Rows that are made in one microsecond are in any order.
            at = int(self._clock.wall() * 1e6) * 1000 + chance.below(1000)
            row = f"{self._layout.row}{number_key(at)}"
            mark = {**known, "RowKey": _mark_of(place), self._kind.number: row}
            noted = {**entity, "RowKey": row, self._layout.key: packed(place.key)}
            try:
                self._requests.together(call, [("create", mark), ("create", noted)])
            except AlreadyExists:
                continue  # another writer made it first, or another row has this number
            except OutcomeUnknown:
                doubtful = True
                continue
            return [Row(place, values, "")]
        raise call.unavailable(self._requests.place)

    def _remove(self, call: TimeBudget, place: Place) -> None:
        number = self._number(call, place)
        if number is not None:
            self._delete(call, place, number)

    def _delete(self, call: TimeBudget, place: Place, row: str) -> bool:
        """Delete both rows of a place, in one request if both exist; false if none did.

        A key or a number that is damaged is "".
        """
        rows = [each for each in (_mark_of(place) if place.key else "", row) if each]
        partition, _ = self._keys(place)
        try:
            self._requests.together(
                call, [("delete", {"PartitionKey": partition, "RowKey": each}) for each in rows]
            )
        except (RowNotFound, OutcomeUnknown) as error:
            # One of them is gone, or both are, by a request whose answer was lost.
            gone = [self._requests.delete(call, partition, each) for each in rows]
            return any(gone) or isinstance(error, OutcomeUnknown)
        return True


def _mark_of(place: Place) -> str:
    return f"{_MARK}{key_text(place.key)}"


def _number_in(row_key: str, beginning: str) -> int | None:
    """The number in the row key of a row; None if another program made it."""
    text = row_key.removeprefix(beginning)
    return int(text) if row_key.startswith(beginning) and _NUMBER.fullmatch(text) else None


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
