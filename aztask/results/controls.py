"""The optional protocol of result stores that keep control entries: pauses, slots and permits.

An entry is a short text of bytes under a name. `aztask.limits` decides what is in it.

Rules
1. Every change of an entry is compare-and-set: it names the tag that was read, or None for an entry
   that must not exist yet. Entries never conflict with each other.
2. Each writer writes data that no other writer would write, for example with a random value in it.
   If an answer is lost, the store reads the entry and compares it with the writer's data.
3. An unreachable store raises BrokerUnavailable; some changes of the call may have been made then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

ENTRY_LIMIT: Final = 60_000
"""Bytes that an entry may have: a property of a table's row has 64 KiB."""


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry as it was read. `tag`: names this version of it."""

    data: bytes
    tag: str


@dataclass(frozen=True, slots=True)
class EntryChange:
    """A new version of an entry. `tag`: the version that it replaces; None: there is none."""

    name: str
    data: bytes
    tag: str | None = None


@dataclass(frozen=True, slots=True)
class StoreTime:
    """The store's clock at one moment. `at`: UTC epoch seconds.

    It was read between `earliest` and `latest`, on the clock of the deadlines.
    """

    at: float
    earliest: float
    latest: float


class ControlStore(Protocol):
    """Keeps control entries. Any thread may call."""

    def read(self, names: Sequence[str]) -> list[Entry | None]:
        """The entries with these names, in order; None for missing ones."""
        ...

    def write(self, changes: Sequence[EntryChange]) -> list[str | None]:
        """Make each change; returns the new tags, and None where the tag was not the current one.

        Each change succeeds or fails alone.
        """
        ...

    def time(self) -> StoreTime:
        """Read the store's clock, which all workers share."""
        ...

    def purge(self, prefix: str, before: float) -> int:
        """Delete entries that were last written before `before`; returns how many.

        * `prefix`: only entries whose names begin with it; plain letters and ``-``.
        * `before`: UTC epoch seconds.
        """
        ...


@runtime_checkable
class KeepsControls(Protocol):
    """A result store that keeps control entries, too."""

    @property
    def controls(self) -> ControlStore:
        """The part of the store that keeps them."""
        ...


def controls_of(results: object) -> ControlStore | None:
    """The store's control entries; None if there is no store, or if it keeps none."""
    return results.controls if isinstance(results, KeepsControls) else None
