"""Holders of unique tasks in Azure Tables.

The partition ``u-SHARD`` has two rows for each holder, changed in one transaction: ``k-KEY`` is the
holder, and ``d-TIME-KEY`` marks when housekeeping looks at it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, cast

from azure.core import MatchConditions
from azure.data.tables import UpdateMode

from aztask.results.damage import Columns, Damaged
from aztask.results.tables.client import TableRequests, TimeBudget
from aztask.results.tables.errors import AlreadyExists, OutcomeUnknown, RowConflict, RowNotFound
from aztask.results.tables.names import SHARDS, key_text, shard_of
from aztask.results.uniques import Holder

_TOP: Final = 10**14 - 1


class TablesUniques:
    """The implementation of `aztask.results.uniques.UniqueStore` in a table."""

    def __init__(self, requests: TableRequests, now: Callable[[], float]) -> None:
        """`now`: gives the service's time in UTC epoch seconds."""
        self._requests = requests
        self._now = now

    def now(self) -> float:
        """The service's time, UTC epoch seconds."""
        return self._now()

    def read(self, key: str) -> Holder | None:
        """The holder of a key; None if it is free."""
        entity = self._requests.read(TimeBudget(), _partition(key), _row(key))
        return None if entity is None else _holder(entity)

    def write(self, key: str, data: bytes, due: float, before: Holder | None) -> Holder | None:
        """Make a holder, or replace the one that was read, and move its mark."""
        call, partition = TimeBudget(), _partition(key)
        row = {
            "PartitionKey": partition,
            "RowKey": _row(key),
            "key": key,
            "due": float(due),
            "data": data,
        }
        changes: list[tuple[Any, ...]] = [("create", row)]
        if before is not None:
            changes = [("update", row, {"mode": UpdateMode.REPLACE, **_unchanged(before)})]
        if before is None or _mark(before.due, key) != _mark(due, key):
            mark = {"PartitionKey": partition, "RowKey": _mark(due, key), "key": key}
            changes.append(("upsert", mark))
            if before is not None:
                old = {"PartitionKey": partition, "RowKey": _mark(before.due, key)}
                changes.append(("delete", old))
        try:
            tag = str(self._requests.together(call, changes)[0]["etag"])
        except (RowConflict, RowNotFound, AlreadyExists):
            return None
        except OutcomeUnknown:
            found = self._requests.read(call, partition, _row(key))
            return _holder(found) if found is not None and found.get("data") == data else None
        return Holder(key, data, due, tag)

    def release(self, holder: Holder) -> bool:
        """Free the key, if this is still its holder, with its mark."""
        partition = _partition(holder.key)
        row = {"PartitionKey": partition, "RowKey": _row(holder.key)}
        mark = {"PartitionKey": partition, "RowKey": _mark(holder.due, holder.key)}
        try:
            changes = [("delete", row, _unchanged(holder)), ("delete", mark)]
            self._requests.together(TimeBudget(), changes)
        except (RowConflict, RowNotFound):
            return False
        except OutcomeUnknown as lost:
            raise lost.error from lost
        return True

    def due(self, before: float, limit: int) -> list[Holder]:
        """Holders that are due before a time: a query for each shard, and a read for each mark."""

        def page(call: TimeBudget, shard: int) -> list[dict[str, Any]]:
            values = {"shard": f"u-{shard}", "first": "d-", "last": f"d-{_milliseconds(before)}"}
            text = "PartitionKey eq @shard and RowKey ge @first and RowKey lt @last"
            return self._requests.query(call, text, values, limit)

        call = TimeBudget()
        marks = [row for rows in self._requests.each(call, page, range(SHARDS)) for row in rows]
        marks.sort(key=lambda row: str(row["RowKey"]))
        keys = [row["key"] for row in marks[:limit] if isinstance(row.get("key"), str)]
        found = [self.read(key) for key in keys]
        return [holder for holder in found if holder is not None and holder.due < before]


def _partition(key: str) -> str:
    return f"u-{shard_of(key_text(key))}"


def _row(key: str) -> str:
    return f"k-{key_text(key)}"


def _mark(due: float, key: str) -> str:
    return f"d-{_milliseconds(due)}-{key_text(key)}"


def _milliseconds(at: float) -> str:
    return f"{min(max(0, round(at * 1000)), _TOP):014d}"


def _unchanged(holder: Holder) -> dict[str, Any]:
    return {"etag": holder.tag, "match_condition": MatchConditions.IfNotModified}


def _holder(entity: Mapping[str, Any]) -> Holder:
    columns = Columns(entity)
    tag = str(cast("Any", entity).metadata["etag"])
    try:
        return Holder(columns.text("key"), columns.data("data") or b"", columns.time("due"), tag)
    except Damaged:
        return Holder(str(entity.get("key")), b"", 0.0, tag)
