"""The index of dead letters, for services that list only the first few.

A Storage queue shows its first 32 messages only. With a result store, the worker adds each dead
letter to the index *before* it stores it in the poison queue, so no dead letter is ever missing
from the index.

Crash window: if the worker dies between the two, the note describes a message that is still alive,
or that its next delivery settles otherwise. Such a note is dropped as soon as the whole poison
queue was read: when the service shows all of its messages, or when a replay or a purge has gone
through them. The same happens to the note of a dead letter that was removed without aztask.

A damaged note hides no other one and does no harm to its dead letter, which is in the service: it
is listed by its key alone, until the dead letter is replayed or purged.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final, Protocol, runtime_checkable

from aztask.brokers.base import Broker
from aztask.brokers.local.payload import envelope_of
from aztask.message.envelope import Envelope
from aztask.results.base import ResultStore
from aztask.results.damage import Columns, Damaged

UNDER_WAY: Final = 120.0
"""Seconds for which a note without a dead letter may belong to one that is just being stored."""


@dataclass(frozen=True, slots=True)
class IndexedDeadLetter:
    """The note of one dead letter.

    * `number`: rises with each note of a store; 0 before it is stored.
    * `at`: UTC epoch seconds of the note.
    * `damage`: why the note cannot be read; then only the number and perhaps the key are known.
    """

    queue: str
    envelope: Envelope
    reason: str
    description: str
    at: float
    delivery_count: int
    number: int = 0
    damage: str = ""

    @property
    def key(self) -> str:
        """The dead letter's key; see `key_of`."""
        return key_of(self.envelope)


class DeadIndex(Protocol):
    """Stores notes of dead letters. Any thread may call. Raises BrokerUnavailable."""

    def note(self, letters: Sequence[IndexedDeadLetter]) -> None:
        """Store these notes; an existing note of the same key stays as it is."""
        ...

    def page(self, queue: str, after: int, limit: int) -> list[IndexedDeadLetter]:
        """Up to `limit` notes of the queue after the number `after`, in order, damaged or not."""
        ...

    def drop(self, queue: str, keys: Collection[str]) -> None:
        """Delete the notes with these keys."""
        ...

    def keep_only(self, queue: str, keys: Collection[str], before: float) -> int:
        """Delete notes made before `before` whose keys are not among `keys`; returns how many.

        * `before`: UTC epoch seconds.
        """
        ...


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


def read_note(queue: str, number: int, values: Mapping[str, Any]) -> IndexedDeadLetter:
    """The note with these fields, damaged or not.

    The fields are ``key``, ``envelope``, ``reason``, ``description``, ``at`` and
    ``delivery_count``.
    """
    columns = Columns(values)
    try:
        key, envelope = columns.text("key"), envelope_of(columns.data("envelope") or b"")
        if not _is_whole(envelope) or key_of(envelope) != key:
            raise Damaged("its envelope cannot be read")
        return IndexedDeadLetter(
            queue,
            envelope,
            columns.text("reason"),
            columns.text("description"),
            columns.time("at"),
            columns.count("delivery_count"),
            number,
        )
    except Damaged as damage:
        return damaged_note(queue, number, values.get("key"), damage)


def damaged_note(queue: str, number: int, key: object, damage: Damaged) -> IndexedDeadLetter:
    """A note for a row that cannot be read: its number and, if possible, its key."""
    known = Envelope(b"", message_id=key if isinstance(key, str) else "")
    return IndexedDeadLetter(queue, known, "", "", 0.0, 0, number, damage.reason)


def _is_whole(envelope: Envelope) -> bool:
    return (
        isinstance(envelope.body, bytes)
        and isinstance(envelope.headers, dict)
        and isinstance(envelope.properties, dict)
        and isinstance(envelope.message_id, str)
    )


def index_for(broker: Broker, results: ResultStore | None) -> DeadIndex | None:
    """The index of dead letters; None if the service needs none or the store has none."""
    able = broker.capabilities
    if able.paged_peek or able.native_dead_letter or not isinstance(results, Indexing):
        return None
    return results.dead_index
