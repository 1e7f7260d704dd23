"""Schedules in Azure Tables: the partition ``s-SCHEDULE`` has the head and the occurrences.

Row keys: ``h`` is the head. ``o-...`` is an occurrence; its time counts down, so that the newest
come first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from azure.core import MatchConditions
from azure.data.tables import UpdateMode

from aztask.results.damage import Columns, Damaged
from aztask.results.schedules import COMMITTED, Head, Kept, Occurrence
from aztask.results.tables.client import TableRequests, TimeBudget
from aztask.results.tables.clock import ServiceClock
from aztask.results.tables.errors import AlreadyExists, OutcomeUnknown, RowConflict, RowNotFound
from aztask.results.tables.names import WORKERS, key_text
from aztask.support.clock import Clock

HEAD: Final = "h"
SCHEDULES: Final = 100_000
PRUNED: Final = 99
_TOP: Final = 10**14 - 1
_DIGITS: Final = 14
_ALL: Final = {"first": "s-", "last": "s."}
_RANGE: Final = "PartitionKey ge @first and PartitionKey lt @last"


class TablesSchedules:
    """The implementation of `aztask.results.schedules.ScheduleStore` in a table."""

    def __init__(self, requests: TableRequests, clock: Clock) -> None:
        self._requests = requests
        self._clock = ServiceClock(
            clock.monotonic, lambda: requests.date(TimeBudget(), WORKERS, "-")
        )

    def now(self) -> float:
        """The service's time, see `ServiceClock`."""
        return self._clock.now()

    def any(self) -> bool:
        """True if there is a schedule."""
        return bool(self._requests.query(TimeBudget(), _RANGE, _ALL, 1, ("PartitionKey", "RowKey")))

    def overview(self) -> list[Kept]:
        """All schedules in one query, which skips closed occurrences."""
        self._clock.learn()
        text = f"{_RANGE} and (RowKey eq @head or open eq true)"
        values = {**_ALL, "head": HEAD}
        rows = self._requests.query(TimeBudget(), text, values, SCHEDULES)
        partitions: dict[str, list[dict[str, Any]]] = {}
        for row in rows:
            partitions.setdefault(row["PartitionKey"], []).append(row)
        found = [_kept(each) for each in partitions.values()]
        return [each for each in found if each is not None]

    def read(self, schedule: str) -> Kept | None:
        """One schedule with its open occurrences."""
        text = "PartitionKey eq @schedule and (RowKey eq @head or open eq true)"
        values = {"schedule": _partition(schedule), "head": HEAD}
        return _kept(self._requests.query(TimeBudget(), text, values, SCHEDULES))

    def newest(self, schedule: str, limit: int, until: str = "") -> list[Occurrence]:
        """The newest occurrences, the newest first."""
        text = "PartitionKey eq @schedule and RowKey ge @first and RowKey lt @last"
        values = {
            "schedule": _partition(schedule),
            "first": _row(until)[: 2 + _DIGITS] if until else "o-",
            "last": "o.",
        }
        rows = self._requests.query(TimeBudget(), text, values, limit)
        return [_occurrence(row) for row in rows if not until or _key(row) <= until]

    def commit(
        self,
        schedule: str,
        data: bytes,
        tag: str | None,
        made: Sequence[Occurrence] = (),
        changed: Sequence[Occurrence] = (),
    ) -> str | None:
        """Replace the head, make occurrences and change others, in one transaction."""
        call, partition = TimeBudget(), _partition(schedule)
        head = {"PartitionKey": partition, "RowKey": HEAD, "schedule": schedule, "data": data}
        for _ in range(2):
            changes = [_head_change(head, tag), *(("create", _row_of(partition, o)) for o in made)]
            changes += [
                ("update", _row_of(partition, each), {"mode": UpdateMode.REPLACE})
                for each in changed
            ]
            try:
                return str(self._requests.together(call, changes)[0]["etag"])
            except (RowConflict, RowNotFound):
                return None
            except OutcomeUnknown:
                found = self._requests.read(call, partition, HEAD)
                same = found is not None and found.get("data") == data
                return _etag(found) if found is not None and same else None
            except AlreadyExists:
                if tag is None:
                    return None
                made = [
                    each
                    for each in made
                    if self._requests.read(call, partition, _row(each.key)) is None
                ]
        return None

    def close_occurrence(self, schedule: str, key: str, data: bytes) -> bool:
        """Close an occurrence, with new data. False also if the answer is lost."""
        row = _row_of(_partition(schedule), Occurrence(key, data, False))
        return self._requests.merge(TimeBudget(), row, "*")

    def prune(self, schedule: str, keep: int) -> int:
        """Delete closed occurrences behind the newest, at most `PRUNED` of them."""
        call, partition = TimeBudget(), _partition(schedule)
        rows = self._requests.query(
            call,
            "PartitionKey eq @schedule and RowKey ge @first and RowKey lt @last",
            {"schedule": partition, "first": "o-", "last": "o."},
            keep + PRUNED,
            ("PartitionKey", "RowKey", "open"),
        )
        old = [row["RowKey"] for row in rows[keep:] if not row.get("open")]
        return sum(
            self._requests.each(call, lambda call, key: self._drop(call, partition, key), old)
        )

    def _drop(self, call: TimeBudget, partition: str, row: str) -> bool:
        return self._requests.delete(call, partition, row)

    def delete(self, schedule: str) -> bool:
        """Delete a schedule, its head first. If the process dies in between, delete it again."""
        call, partition = TimeBudget(), _partition(schedule)
        there = self._requests.delete(call, partition, HEAD)
        rows = self._requests.query(
            call,
            "PartitionKey eq @schedule and RowKey ge @first",
            {"schedule": partition, "first": "o-"},
            SCHEDULES,
            ("PartitionKey", "RowKey"),
        )
        keys = [row["RowKey"] for row in rows]
        self._requests.each(call, lambda call, key: self._drop(call, partition, key), keys)
        return there


assert COMMITTED < PRUNED  # noqa: S101  # one transaction has at most 100 rows


def _partition(schedule: str) -> str:
    return f"s-{key_text(schedule)}"


def _row(key: str) -> str:
    return f"o-{_TOP - int(key[:_DIGITS]):0{_DIGITS}d}{key[_DIGITS:]}"


def _key(row: Mapping[str, Any]) -> str:
    text = str(row["RowKey"])[2:]
    return f"{_TOP - int(text[:_DIGITS]):0{_DIGITS}d}{text[_DIGITS:]}"


def _row_of(partition: str, occurrence: Occurrence) -> dict[str, Any]:
    return {
        "PartitionKey": partition,
        "RowKey": _row(occurrence.key),
        "open": occurrence.open,
        "data": occurrence.data,
    }


def _head_change(head: dict[str, Any], tag: str | None) -> tuple[Any, ...]:
    if tag is None:
        return ("create", head)
    options = {
        "mode": UpdateMode.REPLACE,
        "etag": tag,
        "match_condition": MatchConditions.IfNotModified,
    }
    return ("update", head, options)


def _kept(rows: Sequence[dict[str, Any]]) -> Kept | None:
    """The schedule in the rows of its partition; None if its head is missing."""
    head = next((row for row in rows if row["RowKey"] == HEAD), None)
    if head is None:
        return None
    waiting = [_occurrence(row) for row in rows if row is not head]
    waiting.sort(key=lambda each: each.key)
    schedule = head.get("schedule")
    name = schedule if isinstance(schedule, str) else ""
    return Kept(Head(name, _data(head), _etag(head)), tuple(waiting))


def _occurrence(row: Mapping[str, Any]) -> Occurrence:
    return Occurrence(_key(row), _data(row), bool(row.get("open")))


def _data(row: Mapping[str, Any]) -> bytes:
    """The row's bytes; b"" counts as damaged."""
    try:
        return Columns(row).data("data") or b""
    except Damaged:
        return b""


def _etag(entity: Mapping[str, Any]) -> str:
    return str(cast("Any", entity).metadata["etag"])
