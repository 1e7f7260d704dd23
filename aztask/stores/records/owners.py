"""Whose rows a part of a result store may act on, and moving them to another owner.

Rules
1. A row says whose it is by its broker's name. A row without one was written before rows had owners
   (see `aztask.address.owner`): everyone may read it, and the first worker that receives one of its
   messages makes it its own.
2. A foreign row is never changed, and never given out as one's own: `foreign_id` is the error.
3. A store without an owner acts on all rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, Protocol, runtime_checkable

from aztask.address.owner import Owner
from aztask.errors import ForeignId
from aztask.stores.records.base import WorkerRecord

FOREIGN_ID: Final = "id-of-another-owner"
"""The reason of the dead letter of a message whose id another owner uses."""
OTHER_TASK: Final = "id-of-another-task"
"""The same of one whose id belongs to a run of another task, or in another queue."""

UNOWNED_SECONDS: Final = 86400.0
"""Seconds after which ``aztask doctor`` lists a row that no owner has adopted."""

_PARTS: Final = ("workflows", "controls", "schedules", "uniques", "dead_index")


@runtime_checkable
class OwnedRows(Protocol):
    """A part of a result store, or the store itself, whose rows have owners."""

    def owners(self) -> set[Owner]:
        """The brokers, and perhaps apps, that its rows belong to."""
        ...

    def adopt(self, old: Owner) -> int:
        """Make the rows of `old` its own; returns how many. If the process dies, repeat it."""
        ...


@runtime_checkable
class CountsUnowned(Protocol):
    """A part of a result store that can say how many old rows have no owner."""

    def unowned(self, before: float) -> int:
        """How many rows without an owner are older than `before`, UTC epoch seconds."""
        ...


def parts_of(store: object) -> Iterator[object]:
    """The store, for its runs and cancellations, and its other parts."""
    yield store
    for name in _PARTS:
        part = getattr(store, name, None)
        if part is not None:
            yield part


def is_other_broker(mine: Owner, old: Owner) -> bool:
    """True if rows that belong to a broker alone can be adopted: theirs is another one than mine.

    An app that was renamed adopts what the former name declares; its broker is the same.
    """
    return mine.known and old.broker != mine.broker


def own_workers(
    mine: Owner, workers: Iterable[WorkerRecord], *, everyone: bool
) -> list[WorkerRecord]:
    """Those that receive this owner's messages, or that do not say whose they receive."""
    return [each for each in workers if everyone or not is_foreign(mine, each.broker)]


def is_foreign(mine: Owner, broker: str | None) -> bool:
    """True if a row with this broker belongs to another owner (rules 1 and 3)."""
    return bool(broker and mine.broker and broker != mine.broker)


def foreign_id(what: str, name: str, broker: str, mine: Owner) -> ForeignId:
    """The error for an id that another owner uses. what: ``task`` or ``workflow``."""
    return ForeignId(
        f"{what} {name} belongs to {broker}, which shares this result store, not to {mine.broker}: "
        f"use another {what} id, or a result store of its own for each app",
        owner=broker,
    )
