"""Control entries in Azure Tables, each in a partition of its own: ``k-NAME``, row ``d``.

The service's clock is read from the time that it stamps on a row of ours, which this process has
just written: the answer to a request names it only to the second.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, cast

from aztask.errors import BrokerUnavailable
from aztask.results.controls import Entry, EntryChange, StoreTime
from aztask.results.damage import Columns, Damaged
from aztask.results.tables.client import TableRequests, TimeBudget
from aztask.results.tables.errors import OutcomeUnknown, RowConflict
from aztask.results.tables.names import key_text
from aztask.support.clock import Clock

ROW: Final = "d"
CLOCK: Final = "clock-"
BATCH: Final = 256
PURGE_SECONDS: Final = 4.0


class TablesControls:
    """The implementation of `aztask.results.controls.ControlStore` in a table."""

    def __init__(self, requests: TableRequests, clock: Clock) -> None:
        self._requests = requests
        self._clock = clock
        self._own_row = f"{CLOCK}{uuid.uuid4().hex}"

    def read(self, names: Sequence[str]) -> list[Entry | None]:
        """The entries with these names, in parallel; None for missing ones."""
        found: list[Entry | None] = []
        for first in range(0, len(names), BATCH):
            part = names[first : first + BATCH]
            found += self._requests.each(TimeBudget(), self._read, part)
        return found

    def _read(self, call: TimeBudget, name: str) -> Entry | None:
        entity = self._requests.read(call, _partition(name), ROW)
        return None if entity is None else _entry(entity)

    def write(self, changes: Sequence[EntryChange]) -> list[str | None]:
        """Make each change, in parallel; each costs one request."""
        tags: list[str | None] = []
        for first in range(0, len(changes), BATCH):
            part = changes[first : first + BATCH]
            tags += self._requests.each(TimeBudget(), self._write, part)
        return tags

    def _write(self, call: TimeBudget, change: EntryChange) -> str | None:
        entity = _entity(change.name, change.data)
        try:
            if change.tag is None:
                return self._requests.insert(call, entity)
            return self._requests.replace(call, entity, change.tag)
        except OutcomeUnknown:
            found = self._read(call, change.name)
            return found.tag if found is not None and found.data == change.data else None

    def time(self) -> StoreTime:
        """Write a row of our own, and read the time that the service stamped on it."""
        call = TimeBudget()
        earliest = self._clock.monotonic()
        self._requests.put(call, _entity(self._own_row, b""))
        latest = self._clock.monotonic()
        entity = self._requests.read(call, _partition(self._own_row), ROW)
        written = None if entity is None else cast("Any", entity).metadata["timestamp"]
        if written is None:
            raise BrokerUnavailable(f"{self._requests.place} did not tell its time; try again")
        return StoreTime(written.timestamp(), earliest, latest)

    def purge(self, prefix: str, before: float) -> int:
        """Delete old entries for some seconds; the next call continues.

        An entry that is written in between is kept (ETag).
        """
        first = f"k-{prefix}"
        values = {
            "first": first,
            "last": f"{first}~",  # "~" comes after every other character of a key
            "written": datetime.fromtimestamp(max(0.0, before), UTC),
        }
        text = "PartitionKey ge @first and PartitionKey lt @last and Timestamp lt @written"
        until = time.monotonic() + PURGE_SECONDS
        deleted, after = 0, None
        while time.monotonic() < until:
            names = ("PartitionKey", "RowKey")
            rows, after = self._requests.page(TimeBudget(), text, values, names, after)
            deleted += sum(self._requests.each(TimeBudget(), self._delete, rows))
            if after is None:
                break
        return deleted

    def _delete(self, call: TimeBudget, row: Mapping[str, Any]) -> bool:
        try:
            return self._requests.delete(call, row["PartitionKey"], row["RowKey"], _etag(row))
        except RowConflict:
            return False


def _partition(name: str) -> str:
    return f"k-{key_text(name)}"


def _entity(name: str, data: bytes) -> dict[str, Any]:
    return {"PartitionKey": _partition(name), "RowKey": ROW, "data": data}


def _entry(entity: Mapping[str, Any]) -> Entry:
    """The entry in a row; with empty data if another program wrote the row."""
    try:
        return Entry(Columns(entity).data("data") or b"", _etag(entity))
    except Damaged:
        return Entry(b"", _etag(entity))


def _etag(entity: Mapping[str, Any]) -> str:
    return str(cast("Any", entity).metadata["etag"])
