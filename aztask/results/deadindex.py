"""The index of dead letters: what a result store keeps where the service shows only the first few.

A Storage queue shows its first 32 messages and no more. With a result store, the worker notes each
dead letter there *before* it is stored in the poison queue, so no dead letter is ever missing.

Crash window: if the worker dies between the two, the note speaks of a message that is still alive,
or was settled otherwise by its next delivery. Such a note, like that of a dead letter which
somebody removed past aztask, is dropped as soon as all that is there was seen: when the service
shows all of them, or when a replay or a purge has gone through them.

A note that is damaged hides no other one, and takes nothing from its dead letter, which lies in the
service: it is listed by its key alone, until the dead letter is replayed or purged.
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
"""Seconds for which a note may be of a dead letter that is just being stored."""


@dataclass(frozen=True, slots=True)
class IndexedDeadLetter:
    """A dead letter as it was noted. number: rises with each note of a store; 0 before.

    at: UTC epoch seconds of the note. damage: why the note cannot be read; then only the number and
    perhaps the key are known.
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
        """What it is known by; see `key_of`."""
        return key_of(self.envelope)


class DeadIndex(Protocol):
    """Any thread may call. Raises BrokerUnavailable."""

    def note(self, letters: Sequence[IndexedDeadLetter]) -> None:
        """Keep these; one that is known already stays as it was noted first."""
        ...

    def page(self, queue: str, after: int, limit: int) -> list[IndexedDeadLetter]:
        """Up to `limit` notes of the queue behind the number `after`, in order, damaged or not."""
        ...

    def drop(self, queue: str, keys: Collection[str]) -> None:
        """These are gone."""
        ...

    def keep_only(self, queue: str, keys: Collection[str], before: float) -> int:
        """Drop the notes made before that time whose dead letters are not among `keys`; how many.

        before: UTC epoch seconds.
        """
        ...


@runtime_checkable
class Indexing(Protocol):
    """A result store that keeps an index of dead letters."""

    @property
    def dead_index(self) -> DeadIndex:
        """The index."""
        ...


def key_of(envelope: Envelope) -> str:
    """The message id; for what has none the SHA-256 of its bytes."""
    return envelope.message_id or f"sha256-{sha256(envelope.body).hexdigest()}"


def read_note(queue: str, number: int, values: Mapping[str, Any]) -> IndexedDeadLetter:
    """The note with these fields: ``key``, ``envelope``, ``reason``, ``description``, ``at`` and
    ``delivery_count``; damaged or not.
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
    """What is known of a note that cannot be read."""
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
    """The index, where the service needs one and the store has one."""
    able = broker.capabilities
    if able.paged_peek or able.native_dead_letter or not isinstance(results, Indexing):
        return None
    return results.dead_index
