"""The optional protocol of result stores that keep schedules: a head, and its occurrences.

A schedule is one partition: its head, and a row for each occurrence. What their bytes mean is the
business of `aztask.schedules`.

Owners: the place of a schedule
* The first owner of a name keeps its schedule in the *plain* place, where releases before 0.2 keep
  all schedules. A row beside the head says whose it is; those releases do not touch that row. So a
  rolling update, and a rollback, go on with one head: no occurrence is lost or made twice, and
  pauses and schedules of run time stay.
* Another owner that uses the same name has a place *apart*, with its mark in the key.
* A head in the plain place without such a row has no owner. The first `ScheduleStore.commit` to it
  makes the row in the same transaction, and so adopts it.

Rules
1. The head and the occurrences of one `ScheduleStore.commit` are one transaction, compare-and-set
   on the head's tag. The head carries the watermark, so an occurrence whose row was pruned is never
   made again.
2. An occurrence is open until `ScheduleStore.close_occurrence`: any worker completes it.
3. Time is the store's (`ScheduleStore.now`). It is never ahead of the true time of the store, so a
   worker whose clock is wrong makes no occurrence early.
4. An unreachable store raises BrokerUnavailable; the change may have been made.
5. A store changes only schedules of its own owner, and those without one (rule 6).
6. `ScheduleStore.overview` also shows schedules without an owner: the engine decides which of them
   to adopt. Acting on one without a commit before it is an error of the engine.
7. Claims are rows of their own, so that they never conflict with the head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from aztask.address.owner import NO_OWNER, Owner

COMMITTED: Final = 90
"""The most occurrences of one `ScheduleStore.commit`: a transaction of Azure Tables has at most 100
rows."""

HEAD_BYTES: Final = 48 * 1024
"""The most bytes of a head: a property of Azure Tables holds 64 KiB."""


@dataclass(frozen=True, slots=True)
class Head:
    """The head of a schedule. `tag`: names this version of it."""

    schedule: str
    data: bytes
    tag: str


@dataclass(frozen=True, slots=True)
class Occurrence:
    """One occurrence. `key`: 14 digits, its time in milliseconds, and perhaps a suffix."""

    key: str
    data: bytes
    open: bool


@dataclass(frozen=True, slots=True)
class ClaimRow:
    """A claim: that running code has a definition. `key`: up to 100 letters, digits and ``-``.

    * `tag`: names this version of it; "" for one that does not exist yet.
    """

    key: str
    data: bytes
    tag: str = ""


@dataclass(frozen=True, slots=True)
class KeptSchedule:
    """A schedule as it was read: its head, and its open occurrences, the oldest first.

    * `owner`: whose it is; `NO_OWNER` if it has none yet.
    * `mark`: that of the owner if the schedule is in a place apart, else "".
    * `claims`: those of its owner.
    """

    head: Head
    open: tuple[Occurrence, ...] = ()
    owner: Owner = NO_OWNER
    mark: str = ""
    claims: tuple[ClaimRow, ...] = ()


class ScheduleStore(Protocol):
    """Keeps the schedules of one owner. Any thread may call."""

    @property
    def owner(self) -> Owner:
        """Whose schedules it changes; `NO_OWNER`: those without an owner."""
        ...

    def of(self, owner: Owner) -> ScheduleStore:
        """The same store for another owner."""
        ...

    def now(self) -> float:
        """The store's time, UTC epoch seconds: at most a second late, never early."""
        ...

    def any(self) -> bool:
        """True if there is a schedule of any owner. Workers without schedules ask once a minute."""
        ...

    def overview(self, *, everyone: bool = False) -> list[KeptSchedule]:
        """The owner's schedules and those without an owner, with their open occurrences and claims.

        * `everyone`: those of other owners, too, to show them.
        """
        ...

    def read(self, schedule: str) -> KeptSchedule | None:
        """The owner's schedule of that name, else one without an owner; None if there is none."""
        ...

    def newest(self, schedule: str, limit: int, until: str = "") -> list[Occurrence]:
        """The newest occurrences, the newest first.

        * `until`: only those whose key is at most this one.
        """
        ...

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
        """Replace the head, make occurrences and change others, in one transaction.

        Returns the head's new tag; None if `tag` is not the current one, and then nothing has
        changed. An occurrence that exists is not made again. A schedule without an owner is
        adopted; None if another owner was faster.

        * `tag`: None makes a new schedule, of this store's owner.
        * `made`, `changed`: at most `COMMITTED` together. Those of `changed` exist.
        * `apart`: make the new schedule apart: the plain place has one without an owner that is not
          this owner's.
        """
        ...

    def close_occurrence(self, schedule: str, key: str, data: bytes) -> bool:
        """Close an occurrence, with new data; False if it no longer exists."""
        ...

    def claim(self, schedule: str, claim: ClaimRow) -> bool:
        """Make or renew a claim; False if it has changed since its `tag`.

        The schedule need not exist yet.
        """
        ...

    def unclaim(self, schedule: str, claim: ClaimRow) -> bool:
        """Delete a claim; False if it was renewed since its `tag`."""
        ...

    def prune(self, schedule: str, keep: int) -> int:
        """Delete closed occurrences behind the `keep` newest; returns how many."""
        ...

    def delete(self, schedule: str) -> bool:
        """Delete a schedule of this owner, or one without, its head first; False if there is none.

        Its claims are deleted, too.
        """
        ...

    def owners(self) -> set[Owner]:
        """Whose schedules the store has."""
        ...

    def adopt(self, old: Owner) -> int:
        """Give the schedules of another owner to this one; returns how many heads moved.

        Where this owner has a schedule of that name already, it stays, and gets the open
        occurrences of the other, which is deleted. If the process dies on the way, call it again.

        * `old`: `NO_OWNER` for those without an owner.
        """
        ...


def schedules_of(results: object) -> ScheduleStore | None:
    """The store's schedules; None if there is no store, or if it keeps none."""
    found: ScheduleStore | None = getattr(results, "schedules", None)
    return found


MOVED: Final = 500
"""Closed occurrences that move with a schedule to another owner's place."""


def move_schedule(theirs: ScheduleStore, mine: ScheduleStore, schedule: str) -> bool:
    """Move a schedule between two owners' places; False if there is none to move.

    If the new owner has one of that name, it stays, and gets the open occurrences. They come first,
    then the rest of the history; the old place is deleted last. So if the process dies on the way,
    nothing that is open is lost, and the next call goes on.
    """
    kept = theirs.read(schedule)
    if kept is None or kept.owner != theirs.owner:
        return False
    own = mine.read(schedule)
    if own is not None and own.owner == mine.owner:
        rows, data, tag = list(kept.open), own.head.data, own.head.tag
    else:
        known = {row.key for row in kept.open}
        closed = [row for row in theirs.newest(schedule, MOVED) if row.key not in known]
        rows, data, tag = [*kept.open, *closed], kept.head.data, None
    for first in range(0, max(1, len(rows)), COMMITTED):
        tag = mine.commit(schedule, data, tag, rows[first : first + COMMITTED])
        if tag is None:
            return False
    return theirs.delete(schedule)
