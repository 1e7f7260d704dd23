"""Schedules in Azure Tables: a partition for each has the head, the occurrences and the claims.

The partition ``s-SCHEDULE`` is the plain place, ``s.MARK-SCHEDULE`` the place apart of the owner
with that mark (`aztask.stores.records.schedules`). One range has both; releases before 0.2 read
only the first, and there only the rows ``h`` and ``o-...``.

Row keys: ``h`` is the head. ``o-...`` is an occurrence; its time counts down, so that the newest
come first. ``a`` says who owns the head beside it, in the plain place. ``c-MARK-KEY`` is a claim.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, cast

from azure.core import MatchConditions
from azure.data.tables import UpdateMode

from aztask.address.owner import NO_OWNER, Owner
from aztask.stores.layout import key_text
from aztask.stores.records.damage import Columns, Damaged
from aztask.stores.records.schedules import (
    COMMITTED,
    ClaimRow,
    Head,
    KeptSchedule,
    Occurrence,
    move_schedule,
)
from aztask.stores.tables.client import TableRequests, TimeBudget
from aztask.stores.tables.errors import AlreadyExists, OutcomeUnknown, RowConflict, RowNotFound
from aztask.stores.tables.store import ServiceClock
from aztask.support.clock import Clock

HEAD: Final = "h"
OWNER: Final = "a"
SCHEDULES: Final = 100_000
PRUNED: Final = 99
_TOP: Final = 10**14 - 1
_DIGITS: Final = 14
_ALL: Final = {"first": "s-", "last": "s/"}
_RANGE: Final = "PartitionKey ge @first and PartitionKey lt @last"
_SEEN: Final = "(RowKey lt @rows or open eq true)"
"""The rows that are read with a schedule: its owner, claims, head, and open occurrences."""
_ROWS: Final = {"rows": "i"}


class TablesSchedules:
    """The implementation of `aztask.stores.records.schedules.ScheduleStore` in a table."""

    def __init__(
        self,
        requests: TableRequests,
        clock: Clock,
        owner: Owner = NO_OWNER,
        times: ServiceClock | None = None,
    ) -> None:
        """times: the service's clock, if another part has learned it already."""
        self.owner = owner
        self._mark = owner.mark
        self._requests = requests
        self._system_clock = clock
        self._clock = times or ServiceClock(requests, clock)
        self._apart: set[str] = set()  # names whose plain place is another owner's

    def of(self, owner: Owner) -> TablesSchedules:
        """The same store for another owner."""
        return TablesSchedules(self._requests, self._system_clock, owner, self._clock)

    def now(self) -> float:
        """The service's time, see `ServiceClock`."""
        return self._clock.now()

    def any(self) -> bool:
        """True if there is a schedule of any owner."""
        return bool(self._requests.query(TimeBudget(), _RANGE, _ALL, 1, ("PartitionKey", "RowKey")))

    # -- reading -----------------------------------------------------------------------------

    def overview(self, *, everyone: bool = False) -> list[KeptSchedule]:
        """The owner's schedules and those without one, in one query without closed occurrences."""
        self._clock.learn()
        values = {**_ALL, **_ROWS}
        rows = self._requests.query(TimeBudget(), f"{_RANGE} and {_SEEN}", values, SCHEDULES)
        partitions: dict[str, list[dict[str, Any]]] = {}
        for row in rows:
            partitions.setdefault(row["PartitionKey"], []).append(row)
        found = [each for each in map(_kept, partitions.values()) if each is not None]
        self._apart = {each.head.schedule for each in found if self._is_apart(each)}
        return [each for each in found if everyone or each.owner in (self.owner, NO_OWNER)]

    def _is_apart(self, kept: KeptSchedule) -> bool:
        """Whether this owner's schedule of that name is in a place apart, as this row shows."""
        if kept.mark:
            return kept.owner == self.owner
        return kept.owner not in (self.owner, NO_OWNER)

    def read(self, schedule: str) -> KeptSchedule | None:
        """The owner's schedule of that name, else one without an owner."""
        call = TimeBudget()
        if schedule in self._apart and (found := self._read(call, self._apart_place(schedule))):
            return found
        plain = self._read(call, _plain(schedule))
        if plain is not None and plain.owner == self.owner:
            self._apart.discard(schedule)
            return plain
        found = self._read(call, self._apart_place(schedule)) if self._mark else None
        if found is not None or (plain is not None and plain.owner != NO_OWNER):
            self._apart.add(schedule)
            return found
        return plain

    def _read(self, call: TimeBudget, partition: str) -> KeptSchedule | None:
        text = f"PartitionKey eq @schedule and {_SEEN}"
        values = {"schedule": partition, **_ROWS}
        return _kept(self._requests.query(call, text, values, SCHEDULES))

    def _apart_place(self, schedule: str) -> str:
        return f"s.{self._mark}-{key_text(schedule)}"

    def _place(self, schedule: str) -> str:
        """The partition of a schedule of this owner, as it was read last."""
        return self._apart_place(schedule) if schedule in self._apart else _plain(schedule)

    def newest(self, schedule: str, limit: int, until: str = "") -> list[Occurrence]:
        """The newest occurrences, the newest first."""
        text = "PartitionKey eq @schedule and RowKey ge @first and RowKey lt @last"
        values = {
            "schedule": self._known_place(schedule),
            "first": _row(until)[: 2 + _DIGITS] if until else "o-",
            "last": "o.",
        }
        rows = self._requests.query(TimeBudget(), text, values, limit)
        return [_occurrence(row) for row in rows if not until or _key(row) <= until]

    def _known_place(self, schedule: str) -> str:
        """Like `_place`, for a process that may not have read the schedule."""
        if schedule not in self._apart:
            self.read(schedule)
        return self._place(schedule)

    # -- changes -----------------------------------------------------------------------------

    def commit(
        self,
        schedule: str,
        data: bytes,
        tag: str | None,
        made: Sequence[Occurrence] = (),
        changed: Sequence[Occurrence] = (),
        *,
        apart: bool = False,
    ) -> str | None:
        """Replace the head, make occurrences and change others, in one transaction."""
        call = TimeBudget()
        etag = ""
        if tag is None:
            partition, adopts = self._new_place(call, schedule, apart=apart)
        else:
            sign, _, etag = tag.partition(":")
            if sign not in (self._sign(_OWNED), self._sign(_IN_APART), _FREE):
                return None  # another owner's
            partition = self._apart_place(schedule) if sign[:1] == _IN_APART else _plain(schedule)
            adopts = bool(self._mark) and sign == _FREE
        head = {"PartitionKey": partition, "RowKey": HEAD, "schedule": schedule, "data": data}
        sign = self._sign(_OWNED) if self._mark else _FREE
        if partition != _plain(schedule):
            head |= {"broker": self.owner.broker, "app": self.owner.app}
            sign = self._sign(_IN_APART)
        for _ in range(2):
            changes = [_head_change(head, etag or None)]
            changes += [("create", _row_of(partition, each)) for each in made]
            changes += [
                ("update", _row_of(partition, each), {"mode": UpdateMode.REPLACE})
                for each in changed
            ]
            if adopts:
                changes.append(("create", self._owner_row(partition)))
            try:
                return f"{sign}:{self._requests.together(call, changes)[0]['etag']}"
            except (RowConflict, RowNotFound):
                return None
            except OutcomeUnknown:
                found = self._requests.read(call, partition, HEAD)
                same = found is not None and found.get("data") == data
                return f"{sign}:{_etag(found)}" if found is not None and same else None
            except AlreadyExists:
                if tag is None or (adopts and self._requests.read(call, partition, OWNER)):
                    return None
                made = [
                    each
                    for each in made
                    if self._requests.read(call, partition, _row(each.key)) is None
                ]
        return None

    def _sign(self, place: str) -> str:
        return f"{place}{self._mark}"

    def _new_place(self, call: TimeBudget, schedule: str, *, apart: bool) -> tuple[str, bool]:
        """(the partition of a new schedule, whether its name has no owner yet).

        If another owner takes the name before the commit, the commit makes nothing.
        """
        plain = _plain(schedule)
        if not self._mark:
            return plain, False
        if not apart:
            found = self._requests.read(call, plain, OWNER)
            if found is None:
                return plain, True
            if _owner_of(found) == self.owner:
                return plain, False
        self._apart.add(schedule)
        return self._apart_place(schedule), False

    def _owner_row(self, partition: str) -> dict[str, Any]:
        return {
            "PartitionKey": partition,
            "RowKey": OWNER,
            "broker": self.owner.broker,
            "app": self.owner.app,
        }

    def close_occurrence(self, schedule: str, key: str, data: bytes) -> bool:
        """Close an occurrence, with new data. False also if the answer is lost."""
        row = _row_of(self._place(schedule), Occurrence(key, data, False))
        return self._requests.merge(TimeBudget(), row, "*")

    def claim(self, schedule: str, claim: ClaimRow) -> bool:
        """Make or renew a claim. False also if the answer is lost."""
        row = {
            "PartitionKey": self._place(schedule),
            "RowKey": f"c-{self._mark}-{claim.key}",
            "data": claim.data,
        }
        call = TimeBudget()
        if claim.tag:
            return self._requests.merge(call, row, claim.tag)
        try:
            self._requests.together(call, [("create", row)])
        except (AlreadyExists, OutcomeUnknown):
            return False
        return True

    def unclaim(self, schedule: str, claim: ClaimRow) -> bool:
        """Delete a claim. False also if the answer is lost."""
        row = f"c-{self._mark}-{claim.key}"
        try:
            return self._requests.delete(TimeBudget(), self._place(schedule), row, claim.tag)
        except RowConflict:
            return False

    def prune(self, schedule: str, keep: int) -> int:
        """Delete closed occurrences behind the newest, at most `PRUNED` of them."""
        call, partition = TimeBudget(), self._place(schedule)
        rows = self._requests.query(
            call,
            "PartitionKey eq @schedule and RowKey ge @first and RowKey lt @last",
            {"schedule": partition, "first": "o-", "last": "o."},
            keep + PRUNED,
            ("PartitionKey", "RowKey", "open"),
        )
        old = [row["RowKey"] for row in rows[keep:] if not row.get("open")]
        return self._drop(call, partition, old)

    def _drop(self, call: TimeBudget, partition: str, rows: Iterable[str]) -> int:
        return sum(
            self._requests.each(
                call, lambda call, row: self._requests.delete(call, partition, row), rows
            )
        )

    def delete(self, schedule: str) -> bool:
        """Delete a schedule, its head first. If the process dies in between, delete it again.

        Its owner's row and the claims go last.
        """
        call = TimeBudget()
        kept = self.read(schedule)
        partition = self._place(schedule)
        if kept is None:
            owner = self._requests.read(call, partition, OWNER)
            if owner is not None and _owner_of(owner) != self.owner:
                return False
        there = self._requests.delete(call, partition, HEAD)
        rows = self._requests.query(
            call, "PartitionKey eq @schedule", {"schedule": partition}, SCHEDULES,
            ("PartitionKey", "RowKey"),
        )  # fmt: skip
        keys = {row["RowKey"] for row in rows} - {HEAD}
        occurrences = {key for key in keys if key.startswith("o-")}
        self._drop(call, partition, occurrences)
        self._drop(call, partition, keys - occurrences)
        self._apart.discard(schedule)
        return there

    # -- owners ------------------------------------------------------------------------------

    def owners(self) -> set[Owner]:
        """Whose schedules the table has."""
        return {each.owner for each in self.overview(everyone=True)} - {NO_OWNER}

    def adopt(self, old: Owner) -> int:
        """Give the schedules of another owner to this one."""
        if old == self.owner or not self._mark:
            return 0
        self.overview()  # so that this owner's places are known
        theirs = self.of(old)
        found = [each for each in theirs.overview() if each.owner == old]
        return sum(self._adopt(theirs, each) for each in found)

    def _adopt(self, theirs: TablesSchedules, kept: KeptSchedule) -> bool:
        name = kept.head.schedule
        own = self.read(name)
        if kept.mark or (own is not None and own.mark):
            return move_schedule(theirs, self, name)
        call, partition = TimeBudget(), _plain(name)
        # The head is written, too: a writer who still takes itself for the owner finds another tag.
        head = {"PartitionKey": partition, "RowKey": HEAD, "schedule": name, "data": kept.head.data}
        owner = ("upsert", self._owner_row(partition), {"mode": UpdateMode.REPLACE})
        try:
            self._requests.together(
                call, [_head_change(head, kept.head.tag.partition(":")[2]), owner]
            )
        except (RowConflict, RowNotFound, OutcomeUnknown):
            return False  # it changed at this moment: the next call adopts it
        self._apart.discard(name)
        return True


assert COMMITTED < PRUNED  # noqa: S101  # one transaction has at most 100 rows


_OWNED: Final = "p"
_FREE: Final = "f"
_IN_APART: Final = "a"
"""Tags begin with one of these and the owner's mark: in the plain place with an owner, or without
one, or apart. So a tag of another owner is never current."""


def _plain(schedule: str) -> str:
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


def _kept(rows: Sequence[dict[str, Any]]) -> KeptSchedule | None:
    """The schedule in the rows of its partition; None if its head is missing."""
    head = next((row for row in rows if row["RowKey"] == HEAD), None)
    if head is None:
        return None
    apart = str(head["PartitionKey"]).startswith("s.")
    if apart:
        owner = _owner_of(head)
        sign = f"{_IN_APART}{owner.mark}"
    else:
        owner = next((_owner_of(row) for row in rows if row["RowKey"] == OWNER), NO_OWNER)
        sign = f"{_OWNED}{owner.mark}" if owner.known else _FREE
    waiting = [_occurrence(row) for row in rows if row["RowKey"].startswith("o-")]
    waiting.sort(key=lambda each: each.key)
    schedule = head.get("schedule")
    name = schedule if isinstance(schedule, str) else ""
    prefix = f"c-{owner.mark}-"
    claims = [
        ClaimRow(row["RowKey"].removeprefix(prefix), _data(row), _etag(row))
        for row in rows
        if row["RowKey"].startswith(prefix)
    ]
    found = Head(name, _data(head), f"{sign}:{_etag(head)}")
    return KeptSchedule(found, tuple(waiting), owner, owner.mark if apart else "", tuple(claims))


def _owner_of(row: Mapping[str, Any]) -> Owner:
    broker, app = row.get("broker"), row.get("app")
    return Owner(broker, app) if isinstance(broker, str) and isinstance(app, str) else NO_OWNER


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
