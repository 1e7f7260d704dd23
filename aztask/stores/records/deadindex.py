"""The index of dead letters, for services that list only the first few.

A Storage queue shows its first 32 messages only. With a result store, the worker adds each dead
letter to the index *before* it stores it in the poison queue, so no dead letter is ever missing
from the index.

Crash window: if the worker dies between the two, the note describes a message that is still alive,
or that its next delivery settles otherwise. Such a note is dropped as soon as the whole poison
queue was read: when the service shows all of its messages, or when a replay or a purge has gone
through them. The same happens to the note of a dead letter that was removed without aztask.

A note belongs to the broker. Releases before 0.2 made notes without an owner; they are listed with
those of every broker that has a queue of that name, because nothing in them says whose they are.
Once a broker's whole poison queue was read, the notes of the dead letters found there are its own,
and older ones without an owner are no longer listed for it. They are not deleted, since they may
be another broker's.

A damaged note hides no other one and does no harm to its dead letter, which is in the service: it
is listed by its key alone, until the dead letter is replayed or purged.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Final, Protocol, runtime_checkable

from aztask.address.owner import NO_OWNER, Owner
from aztask.errors import EncodeError
from aztask.message.bounds import MessageLimits
from aztask.message.envelope import Envelope
from aztask.queues.base import Broker
from aztask.queues.local.payload import envelope_of, payload_of
from aztask.stores.layout import SqlLayout, TablesLayout, number_key
from aztask.stores.records.base import ResultStore
from aztask.stores.records.damage import Columns, Damaged
from aztask.stores.records.owners import is_other_broker
from aztask.stores.rows import Change, Kind, Place, Row, RowStore

UNDER_WAY: Final = 120.0
"""Seconds for which a note without a dead letter may belong to one that is just being stored."""

PAGE: Final = 100
"""Notes that are read at a time."""

_LIMITS: Final = MessageLimits()
"""Of a note's envelope: what a Storage queue took is not refused here."""

SHORT_PAGE: Final = 1000
"""The same for notes without their envelopes."""

_STEPS: Final = (
    """
    CREATE TABLE dead_index (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        queue TEXT NOT NULL, key TEXT NOT NULL, envelope BLOB NOT NULL, reason TEXT NOT NULL,
        description TEXT NOT NULL, at REAL NOT NULL, delivery_count INTEGER NOT NULL);
    CREATE UNIQUE INDEX dead_index_key ON dead_index (queue, key);
    """,
)
_OWNED_STEPS: Final = (
    """
    CREATE TABLE owned_dead_index (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        broker TEXT NOT NULL, queue TEXT NOT NULL, key TEXT NOT NULL, envelope BLOB NOT NULL,
        reason TEXT NOT NULL, description TEXT NOT NULL, at REAL NOT NULL,
        delivery_count INTEGER NOT NULL);
    CREATE UNIQUE INDEX owned_dead_index_key ON owned_dead_index (broker, queue, key);
    CREATE TABLE dead_index_read (
        broker TEXT NOT NULL, queue TEXT NOT NULL, before REAL NOT NULL,
        PRIMARY KEY (broker, queue))
    WITHOUT ROWID;
    """,
)
NOTES: Final = Kind(
    {
        "number": int,
        "envelope": bytes,
        "reason": str,
        "description": str,
        "at": float,
        "delivery_count": int,
    },
    SqlLayout(
        "owned_dead_index",
        "dead_index",
        "queue",
        "key",
        version="number",
        steps={"dead_index": _STEPS, "owned_dead_index": _OWNED_STEPS},
    ),
    TablesLayout("D", "d", "n-", "key", {"why": ("reason", "description")}),
    long="envelope",
    number="number",
)
# Which of the notes without an owner are no longer listed for a broker: those made before a time.
READ: Final = Kind(
    {"before": float},
    SqlLayout("dead_index_read", "dead_index_read", "queue", version=""),
    TablesLayout("D", "d", "r"),
)


@dataclass(frozen=True, slots=True)
class IndexedDeadLetter:
    """The note of one dead letter.

    * `at`: UTC epoch seconds of the note.
    * `damage`: why the note cannot be read; then perhaps the key is known, and nothing else.
    """

    queue: str
    envelope: Envelope
    reason: str
    description: str
    at: float
    delivery_count: int
    damage: str = ""

    @property
    def key(self) -> str:
        """The dead letter's key; see `key_of`."""
        return key_of(self.envelope)


class DeadIndex:
    """The notes of dead letters in one result store. Any thread may call.

    Raises BrokerUnavailable.
    """

    def __init__(self, store: RowStore, owner: Owner = NO_OWNER) -> None:
        """owner: whose notes it has: a broker, or `NO_OWNER`."""
        self.owner = owner.of_broker
        self._store = store
        self._notes = store.of(NOTES)
        self._read = store.of(READ)

    def note(self, letters: Sequence[IndexedDeadLetter]) -> None:
        """Store these notes; an existing note of the same key stays as it is."""
        self._notes.write_all([_made(self.owner, each) for each in letters])

    def notes(self, queue: str) -> Iterator[IndexedDeadLetter]:
        """The notes of a queue in the order in which they were made, damaged or not.

        Those without an owner come last, unless they are older than the last `keep_only`.
        """
        own: set[str] = set()
        mixed = self.owner.known and self._notes.may_be_unowned()
        for row in self._rows(self.owner, queue):
            if mixed:
                own.add(row.place.key)
            yield _note_in(row)
        if mixed:
            before = self._read_before(queue)
            for row in self._rows(NO_OWNER, queue):
                if row.place.key not in own and not (before and _is_old(row, before)):
                    yield _note_in(row)

    def drop(self, queue: str, keys: Collection[str]) -> None:
        """Delete the notes with these keys, also if they have no owner: their letters were ours."""
        owners = [self.owner]
        if self.owner.known and self._notes.may_be_unowned():
            owners.append(NO_OWNER)
        self._notes.remove([Place(owner, queue, key) for owner in owners for key in sorted(keys)])

    def keep_only(self, queue: str, keys: Collection[str], before: float) -> int:
        """Delete notes made before `before` whose keys are not among `keys`; returns how many.

        A note whose key is damaged is deleted together with the last ones. Of the notes without an
        owner, those among `keys` become ours, and the other ones made before `before` are no longer
        listed.

        * `before`: UTC epoch seconds.
        """
        with self._store.joined():
            if self.owner.known and self._notes.may_be_unowned():
                self._take_unowned(queue, keys, before)
            old = [
                each for each in self._rows(self.owner, queue, short=True) if _is_old(each, before)
            ]
            gone = [
                each for each in old if (each.place.key not in keys if each.place.key else not keys)
            ]
            deleted = self._notes.write_all([Change(each.place, None, each) for each in gone])
        return sum(each is not None for each in deleted)

    def _take_unowned(self, queue: str, keys: Collection[str], before: float) -> None:
        """Make the notes among `keys` ours, and list the older others no more."""
        others = False
        for row in self._rows(NO_OWNER, queue):
            if row.place.key in keys:
                self._take(row)
            else:
                others = True
        known = self._read_before(queue)
        if others and (known is None or known < before):
            self._read.put(Place(self.owner, queue), {"before": float(before)})

    def _take(self, row: Row) -> None:
        """Make a note ours, unless we have one of that key; a damaged one is only deleted.

        Crash window: where the store has no transaction, both exist; the next call deletes the old
        one. The dead letter of a damaged one is still in its queue.
        """
        note = _note_in(row)
        if not note.damage:
            self._notes.write(_made(self.owner, note))
        self._notes.write(Change(row.place, None, row))

    def unowned(self, before: float) -> int:
        """How many notes without an owner were made before that time."""
        return sum(_is_old(row, before) for row in self._notes.of_owner(NO_OWNER))

    def adopt(self, old: Owner) -> int:
        """Make the notes of another owner's broker ours; returns how many were found.

        If the process dies in the middle, call it again.
        """
        if not is_other_broker(self.owner, old):
            return 0
        moved = 0
        with self._store.joined():
            for row in self._notes.of_owner(old.of_broker):
                self._take(row)
                moved += 1
            if old.known:
                self._read.remove([row.place for row in self._read.of_owner(old.of_broker)])
        return moved

    def owners(self) -> set[Owner]:
        """Whose notes are in the store; with `NO_OWNER` if some have no owner."""
        return self._notes.owners()

    def _rows(self, owner: Owner, queue: str, *, short: bool = False) -> Iterator[Row]:
        """The rows of a queue, page by page. short: without their envelopes."""
        first, limit = "", SHORT_PAGE if short else PAGE
        while True:
            page = self._notes.range(owner, queue, first, limit=limit, short=short)
            # What has no number was made by another program.
            found = [row for row in page if row.values["number"] is not None]
            yield from found
            if not found or len(page) < limit:
                return
            first = number_key(found[-1].values["number"] + 1)

    def _read_before(self, queue: str) -> float | None:
        (row,) = self._read.get([Place(self.owner, queue)])
        before = None if row is None else row.values["before"]
        return before if isinstance(before, float) else None


@runtime_checkable
class Indexing(Protocol):
    """A result store that keeps an index of dead letters."""

    @property
    def dead_index(self) -> DeadIndex:
        """The store's index of dead letters."""
        ...


def key_of(envelope: Envelope) -> str:
    """The message id, or for a message without one the SHA-256 of its bytes."""
    return envelope.message_id or f"sha256-{sha256(envelope.body).hexdigest()}"


def _made(owner: Owner, letter: IndexedDeadLetter) -> Change:
    """The change that makes a note."""
    values = {
        "envelope": payload_of_dead(letter.envelope),
        "reason": _text(letter.reason),
        "description": _text(letter.description),
        "at": float(letter.at),
        "delivery_count": letter.delivery_count,
    }
    return Change(Place(owner, letter.queue, letter.key), values)


def payload_of_dead(envelope: Envelope) -> bytes:
    """The envelope as bytes; headers of other programs that cannot be written are dropped."""
    try:
        return payload_of(envelope)
    except EncodeError:
        return payload_of(replace(envelope, headers={}, properties={}))


def _text(text: str) -> str:
    """The text, with ``?`` for what is no Unicode: an error's message may be anything."""
    return text.encode("utf-8", "replace").decode()


def _note_in(row: Row) -> IndexedDeadLetter:
    """The note in a row, damaged or not."""
    queue, key, columns = row.place.partition, row.place.key, Columns(row.values)
    try:
        envelope = envelope_of(columns.data("envelope") or b"", _LIMITS)
        if key_of(envelope) != key:  # bytes that are no envelope have another key, too
            raise Damaged("its envelope cannot be read")
        return IndexedDeadLetter(
            queue,
            envelope,
            columns.text("reason"),
            columns.text("description"),
            columns.time("at"),
            columns.count("delivery_count"),
        )
    except Damaged as damage:
        known = Envelope(b"", message_id=key)
        return IndexedDeadLetter(queue, known, "", "", 0.0, 0, damage.reason)


def _is_old(row: Row, before: float) -> bool:
    """True for a note that was made before that time, or whose time is damaged."""
    try:
        return Columns(row.values).time("at") < before
    except Damaged:
        return True


def index_for(broker: Broker, results: ResultStore | None) -> DeadIndex | None:
    """The index of dead letters; None if the service needs none or the store has none."""
    able = broker.capabilities
    if able.paged_peek or able.native_dead_letter or not isinstance(results, Indexing):
        return None
    return results.dead_index
