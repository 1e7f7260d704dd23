"""The optional protocol of result stores that keep unique tasks: one holder for each key.

Rules
1. Every change of a holder is compare-and-set on the version that was read.
2. Each holder has a time from which housekeeping looks at it (`Holder.due`): soon while its message
   may not be sent, and at the end of its life otherwise. `UniqueStore.due` finds them in that order
   and reads no others.
3. An unreachable store raises BrokerUnavailable; the change may have been made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class Holder:
    """The holder of a key as it was read. `due`: UTC epoch seconds; `tag`: names this version."""

    key: str
    data: bytes
    due: float
    tag: str


class UniqueStore(Protocol):
    """Keeps holders. Any thread may call."""

    def now(self) -> float:
        """The store's time, UTC epoch seconds: at most a second late, never early."""
        ...

    def read(self, key: str) -> Holder | None:
        """The holder of a key; None if it is free."""
        ...

    def write(self, key: str, data: bytes, due: float, before: Holder | None) -> Holder | None:
        """Make a holder, or replace the one that was read; None if that is not the current one.

        * `before`: the holder that was read; None if the key was free.
        """
        ...

    def release(self, holder: Holder) -> bool:
        """Free the key; False if the holder that was read is not the current one."""
        ...

    def due(self, before: float, limit: int) -> list[Holder]:
        """Holders that are due before a time, the first due first."""
        ...


@runtime_checkable
class KeepsUniques(Protocol):
    """A result store that keeps the holders of unique tasks, too."""

    @property
    def uniques(self) -> UniqueStore:
        """The part of the store that keeps them."""
        ...


def uniques_of(results: object) -> UniqueStore | None:
    """The store's holders; None if there is no store, or if it keeps none."""
    return results.uniques if isinstance(results, KeepsUniques) else None
