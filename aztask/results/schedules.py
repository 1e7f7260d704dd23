"""The optional protocol of result stores that keep schedules: a head, and its occurrences.

A schedule is one partition: its head, and a row for each occurrence. What their bytes mean is the
business of `aztask.schedules`.

Rules
1. The head and the occurrences of one `ScheduleStore.commit` are one transaction, compare-and-set
   on the head's tag. The head carries the watermark, so an occurrence whose row was pruned is never
   made again.
2. An occurrence is open until `ScheduleStore.close_occurrence`: any worker completes it.
3. Time is the store's (`ScheduleStore.now`). It is never ahead of the true time of the store, so a
   worker whose clock is wrong makes no occurrence early.
4. An unreachable store raises BrokerUnavailable; the change may have been made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

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
class Kept:
    """A schedule as it was read: its head, and its open occurrences, the oldest first."""

    head: Head
    open: tuple[Occurrence, ...] = ()


class ScheduleStore(Protocol):
    """Keeps schedules. Any thread may call."""

    def now(self) -> float:
        """The store's time, UTC epoch seconds: at most a second late, never early."""
        ...

    def any(self) -> bool:
        """True if there is a schedule. Cheap: workers without schedules ask once a minute."""
        ...

    def overview(self) -> list[Kept]:
        """All schedules, each with its open occurrences."""
        ...

    def read(self, schedule: str) -> Kept | None:
        """One schedule with its open occurrences; None if there is none."""
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
    ) -> str | None:
        """Replace the head, make occurrences and change others, in one transaction.

        Returns the head's new tag; None if `tag` is not the current one, and then nothing has
        changed. An occurrence that exists is not made again.

        * `tag`: None makes a new schedule.
        * `made`, `changed`: at most `COMMITTED` together. Those of `changed` exist.
        """
        ...

    def close_occurrence(self, schedule: str, key: str, data: bytes) -> bool:
        """Close an occurrence, with new data; False if it no longer exists."""
        ...

    def prune(self, schedule: str, keep: int) -> int:
        """Delete closed occurrences behind the `keep` newest; returns how many."""
        ...

    def delete(self, schedule: str) -> bool:
        """Delete a schedule, its head first; False if there was none."""
        ...


@runtime_checkable
class KeepsSchedules(Protocol):
    """A result store that keeps schedules, too."""

    @property
    def schedules(self) -> ScheduleStore:
        """The part of the store that keeps them."""
        ...


def schedules_of(results: object) -> ScheduleStore | None:
    """The store's schedules; None if there is no store, or if it keeps none."""
    return results.schedules if isinstance(results, KeepsSchedules) else None
