"""The port of rows over Azure Tables; see `aztask.stores.rows`.

A row is an entity, and its tag is the entity's ETag. A row with a due time has a mark in the same
partition, ``d-TIME-KEY``, which changes with it in one transaction.

If the answer to a change is lost, the change is made again. If that finds a conflict, the row is
read: it has the values of this change if the first request was carried out. A request that arrives
late finds another ETag, or an existing row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, cast

import msgpack
from azure.core import MatchConditions
from azure.data.tables import UpdateMode

from aztask.address.owner import NO_OWNER, Owner
from aztask.errors import EncodeError
from aztask.stores.layout import due_key
from aztask.stores.rows import Change, Kind, Place, Row, Values
from aztask.stores.tables.client import PAGE, PAUSES, TableRequests, TimeBudget
from aztask.stores.tables.errors import AlreadyExists, OutcomeUnknown, RowConflict, RowNotFound
from aztask.support.clock import Clock, sleep

BATCH: Final = 256
"""The most requests of one `TimeBudget`."""

PROPERTY_BYTES: Final = 60 * 1024
"""A property holds 64 KiB."""

ROW_BYTES: Final = 900 * 1024
"""A row holds 1 MiB, its keys and the names of its properties included."""

_CONFLICTS: Final = (RowConflict, RowNotFound, AlreadyExists)
_LATEST: Final = datetime.max.replace(tzinfo=UTC).timestamp() - 86400.0


class TablesRows:
    """The rows of one kind in a table."""

    def __init__(self, requests: TableRequests, clock: Clock, kind: Kind) -> None:
        self._requests = requests
        self._kind = kind
        self._layout = kind.tables
        self._strays = UnownedRows(requests, kind.tables.unowned, clock)

    # -- reading -----------------------------------------------------------------------------

    def get(self, places: Sequence[Place]) -> list[Row | None]:
        """The rows at these places, in parallel."""
        return self._each(self._get, places)

    def _get(self, call: TimeBudget, place: Place) -> Row | None:
        found = self._read(call, place)
        if found is None and self._kind.inherits and place.owner.known:
            return self._stray(call, place)
        return found

    def _read(self, call: TimeBudget, place: Place) -> Row | None:
        entity = self._requests.read(call, *self._keys(place))
        return None if entity is None else self._row(place, entity)

    def _stray(self, call: TimeBudget, place: Place) -> Row | None:
        """The row without an owner in this place; usual calls do not look for it."""
        if not self._strays.may_exist():
            return None
        found = self._read(call, place._replace(owner=NO_OWNER))
        if found is not None:
            self._strays.seen()
        return found

    def may_be_unowned(self) -> bool:
        """True if rows without an owner may exist; see `UnownedRows`."""
        return self._strays.may_exist()

    def range(
        self,
        owner: Owner,
        partition: str,
        first: str = "",
        last: str = "",
        limit: int = 1000,
        *,
        short: bool = False,
    ) -> list[Row]:
        """Rows of one partition: one query, or one for each shard."""
        layout, row = self._layout, self._layout.row
        end = f"{row}{last}" if last else _after(row)
        names = None
        if short:
            names = [each for each in self._kind.columns if each != self._kind.long]
            names += ["PartitionKey", "RowKey", *layout.packed, *filter(None, [layout.key])]

        def ask(call: TimeBudget, key: str) -> list[dict[str, Any]]:
            text = "PartitionKey eq @partition and RowKey ge @first and RowKey lt @last"
            values = {"partition": key, "first": f"{row}{first}", "last": end}
            return self._requests.query(call, text, values, limit, names)

        pages = self._each(ask, list(layout.partitions(owner, partition)))
        return [self._found(owner, each, partition) for page in pages for each in page][:limit]

    def due(self, owner: Owner, before: float, limit: int) -> list[Place]:
        """Places of rows that are due: a query for each shard."""

        def ask(call: TimeBudget, key: str) -> list[dict[str, Any]]:
            text = "PartitionKey eq @partition and RowKey ge @first and RowKey lt @last"
            values = {"partition": key, "first": "d-", "last": due_key(before)}
            return self._requests.query(call, text, values, limit)

        pages = self._each(ask, list(self._layout.partitions(owner, "")))
        marks = sorted((each for page in pages for each in page), key=lambda row: row["RowKey"])
        keys = [mark.get(self._layout.key) for mark in marks]
        return [Place(owner, "", key) for key in keys if isinstance(key, str)][:limit]

    def of_owner(
        self, owner: Owner, prefix: str = "", written_before: float | None = None
    ) -> Iterable[Row]:
        """All rows of an owner, one request for each page."""
        beginning = f"{self._layout.beginning(owner)}{prefix}"
        text = (
            "PartitionKey ge @first and PartitionKey lt @last and RowKey ge @row and RowKey lt @end"
        )
        values: dict[str, Any] = {
            "first": beginning,
            # "~" comes behind every other character of a key; "." behind "-".
            "last": f"{beginning}~" if prefix else f"{beginning[:-1]}.",
            "row": self._layout.row,
            "end": _after(self._layout.row),
        }
        if written_before is not None:
            text += " and Timestamp lt @written"
            at = datetime.fromtimestamp(max(0.0, min(written_before, _LATEST)), UTC)
            values["written"] = at
        after: Any = None
        while True:
            rows, after = self._requests.page(TimeBudget(), text, values, None, after)
            yield from (self._found(owner, each) for each in rows)
            if after is None:
                return

    def owners(self) -> set[Owner]:
        """Whose rows are in the table: one request for each owner."""
        found = owners_in(self._requests, self._layout.owned)
        return found | {NO_OWNER} if self._strays.exist() else found

    # -- changes -----------------------------------------------------------------------------

    def write(self, change: Change) -> Row | None:
        """Make, replace or delete one row."""
        return self._write(TimeBudget(), change)

    def write_all(self, changes: Sequence[Change]) -> list[Row | None]:
        """Make each change, in parallel."""
        return self._each(self._write, changes)

    def together(self, changes: Sequence[Change]) -> list[Row] | None:
        """Make all changes or none, in one request."""
        self._kind.check_together(changes)
        return self._change(TimeBudget(), changes)

    def put(self, place: Place, values: Values) -> None:
        """Write a row, whatever is there."""
        self._kind.check(place, values)
        self._requests.put(TimeBudget(), self._entity(place, values))

    def merge(self, place: Place, values: Values) -> bool:
        """Set these values and keep the others."""
        self._kind.check(place, values)
        return self._requests.add(TimeBudget(), self._entity(place, values))

    def remove(self, places: Sequence[Place]) -> None:
        """Delete the rows at these places, in parallel."""
        self._each(self._remove, places)

    def _remove(self, call: TimeBudget, place: Place) -> None:
        self._requests.delete(call, *self._keys(place))

    def _write(self, call: TimeBudget, change: Change) -> Row | None:
        made = self._change(call, (change,))
        return None if made is None else made[0]

    def _change(self, call: TimeBudget, changes: Sequence[Change]) -> list[Row] | None:
        """Make all changes of one partition or none; again if the answer is lost."""
        if any(self._in_the_way(call, change) for change in changes):
            return None
        prepared = [self._prepared(change) for change in changes]
        steps = [step for each in prepared for step in each]
        doubtful = False
        while True:
            try:
                tags = self._request(call, steps)
            except _CONFLICTS:
                return self._made(call, changes) if doubtful else None
            except OutcomeUnknown as lost:
                doubtful = True
                if call.remaining <= PAUSES[0]:
                    raise call.stop(lost.error) from lost
                sleep(PAUSES[0])
                continue
            made, at = [], 0
            for change, each in zip(changes, prepared, strict=True):
                made.append(_after_change(change, tags[at]))
                at += len(each)
            return made

    def _in_the_way(self, call: TimeBudget, change: Change) -> bool:
        """True if a new row would be made beside one without an owner."""
        if change.before is not None or change.beside or not self._kind.inherits:
            return False
        return change.place.owner.known and self._stray(call, change.place) is not None

    def _request(self, call: TimeBudget, steps: Sequence[tuple[Any, ...]]) -> list[str]:
        """Carry out the steps; returns the tag for each. A single one needs no transaction."""
        if len(steps) > 1:
            return [str(each.get("etag", "")) for each in self._requests.together(call, steps)]
        what, entity, *options = steps[0]
        if what == "create":
            tag = self._requests.insert(call, entity)
        elif what == "update":
            tag = self._requests.replace(call, entity, options[0]["etag"])
        else:
            keys = (entity["PartitionKey"], entity["RowKey"])
            gone = self._requests.delete(call, *keys, options[0]["etag"], again=False)
            tag = "" if gone else None
        if tag is None:
            raise RowConflict
        return [tag]

    def _made(self, call: TimeBudget, changes: Sequence[Change]) -> list[Row] | None:
        """The rows after these changes if the store has them; None if another writer has won."""
        made = []
        for change in changes:
            found = self._read(call, change.place)
            if change.values is None:
                same = found is None
            else:
                wanted = {name: each for name, each in change.values.items() if each is not None}
                kept = {} if found is None else found.values
                same = wanted == {name: each for name, each in kept.items() if each is not None}
            if not same:
                return None
            made.append(_after_change(change, "" if found is None else found.tag))
        return made

    def _prepared(self, change: Change) -> list[tuple[Any, ...]]:
        """The steps of one change: its row first, then its mark."""
        place, values, before, _ = change
        if values is not None:
            self._kind.check(place, values)
        known: dict[str, Any] = {}
        if before is not None:
            known = {"etag": before.tag, "match_condition": MatchConditions.IfNotModified}
        mark = None if values is None else self._mark(place, values)
        old = None if before is None else self._mark(place, before.values)
        if values is None:
            partition, row = self._keys(place)
            steps: list[tuple[Any, ...]] = [
                ("delete", {"PartitionKey": partition, "RowKey": row}, known)
            ]
        elif before is None:
            steps = [("create", self._entity(place, values))]
        else:
            steps = [("update", self._entity(place, values), {"mode": UpdateMode.REPLACE, **known})]
        if mark != old:
            steps += [("upsert", mark)] if mark is not None else []
            steps += [("delete", _place_of(old))] if old is not None else []
        return steps

    # -- entities ----------------------------------------------------------------------------

    def _keys(self, place: Place) -> tuple[str, str]:
        layout = self._layout
        return layout.partition(*place), layout.row_key(place.key)

    def _place(self, place: Place) -> dict[str, Any]:
        """The properties that say where a row is, and whose."""
        partition, row = self._keys(place)
        entity: dict[str, Any] = {"PartitionKey": partition, "RowKey": row}
        if self._layout.key:
            entity[self._layout.key] = place.key
        if place.owner.known:
            entity["broker"] = place.owner.broker
            if self._kind.sql.app:
                entity["app"] = place.owner.app
        return entity

    def _mark(self, place: Place, values: Values) -> dict[str, Any] | None:
        """The mark of a row with a due time."""
        if not self._kind.due:
            return None
        due = values[self._kind.due]
        at = float(due) if isinstance(due, int | float) else 0.0
        return {**self._place(place), "RowKey": due_key(at, place.key)}

    def _entity(self, place: Place, values: Values) -> dict[str, Any]:
        """The row. Raises EncodeError if it does not fit."""
        entity, size = self._place(place), 0
        kept = dict(values)
        for name, columns in self._layout.packed.items():
            kept[name] = packed([kept.pop(each) for each in columns])
        for name, value in kept.items():
            held = _bytes_of(value)
            size += held
            if name == self._kind.long and value is not None:
                entity |= _parts(name, value)
            elif held > PROPERTY_BYTES:
                raise EncodeError(f"{name} has {held} bytes, too many for {self._requests.place}")
            elif value is not None:
                number = self._kind.columns.get(name) is float and isinstance(value, int)
                entity[name] = float(value) if number else value
        if size > ROW_BYTES:
            raise EncodeError(f"{size} bytes are too many for a row of {self._requests.place}")
        return entity

    def _found(self, owner: Owner, entity: Mapping[str, Any], partition: str = "") -> Row:
        """The row of an entity that a query gave."""
        known = partition or self._layout.partition_in(owner, entity["PartitionKey"])
        return self._row(Place(owner, known, self._key_in(entity)), entity)

    def _key_in(self, entity: Mapping[str, Any]) -> str:
        key = entity.get(self._layout.key) if self._layout.key else None
        return key if isinstance(key, str) else self._layout.key_in(entity["RowKey"])

    def _row(self, place: Place, entity: Mapping[str, Any]) -> Row:
        values = {name: entity.get(name) for name in self._kind.columns}
        if self._kind.long:
            values[self._kind.long] = _joined(self._kind.long, entity)
        for name, columns in self._layout.packed.items():
            packed = unpacked(entity.get(name))
            if isinstance(packed, list) and len(packed) == len(columns):
                values.update(zip(columns, packed, strict=True))
        return Row(place, values, str(cast("Any", entity).metadata["etag"]))

    def _each(self, work: Any, items: Sequence[Any]) -> list[Any]:
        """`work` of each item, in parallel, as many at once as one time budget is for."""
        found: list[Any] = []
        for first in range(0, len(items), BATCH):
            found += self._requests.each(TimeBudget(), work, items[first : first + BATCH])
        return found


def _after_change(change: Change, tag: str) -> Row:
    if change.values is None:
        return cast("Row", change.before)
    return Row(change.place, change.values, tag)


def _after(row: str) -> str:
    """What comes behind all row keys that begin with this."""
    return f"{row[:-1]}{chr(ord(row[-1]) + 1)}"


def _place_of(entity: Mapping[str, Any]) -> dict[str, Any]:
    return {name: entity[name] for name in ("PartitionKey", "RowKey")}


def _bytes_of(value: object) -> int:
    """The bytes that a property takes: two for each UTF-16 unit of a text."""
    if isinstance(value, str):
        return len(value.encode("utf-16-le"))
    return len(value) if isinstance(value, bytes) else 8


def packed(value: object) -> bytes:
    """The texts of a property as bytes."""
    made: bytes = msgpack.packb(value)
    return made


def unpacked(data: object) -> object:
    """What `packed` packed; None if it is anything else."""
    try:
        return msgpack.unpackb(data, unicode_errors="surrogatepass")
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError):
        return None


def _parts(name: str, value: bytes) -> dict[str, Any]:
    """A long value in as many properties as it needs: ``NAME0``, ``NAME1`` ..."""
    parts = [
        value[first : first + PROPERTY_BYTES] for first in range(0, len(value), PROPERTY_BYTES)
    ]
    return {"parts": len(parts), **{f"{name}{index}": each for index, each in enumerate(parts)}}


def _joined(name: str, entity: Mapping[str, Any]) -> object:
    """The long value of a row; None if its parts are not what `_parts` writes."""
    count = entity.get("parts")
    if not isinstance(count, int) or not 0 <= count < PAGE:
        return None
    parts = [entity.get(f"{name}{index}") for index in range(count)]
    return b"".join(parts) if all(isinstance(each, bytes) for each in parts) else None  # type: ignore[arg-type]


# -- Owners in the table ---------------------------------------------------------------------------
#
# Where rows with an owner are, and which owners have some. The partitions of rows with an owner
# begin with a capital letter and the owner's mark, such as ``U-MARK-SHARD`` for ``u-SHARD``: the
# release before reads none of them. Each row has the owner's broker and app as properties, too,
# since a mark cannot be read back.


LOOK_SECONDS: Final = 60.0
"""Seconds between two looks for rows without an owner."""

MIXED_SECONDS: Final = 600.0
"""Seconds after the last one was seen for which all keys are looked up in both places."""

_MOST_OWNERS: Final = 1000
_NAMES: Final = ("PartitionKey", "RowKey")


class UnownedRows:
    """Remembers whether rows without an owner may exist, so that usual calls do not look for them.

    At most one request a minute. So rows of a former release are noticed within a minute of the
    first one; from then on they are noticed at once, until none was seen for ten minutes.
    """

    def __init__(self, requests: TableRequests, unowned: str, clock: Clock) -> None:
        """`unowned`: how the partitions of such rows begin, before the ``-``."""
        self._requests = requests
        self._unowned = unowned
        self._clock = clock
        self._look_at: float | None = None
        self._until = 0.0

    def may_exist(self) -> bool:
        """True if there may be some. Raises BrokerUnavailable."""
        now = self._clock.monotonic()
        if self._look_at is None or now >= self._look_at:
            if self.exist():
                self.seen()
            self._look_at = now + LOOK_SECONDS
        return now < self._until

    def exist(self) -> bool:
        """True if there is one now: one request."""
        return exists(self._requests, f"{self._unowned}-", f"{self._unowned}.")

    def seen(self) -> None:
        """Note that there is one."""
        self._until = self._clock.monotonic() + MIXED_SECONDS


def exists(requests: TableRequests, first: str, last: str) -> bool:
    """True if a partition from `first` to before `last` has a row: one request."""
    text = "PartitionKey ge @first and PartitionKey lt @last"
    return bool(requests.query(TimeBudget(), text, {"first": first, "last": last}, 1, _NAMES))


def owners_in(requests: TableRequests, letter: str) -> set[Owner]:
    """The owners of the partitions ``LETTER-MARK-...``: one request for each of them."""
    found: set[Owner] = set()
    after = f"{letter}-"
    text = "PartitionKey ge @after and PartitionKey lt @last"
    for _ in range(_MOST_OWNERS):
        values = {"after": after, "last": f"{letter}."}
        names = (*_NAMES, "broker", "app")
        rows = requests.query(TimeBudget(), text, values, 1, names)
        if not rows:
            break
        owner = owner_of(rows[0])
        if owner.known:
            found.add(owner)
        mark = str(rows[0]["PartitionKey"]).split("-")[1]
        after = f"{letter}-{mark}."  # "." comes after "-", so this is behind all rows of the mark
    return found


def owner_of(row: Mapping[str, Any]) -> Owner:
    """The owner that a row names."""
    broker, app = row.get("broker"), row.get("app")
    return Owner(
        broker if isinstance(broker, str) else "", app if isinstance(app, str) and broker else ""
    )
