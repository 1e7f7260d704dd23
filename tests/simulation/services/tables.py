"""The table service: what it keeps, and what it does with each request.

Rules of the service
1. A row is named by its partition and its key within it. Every write gives it a new tag (ETag),
   also one that changes nothing. A conditional write with another tag is refused.
2. A transaction changes up to 100 rows of one partition, each once, all or none.
3. A property has at most 64 KiB, a row 1 MiB and 252 properties. A property that is None is not
   stored.
4. An answer has at most 1,000 rows, in the order of their keys; it says where the next one begins.

Source: the service's REST reference ("Understanding the Table service data model", "Performing
entity group transactions", "Query timeout and pagination"), and Azurite.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum
from typing import Any, Final
from uuid import UUID

from azure.data.tables import EdmType, EntityProperty

from aztask.support.clock import Clock

from .tablefilter import Filter
from .wire import Refused

Values = dict[str, Any]

PAGE: Final = 1000
TOGETHER: Final = 100
PROPERTY_BYTES: Final = 64 * 1024
ROW_BYTES: Final = 1024 * 1024
TRANSACTION_BYTES: Final = 4 * 1024 * 1024
PROPERTIES: Final = 252
ANY_TAG: Final = "*"

_KEYS: Final = ("PartitionKey", "RowKey")
_FORBIDDEN: Final = re.compile(r"[/\\#?\x00-\x1f\x7f-\x9f]")
_PLAIN: Final = frozenset({str, bytes, bool, float})
"""The types of most properties, which are kept as they are."""
_WHOLE: Final = 2**31
_LONG: Final = 2**63


@dataclass(frozen=True, slots=True)
class StoredRow:
    """A row as the service keeps it: all properties with both keys, its tag, when it was written.

    A write makes another one.
    """

    values: Values
    tag: str
    at: float

    def get(self, name: str) -> Any:
        """A property as a filter sees it: an Int64 is a number, and the last write has a time."""
        found = self.values.get(name)
        if found is None:
            return written_at(self) if name == "Timestamp" else None
        return found.value if type(found) is EntityProperty else found


@dataclass(slots=True)
class StoredTable:
    """Rows by partition and key, each sorted."""

    partitions: list[str] = field(default_factory=list)
    rows: dict[str, dict[str, StoredRow]] = field(default_factory=dict)
    keys: dict[str, list[str]] = field(default_factory=dict)

    def get(self, partition: str, row: str) -> StoredRow | None:
        """A row; None if it does not exist."""
        return self.rows.get(partition, {}).get(row)

    def set(self, partition: str, row: str, stored: StoredRow) -> None:
        """Keep a row."""
        rows = self.rows.get(partition)
        if rows is None:
            rows = self.rows[partition] = {}
            self.keys[partition] = []
            insort(self.partitions, partition)
        if row not in rows:
            insort(self.keys[partition], row)
        rows[row] = stored

    def remove(self, partition: str, row: str) -> None:
        """Remove a row that exists."""
        del self.rows[partition][row]
        keys = self.keys[partition]
        del keys[bisect_left(keys, row)]
        if not keys:
            del self.rows[partition], self.keys[partition]
            del self.partitions[bisect_left(self.partitions, partition)]

    def has_between(self, least: str, greatest: str | None) -> bool:
        """Whether there is a partition from the first to the second."""
        if least == greatest:
            return least in self.rows
        at = bisect_left(self.partitions, least)
        return at < len(self.partitions) and (greatest is None or self.partitions[at] <= greatest)

    def between(
        self, partitions: tuple[str, str | None], rows: tuple[str, str | None], after: Any
    ) -> Iterator[StoredRow]:
        """Rows whose keys are from the first to the second of each pair, in order."""
        if after is not None:
            partitions = (max(partitions[0], after[0]), partitions[1])
        for partition in _between(self.partitions, *partitions):
            least = rows[0]
            if after is not None and partition == after[0]:
                least = max(least, after[1])
            stored = self.rows[partition]
            for key in _between(self.keys[partition], least, rows[1]):
                yield stored[key]

    def __iter__(self) -> Iterator[StoredRow]:
        return iter(list(self.between(("", None), ("", None), None)))

    def __len__(self) -> int:
        return sum(map(len, self.rows.values()))


def _between(keys: list[str], least: str, greatest: str | None) -> Iterator[str]:
    """The keys in between, both included; they must not change meanwhile.

    One key, as in most filters, is looked up. The others are not copied: an answer has a page.
    """
    start = bisect_left(keys, least)
    if least == greatest:
        found = keys[start : start + 1]
        return iter(found if found == [least] else ())
    end = len(keys) if greatest is None else bisect_right(keys, greatest, start)
    return (keys[at] for at in range(start, end))


class Action(Enum):
    """What a change does to its row."""

    CREATE = "create"
    REPLACE = "replace"
    MERGE = "merge"
    PUT = "put"
    PUT_MERGED = "put merged"
    DELETE = "delete"


@dataclass(frozen=True, slots=True)
class RowChange:
    """One change.

    * `tag`: the row must have it; ANY_TAG: it must exist. A row is put in either case.
    """

    action: Action
    values: Mapping[str, Any]
    tag: str = ANY_TAG

    @property
    def keys(self) -> tuple[str, str]:
        """The row's partition and key."""
        return self.values["PartitionKey"], self.values["RowKey"]


class Tables:
    """All tables of one account.

    * `tables`: what it keeps, by the names of the tables.
    * `page`: the most rows that one request looks at. A real service gives up after five seconds.
    """

    def __init__(self, clock: Clock, page: int = PAGE) -> None:
        """clock: the service's."""
        self.clock = clock
        self.page = page
        self.tables: dict[str, StoredTable] = {}
        self._tags = 0

    def create(self, table: str) -> None:
        """Create a table."""
        if table in self.tables:
            raise Refused(409, "TableAlreadyExists")
        self.tables[table] = StoredTable()

    def get(self, table: str, partition: str, row: str) -> StoredRow:
        """One row."""
        found = self._table(table).get(partition, row)
        if found is None:
            raise Refused(404, "ResourceNotFound")
        return found

    def query(
        self, table: str, condition: Filter, parameters: Mapping[str, Any], limit: int, after: Any
    ) -> tuple[list[StoredRow], tuple[str, str] | None]:
        """Up to `limit` rows from `after` on, and where the rest begins; None if that was all."""
        stored = self._table(table)
        partitions = condition.range_of("PartitionKey", parameters)
        found: list[StoredRow] = []
        if not stored.has_between(*partitions):  # as for most looks at what is old
            return found, None
        keys = condition.range_of("RowKey", parameters)
        passes, limit = condition.test(parameters), min(limit, PAGE)
        for looked_at, each in enumerate(stored.between(partitions, keys, after)):
            if looked_at >= self.page or len(found) >= limit:
                return found, (each.values["PartitionKey"], each.values["RowKey"])
            if passes(each):
                found.append(each)
        return found, None

    def change(self, table: str, change: RowChange) -> str:
        """Make one change; returns the row's new tag, or "" if it was deleted."""
        stored = self._table(table)
        made = self._made(stored, change)
        self._keep(stored, [(change, made)])
        return "" if made is None else made.tag

    def together(self, table: str, changes: Sequence[RowChange]) -> list[str]:
        """Make all changes or none; returns the tags."""
        stored = self._table(table)
        if not 0 < len(changes) <= TOGETHER:
            raise Refused(400, "InvalidInput", "the number of operations")
        places = {change.keys for change in changes}
        if len({partition for partition, _ in places}) > 1:
            raise Refused(400, "CommandsInBatchActOnDifferentPartitions")
        if len(places) < len(changes):
            raise Refused(400, "InvalidDuplicateRow")
        made = [(change, self._made(stored, change)) for change in changes]
        if sum(_bytes_of(row.values) for _, row in made if row is not None) > TRANSACTION_BYTES:
            raise Refused(413, "RequestBodyTooLarge")
        self._keep(stored, made)
        return ["" if row is None else row.tag for _, row in made]

    def touch(self, table: str, places: Iterable[tuple[str, str]]) -> None:
        """Write these rows again as they are: another writer, whose values are the same."""
        stored = self._table(table)
        for place in places:
            if (found := stored.get(*place)) is not None:
                stored.set(*place, StoredRow(found.values, self._tag(), self.clock.wall()))

    def _table(self, name: str) -> StoredTable:
        if name not in self.tables:
            raise Refused(404, "TableNotFound")
        return self.tables[name]

    def _made(self, table: StoredTable, change: RowChange) -> StoredRow | None:
        """The row after this change, which is not kept yet; None if it is deleted."""
        before = table.get(*change.keys)
        if change.action is Action.CREATE:
            if before is not None:
                raise Refused(409, "EntityAlreadyExists")
        elif change.action not in (Action.PUT, Action.PUT_MERGED):
            if before is None:
                raise Refused(404, "ResourceNotFound")
            if change.tag not in (ANY_TAG, before.tag):
                raise Refused(412, "UpdateConditionNotSatisfied")
        if change.action is Action.DELETE:
            return None
        values = _stored(change.values)
        if change.action in (Action.MERGE, Action.PUT_MERGED) and before is not None:
            values = {**before.values, **values}
        _check(values)
        return StoredRow(values, self._tag(), self.clock.wall())

    def _keep(self, table: StoredTable, made: Iterable[tuple[RowChange, StoredRow | None]]) -> None:
        for change, row in made:
            if row is None:
                table.remove(*change.keys)
            else:
                table.set(*change.keys, row)

    def _tag(self) -> str:
        self._tags += 1
        return f'W/"{self._tags}"'


def written_at(row: StoredRow) -> datetime:
    """When the service wrote the row last."""
    return datetime.fromtimestamp(row.at, UTC)


# -- what a row may hold -------------------------------------------------------------------------


def _stored(values: Mapping[str, Any]) -> Values:
    """The properties that are kept: what the SDK sends, and gives back from the answer."""
    kept: Values = {}
    for name, value in values.items():
        if type(value) in _PLAIN:
            kept[name] = value
            continue
        known = value.value if isinstance(value, Enum) else value
        if isinstance(known, EntityProperty):
            known = _long(known)
        elif isinstance(known, int) and not -_WHOLE <= known < _WHOLE:
            raise TypeError(f"{known} is too large to be cast to type Edm.Int32")
        elif known is not None and not isinstance(
            known, str | bytes | bool | int | float | datetime | UUID
        ):
            raise TypeError(f"{type(known).__name__} cannot be a property")
        if known is not None:
            kept[name] = known
    return kept


def _long(value: EntityProperty) -> Any:
    if value.edm_type is not EdmType.INT64:
        return value.value
    if not -_LONG <= int(value.value) < _LONG:
        raise TypeError(f"{value.value} is too large to be cast to type Edm.Int64")
    return EntityProperty(int(value.value), EdmType.INT64)


def _check(values: Values) -> None:
    for name in _KEYS:
        key = values[name]
        if _FORBIDDEN.search(key):
            raise Refused(400, "OutOfRangeInput", f"{name} has a character that is not allowed")
        if _bytes_of_value(key) > 1024:
            raise Refused(400, "KeyValueTooLarge")
    if len(values) > PROPERTIES + len(_KEYS):
        raise Refused(400, "TooManyProperties")
    size = _bytes_of(values)
    # No property of a row is larger than the row, and most rows are small.
    if size > PROPERTY_BYTES and any(
        _bytes_of_value(value) > PROPERTY_BYTES for value in values.values()
    ):
        raise Refused(400, "PropertyValueTooLarge")
    if size > ROW_BYTES:
        raise Refused(400, "EntityTooLarge")


def _bytes_of(values: Values) -> int:
    """As the service counts: names and texts as UTF-16."""
    return sum(8 + 2 * len(name) + _bytes_of_value(value) for name, value in values.items())


def _bytes_of_value(value: Any) -> int:
    if isinstance(value, str):
        return 2 * len(value)
    return len(value) if isinstance(value, bytes) else 8
