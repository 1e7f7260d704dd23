"""The part of a result store that keeps unique tasks: one holder for each key.

Rules
1. Every change of a holder is compare-and-set on the version that was read.
2. Each holder has a time from which housekeeping looks at it (`Holder.due`): soon while its message
   may not be sent, and at the end of its life otherwise. `UniqueStore.due` finds them in that order
   and reads no others.
3. An unreachable store raises BrokerUnavailable; the change may have been made.
4. Holders belong to the store's broker: a holder of another broker neither stands in the way of a
   key nor is it due here. Releases before 0.2 made holders without an owner. These stand in the way
   of all brokers of the store, as before. Such a holder is changed where it is, so that a
   worker of the former release sees the change. A new task takes the place of an ended one with
   `UniqueStore.move`.
5. The reverse does not hold: a sender of a former release does not see holders with an owner.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

from aztask.address.owner import NO_OWNER, Owner
from aztask.stores.layout import Shards, SqlLayout
from aztask.stores.records.owners import is_other_broker
from aztask.stores.rows import Change, Kind, Place, Row, RowStore, move_rows

_STEPS: Final = (
    """
    CREATE TABLE uniques (
        key TEXT PRIMARY KEY, version INTEGER NOT NULL, due REAL NOT NULL, data BLOB NOT NULL)
    WITHOUT ROWID;
    CREATE INDEX uniques_due ON uniques (due);
    """,
)
_OWNED_STEPS: Final = (
    """
    CREATE TABLE owned_uniques (
        broker TEXT NOT NULL, key TEXT NOT NULL, version INTEGER NOT NULL, due REAL NOT NULL,
        data BLOB NOT NULL, PRIMARY KEY (broker, key))
    WITHOUT ROWID;
    CREATE INDEX owned_uniques_due ON owned_uniques (broker, due);
    """,
)
HOLDERS: Final = Kind(
    {"due": float, "data": bytes},
    # Former releases begin with version 1 again for a key that was freed, but with other data.
    SqlLayout(
        "owned_uniques",
        "uniques",
        key="key",
        guard="data",
        steps={"uniques": _STEPS, "owned_uniques": _OWNED_STEPS},
    ),
    Shards("U", "u", "k-", "key"),
    due="due",
    inherits=True,
)
MOST_DUE: Final = 10_000


@dataclass(frozen=True, slots=True)
class Holder:
    """The holder of a key as it was read."""

    row: Row

    @property
    def key(self) -> str:
        """The key that it holds."""
        return self.row.place.key

    @property
    def owner(self) -> Owner:
        """The broker; `NO_OWNER` for one that a release before 0.2 made."""
        return self.row.place.owner

    @property
    def data(self) -> bytes:
        """What the engine stored; b"" if another program wrote it."""
        found = self.row.values["data"]
        return found if isinstance(found, bytes) else b""

    @property
    def due(self) -> float:
        """When housekeeping looks at it, UTC epoch seconds."""
        found = self.row.values["due"]
        return float(found) if isinstance(found, int | float) else 0.0


class UniqueStore:
    """The holders of one result store. Any thread may call."""

    def __init__(self, store: RowStore, owner: Owner = NO_OWNER) -> None:
        """owner: whose holders it makes and finds due: a broker, or `NO_OWNER`."""
        self.owner = owner.of_broker
        self._store = store
        self._rows = store.of(HOLDERS)

    def now(self) -> float:
        """The store's time, UTC epoch seconds: at most a second late, never early."""
        return self._store.now()

    def read(self, key: str) -> Holder | None:
        """The holder of a key: the broker's own, else one without an owner; None if it is free."""
        (found,) = self._rows.get((Place(self.owner, "", key),))
        return None if found is None else Holder(found)

    def write(self, key: str, data: bytes, due: float, before: Holder | None) -> Holder | None:
        """Make a holder, or replace the one that was read; None if that is not the current one.

        * `before`: the holder that was read; None if the key was free.
        """
        values = {"due": due, "data": data}
        if before is None:
            made = self._rows.write(Change(Place(self.owner, "", key), values))
        else:
            made = self._rows.write(Change(before.row.place, values, before.row))
        return None if made is None else Holder(made)

    def move(self, key: str, data: bytes, due: float, before: Holder) -> Holder | None:
        """Replace a holder without an owner by one of this owner; None as in `write`.

        Crash window: where two rows cannot change together, both exist, and the own one holds the
        key. The other one has ended already, so it is freed when it is due.
        """
        place = Place(self.owner, "", key)
        with self._store.joined():
            made = self._rows.write(Change(place, {"due": due, "data": data}, beside=True))
            if made is None:
                return None
            if self.release(before):
                return Holder(made)
            self.release(Holder(made))  # another process has changed the holder in between
            return None

    def release(self, holder: Holder) -> bool:
        """Free the key; False if the holder that was read is not the current one."""
        return self._rows.write(Change(holder.row.place, None, holder.row)) is not None

    def due(self, before: float, limit: int) -> list[Holder]:
        """Own holders that are due before a time, the first due first."""
        return self._read_due(self._rows.due(self.owner, before, limit), before)

    def due_unowned(
        self, before: float, limit: int, wanted: Callable[[str], bool] = lambda key: True
    ) -> list[Holder]:
        """Holders without an owner that are due before a time and whose keys are wanted.

        Empty in a store that has no owner itself: there, `due` finds them.
        """
        if not self.owner.known or not self._rows.may_be_unowned():
            return []
        # Keys that are not wanted stay due, and must not take the places of the others.
        places = self._rows.due(NO_OWNER, before, MOST_DUE)
        return self._read_due([each for each in places if wanted(each.key)][:limit], before)

    def _read_due(self, places: list[Place], before: float) -> list[Holder]:
        found = [
            Holder(row)
            for place, row in zip(places, self._rows.get(places), strict=True)
            if row is not None and row.place == place
        ]
        return [each for each in found if each.due < before]

    def unowned(self, before: float) -> int:
        """How many holders without an owner have been due since before that time."""
        return len(self._rows.due(NO_OWNER, before, MOST_DUE))

    def adopt(self, old: Owner) -> int:
        """Make the holders of another owner's broker ours; returns how many were found.

        If a key has a holder of ours already, that one stays and the other one is deleted. If the
        process dies in the middle, call it again: moved holders are not found again.
        """
        if not is_other_broker(self.owner, old):
            return 0
        return move_rows(self._store, self._rows, old.of_broker, self.owner)

    def owners(self) -> set[Owner]:
        """Whose holders are in the store; with `NO_OWNER` if some have no owner."""
        return self._rows.owners()


Held: TypeAlias = tuple[bytes, float]
"""What a holder is written with: its data, and when it is due."""


@dataclass(slots=True)
class HolderCell:
    """The holder of one key, for `aztask.stores.rows.change`. Without data, it is released."""

    store: UniqueStore
    key: str

    def read(self) -> Holder | None:
        """The holder; None if the key is free."""
        return self.store.read(self.key)

    def write(self, held: Held | None, before: Holder | None) -> bool:
        """Replace or release the holder that was read, where it is."""
        if held is None:
            return before is None or self.store.release(before)
        return self.store.write(self.key, *held, before) is not None


def uniques_of(results: object) -> UniqueStore | None:
    """The store's holders; None if there is no store, or if it keeps none."""
    found: UniqueStore | None = getattr(results, "uniques", None)
    return found
