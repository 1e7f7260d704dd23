"""The part of a result store that keeps control entries: pauses, slots and permits.

An entry is a short text of bytes under a name. `aztask.limits` decides what is in it.

Rules
1. Every change of an entry is compare-and-set: it names the tag that was read, or None for an entry
   that must not exist yet. Entries never conflict with each other.
2. Each writer writes data that no other writer would write, for example with a random value in it.
   If an answer is lost, the store reads the entry and compares it with the writer's data.
3. An unreachable store raises BrokerUnavailable; some changes of the call may have been made then.
4. Entries belong to an owner, see `scope_of`: pauses to the broker, limits and breakers to the app.
   A store reads and changes those of its owner only. `ControlStore.of` gives those of another one,
   and with `NO_OWNER` those that a release before 0.2 wrote.
5. With signing keys, each entry is signed with its name, and with ``old_signatures=False`` with its
   app if it belongs to one: the release before cannot read that. One that is not signed rightly is
   read without data, as one that another program wrote. What is adopted is signed anew, unless it
   was not rightly signed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from aztask.address.owner import NO_OWNER, Owner
from aztask.message.rowsignatures import Purpose, RowSignatures
from aztask.stores.layout import SqlLayout, TablesLayout
from aztask.stores.records.rowsigning import RowSigner
from aztask.stores.rows import (
    Change,
    Kind,
    Place,
    Row,
    Rows,
    RowStore,
    StoreTime,
    Values,
    move_rows,
)
from aztask.support.clock import monotonic

_STEPS: Final = (
    """
    CREATE TABLE controls (
        name TEXT PRIMARY KEY, version INTEGER NOT NULL, data BLOB NOT NULL,
        written_at REAL NOT NULL)
    WITHOUT ROWID;
    """,
)
_OWNED_STEPS: Final = (
    """
    CREATE TABLE owned_controls (
        broker TEXT NOT NULL, app TEXT NOT NULL, name TEXT NOT NULL, version INTEGER NOT NULL,
        data BLOB NOT NULL, written_at REAL NOT NULL, PRIMARY KEY (broker, app, name))
    WITHOUT ROWID;
    """,
)
# A release that knows no signatures leaves that of the entry before: a change without a new one is
# an unsigned entry. Over Tables, such a release drops the property.
_SIGNED_STEPS: Final = (
    """
    ALTER TABLE controls ADD COLUMN signature BLOB;
    ALTER TABLE owned_controls ADD COLUMN signature BLOB;
    CREATE TRIGGER controls_unsigned AFTER UPDATE OF data ON controls
    WHEN OLD.signature IS NOT NULL AND NEW.signature IS OLD.signature AND NEW.data IS NOT OLD.data
    BEGIN UPDATE controls SET signature = NULL WHERE name = NEW.name; END;
    CREATE TRIGGER owned_controls_unsigned AFTER UPDATE OF data ON owned_controls
    WHEN OLD.signature IS NOT NULL AND NEW.signature IS OLD.signature AND NEW.data IS NOT OLD.data
    BEGIN
        UPDATE owned_controls SET signature = NULL
        WHERE broker = NEW.broker AND app = NEW.app AND name = NEW.name;
    END;
    """,
)
# Each entry is a partition of its own: entries never conflict, and change in parallel.
ENTRIES: Final = Kind(
    {"data": bytes, "signature": bytes},
    SqlLayout(
        "owned_controls",
        "controls",
        "name",
        app=True,
        written="written_at",
        steps={
            "controls": _STEPS,
            "owned_controls": _OWNED_STEPS,
            "signed_controls": _SIGNED_STEPS,
        },
    ),
    TablesLayout("K", "k"),
)
PURGE_SECONDS: Final = 4.0
PURGED: Final = 256

ENTRY_LIMIT: Final = 60_000
"""Bytes that an entry may have: a property of a table's row has 64 KiB."""


OF_THE_APP: Final = ("limit-", "breakers")
"""How the names of entries begin that belong to an app: what code declares under a name."""


def scope_of(owner: Owner, name: str) -> Owner:
    """Who owns the entry with this name in a store of `owner`."""
    return owner if name.startswith(OF_THE_APP) else owner.of_broker


def heir_of(row: Owner, old: Owner, new: Owner) -> Owner | None:
    """Who gets an entry of `row` when `new` adopts what `old` has; None if it is not moved.

    Without an app in `old`, the entries of all apps of that broker are moved, each keeping its
    app's name.
    """
    if not new.known or row.broker != old.broker or (row.app and old.app not in ("", row.app)):
        return None
    of_an_app = new if old.app else Owner(new.broker, row.app)
    heir = of_an_app if row.app else new.of_broker
    return None if heir == row else heir


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
class EntryCell:
    """One entry by its name, as `aztask.stores.rows.change` reads and writes it."""

    store: ControlStore
    name: str

    def read(self) -> Entry | None:
        """The entry; None if there is none."""
        (found,) = self.store.read([self.name])
        return found

    def write(self, data: bytes | None, before: Entry | None) -> bool:
        """Replace the entry, or delete it with None."""
        tag = None if before is None else before.tag
        if data is None:
            return tag is None or self.store.remove(self.name, tag)
        return self.store.write([EntryChange(self.name, data, tag)]) != [None]


class ControlStore:
    """The control entries of one result store. Any thread may call."""

    def __init__(
        self,
        store: RowStore,
        owner: Owner = NO_OWNER,
        *,
        rows: Rows | None = None,
        signatures: RowSignatures | None = None,
    ) -> None:
        """owner: whose entries it reads and changes. rows: those of `ENTRIES`, if they are open."""
        self.owner = owner
        self._signatures = signatures
        self._signer = RowSigner(signatures, owner, store)
        self._broker = owner.of_broker
        self._store = store
        self._rows = store.of(ENTRIES) if rows is None else rows

    @property
    def remote(self) -> bool:
        """True if a call waits for a network."""
        return self._store.remote

    def of(self, owner: Owner) -> ControlStore:
        """The entries of another owner in the same store."""
        return ControlStore(self._store, owner, rows=self._rows, signatures=self._signatures)

    def read(self, names: Sequence[str]) -> list[Entry | None]:
        """The entries with these names, in order; None for missing ones.

        An entry that another program wrote has no data.
        """
        found = self._rows.get([self._place(name) for name in names])
        named = zip(names, found, strict=True)
        return [None if row is None else self._entry(name, row) for name, row in named]

    def _entry(self, name: str, row: Row) -> Entry:
        data = row.values["data"]
        if not isinstance(data, bytes):
            return Entry(b"", row.tag)
        signature = row.values["signature"]
        if reason := _objection(self._signer, row.place, signature, data):
            self._signer.refuse(f"control entry {name}", reason)
            return Entry(b"", row.tag)
        return Entry(data, row.tag)

    def write(self, changes: Sequence[EntryChange]) -> list[str | None]:
        """Make each change; returns the new tags, and None where the tag was not the current one.

        Each change succeeds or fails alone.
        """
        made = self._rows.write_all([self._changed(each) for each in changes])
        return [None if row is None else row.tag for row in made]

    def _changed(self, change: EntryChange) -> Change:
        place = self._place(change.name)
        before = None if change.tag is None else Row(place, {}, change.tag)
        signature = _signature(self._signer, place, change.data)
        return Change(place, {"data": change.data, "signature": signature}, before)

    def written_before(self, name: str, tag: str, at: float) -> bool:
        """True if this version of an entry is the current one, and was written before `at`.

        The store's own clock says so, which no writer that stands still can deceive.

        * `at`: UTC epoch seconds.
        """
        place = self._place(name)
        found = self._rows.of_owner(place.owner, place.partition, at)
        return any(row.tag == tag and row.place.partition == place.partition for row in found)

    def remove(self, name: str, tag: str) -> bool:
        """Delete an entry; False if the tag is not the current one."""
        place = self._place(name)
        return self._rows.write(Change(place, None, Row(place, {}, tag))) is not None

    def time(self) -> StoreTime:
        """Read the store's clock, which all workers share."""
        return self._store.time()

    def purge(self, prefix: str, before: float) -> int:
        """Delete entries that were last written before `before`; returns how many.

        It ends after some seconds, and the next call continues. An entry that is written in between
        is kept.

        * `prefix`: only entries whose names begin with it; plain letters and ``-``.
        * `before`: UTC epoch seconds.
        """
        until, deleted = monotonic() + PURGE_SECONDS, 0
        old = iter(self._rows.of_owner(scope_of(self.owner, prefix), prefix, before))
        while monotonic() < until and (some := list(islice(old, PURGED))):
            gone = self._rows.write_all([Change(row.place, None, row) for row in some])
            deleted += sum(row is not None for row in gone)
        return deleted

    def adopt(self, old: Owner) -> int:
        """Make the entries of another owner ours (`heir_of`); returns how many were found.

        An entry that the heir has already stays, and the other one is deleted. If the process dies
        in the middle, call it again. Entries without an owner are not moved: what is paused without
        an owner is paused for all who share the store.
        """
        heirs = {each: heir_of(each, old, self.owner) for each in self._rows.owners() if each.known}
        return sum(
            move_rows(self._store, self._rows, each, heir, self._signed_anew)
            for each, heir in heirs.items()
            if heir is not None
        )

    def _signed_anew(self, row: Row, place: Place) -> Values:
        """The values of an entry at its new place; what was refused, or not signed, stays that."""
        former = RowSigner(self._signatures, row.place.owner, self._store)
        signature, data = row.values["signature"], row.values["data"]
        if not self._signer or signature is None or not isinstance(data, bytes):
            return row.values
        if _objection(former, row.place, signature, data):
            return row.values
        return {**row.values, "signature": _signature(self._signer, place, data)}

    def owners(self) -> set[Owner]:
        """Whose entries are in the store; with `NO_OWNER` if pauses without an owner are."""
        known = {each for each in self._rows.owners() if each.known}
        return known | {NO_OWNER for _ in islice(self._rows.of_owner(NO_OWNER, "control"), 1)}

    def _place(self, name: str) -> Place:
        return Place(self.owner if name.startswith(OF_THE_APP) else self._broker, name)


def _forms(place: Place) -> list[list[str]]:
    """What a signature may cover of a place: the name, and the app; the first release that signed
    left the app out. The owner's mark is in each.
    """
    app = place.owner.app
    return [[place.partition, app], [place.partition]] if app else [[place.partition]]


def _signature(signer: RowSigner, place: Place, data: bytes) -> bytes | None:
    """In the form that the release before reads, until ``old_signatures=False``."""
    return signer.sign(Purpose.CONTROL, _forms(place)[-1 if signer.old else 0], data)


def _objection(signer: RowSigner, place: Place, signature: object, data: bytes) -> str:
    """Why an entry is not believed in any form; "" if it is."""
    reasons = [signer.objection(Purpose.CONTROL, form, signature, data) for form in _forms(place)]
    return "" if "" in reasons else reasons[0]


def controls_of(results: object) -> ControlStore | None:
    """The store's control entries; None if there is no store, or if it keeps none."""
    found: ControlStore | None = getattr(results, "controls", None)
    return found
