"""The index of dead letters: what a result store keeps where the service shows only the first few.

A Storage queue shows its first 32 messages and no more. With a result store, the worker notes each
dead letter there *before* it is stored in the poison queue, so no dead letter is ever missing.

Crash window: if the worker dies between the two, the note speaks of a message that is still alive,
or was settled otherwise by its next delivery. Such a note, like that of a dead letter which
somebody removed past aztask, is dropped as soon as all that is there was seen: when the service
shows all of them, or when a replay or a purge has gone through them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Final, Protocol, runtime_checkable

from aztask.brokers.base import Broker
from aztask.envelope import Envelope
from aztask.results.base import ResultStore

UNDER_WAY: Final = 120.0
"""Seconds for which a note may be of a dead letter that is just being stored."""


@dataclass(frozen=True, slots=True)
class NotedDead:
    """A dead letter as it was noted. number: rises with each note of a store; 0 before.

    at: UTC epoch seconds of the note.
    """

    queue: str
    envelope: Envelope
    reason: str
    description: str
    at: float
    delivery_count: int
    number: int = 0

    @property
    def key(self) -> str:
        """What it is known by; see `key_of`."""
        return key_of(self.envelope)


class DeadIndex(Protocol):
    """Any thread may call. Raises BrokerUnavailable."""

    def note(self, letters: Sequence[NotedDead]) -> None:
        """Keep these; one that is known already stays as it was noted first."""
        ...

    def page(self, queue: str, after: int, limit: int) -> list[NotedDead]:
        """Up to `limit` notes of the queue behind the number `after`, in order."""
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


def index_for(broker: Broker, results: ResultStore | None) -> DeadIndex | None:
    """The index, where the service needs one and the store has one."""
    able = broker.capabilities
    if able.paged_peek or able.native_dead_letter or not isinstance(results, Indexing):
        return None
    return results.dead_index
