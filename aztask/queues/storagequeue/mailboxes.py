"""Mailboxes on Storage queues: a queue for each, which says in its metadata what it is bound to.

Rules
1. Publishing lists the mailboxes, with one request, and sends one message to each that is bound.
   Events use the list of the last `FRESH` seconds.
2. A mailbox is polled every `POLL` seconds: 172,800 requests a day. It is kept by one request every
   `LIFETIME` / 3 seconds.
3. The service removes nothing by itself. Opening a mailbox removes those that have expired: their
   processes have died.
4. Opening and removing need the permission to create, list and delete queues; publishing needs the
   permission to list them.
5. Notes that are kept are in the metadata of queues without messages, a queue of its own for each
   `StorageMailboxes`, so that no two processes change one; a further one when it is full. A note is
   one request, and reading them all is one. They are listed and removed as mailboxes are, also by
   an earlier release, for which they are bound to nothing.
"""

from __future__ import annotations

import base64
import binascii
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final
from uuid import uuid4

from azure.core.exceptions import AzureError

from aztask.errors import AztaskError, QueueNotFound
from aztask.message.envelope import Envelope
from aztask.queues.base import KEPT_SECONDS, PREFIX, Binding, Receiver, queue_name
from aztask.queues.storagequeue.errors import failure_of
from aztask.queues.storagequeue.messages import StorageClient
from aztask.support.clock import Clock

LIFETIME: Final = 900.0
FRESH: Final = 10.0
POLL: Final = 0.5
LAG: Final = 2.0
"""Seconds: a poll is late by `POLL`, and by what a busy machine adds."""

SECONDS: Final = 10.0

NOTE_BYTES: Final = 6000
"""Of the 8 KiB that the service allows for metadata, names included."""
MOST_NOTE_QUEUES: Final = 500
"""More would make a listing long; the one that expires first is removed."""

_UNTIL, _BINDINGS, _NOTES = "expires_at", "bindings", "notes"


class StorageMailboxes:
    """The mailboxes of one account.

    * `send`: sends envelopes to a queue.
    * `receiver`: opens a receiver of a queue that polls every `POLL` seconds, deleting or not.
    """

    def __init__(
        self,
        client: StorageClient,
        clock: Clock,
        send: Callable[[str, Sequence[Envelope]], None],
        receiver: Callable[[str, bool], Receiver],
    ) -> None:
        self._client = client
        self._clock = clock
        self._send = send
        self._receiver = receiver
        self._noting = threading.Lock()
        self._noted: dict[str, tuple[str, list[tuple[float, str]]]] = {}  # a queue, and its notes
        self._listed: dict[str, list[Binding]] = {}
        self._listed_at = float("-inf")

    @property
    def lifetime(self) -> float:
        """Seconds after which a mailbox is removed that was not opened again."""
        return LIFETIME

    @property
    def lag(self) -> float:
        """Both are polled, each at its own times."""
        return LAG

    def open(self, name: str, bindings: Sequence[Binding]) -> None:
        """Create the mailbox or keep it, with exactly these bindings; remove expired ones."""
        queue = queue_name(name)
        metadata = {
            _UNTIL: f"{self._clock.wall() + LIFETIME:.0f}",
            _BINDINGS: _text([[each.exchange, each.key, each.kind] for each in bindings]),
        }
        if not self._create(queue, metadata):
            self._do(queue, "set_queue_metadata", metadata)
        self._list(remove=True)

    def _create(self, queue: str, metadata: dict[str, str]) -> bool:
        """Create the queue; returns False if it exists."""
        try:
            self._client.queue(queue).create_queue(metadata=metadata, read_timeout=SECONDS)
        except AzureError as error:
            failure = failure_of(error, queue)
            if failure.code != "QueueAlreadyExists":
                raise failure.error from None
            return False
        return True

    def _do(self, queue: str, call: str, *arguments: Any) -> None:
        try:
            getattr(self._client.queue(queue), call)(*arguments, read_timeout=SECONDS)
        except AzureError as error:
            raise failure_of(error, queue).error from None

    def _list(self, *, remove: bool = False) -> dict[str, list[Binding]]:
        """The bindings of each mailbox that has not expired, by its queue."""
        now, found, expired = self._clock.wall(), {}, []
        for queue, metadata in self._metadata():
            until, bindings = _read(metadata)
            if until < now:
                expired.append(queue)
            else:
                found[queue] = bindings
        for queue in expired if remove else ():
            with suppress(AztaskError):  # another process may remove it too
                self._do(queue, "delete_queue")
        self._listed, self._listed_at = found, self._clock.monotonic()
        return found

    def _metadata(self) -> list[tuple[str, Mapping[str, str]]]:
        """The metadata of each mailbox and of each queue of notes."""
        try:
            listed = self._client.service.list_queues(
                name_starts_with=PREFIX, include_metadata=True, read_timeout=SECONDS
            )
            return [(str(each.name), each.metadata or {}) for each in listed]
        except AzureError as error:
            raise failure_of(error, None).error from None

    def receiver(self, name: str, *, delete: bool) -> Receiver:
        """A receiver of the mailbox."""
        return self._receiver(queue_name(name), delete)

    def publish(self, exchange: str, key: str, envelope: Envelope, *, recent: bool = False) -> bool:
        """Send a copy to each mailbox that is bound for it; False if there is none."""
        fresh = recent and self._clock.monotonic() - self._listed_at < FRESH
        listed = self._listed if fresh else self._list()
        reached = False
        for queue, bindings in listed.items():
            if any(binding.matches(exchange, key) for binding in bindings):
                with suppress(QueueNotFound):  # removed since
                    self._send(queue, [envelope])
                    reached = True
        return reached

    def delete(self, name: str) -> None:
        """Remove the mailbox with its messages; nothing happens if there is none."""
        with suppress(QueueNotFound):
            self._do(queue_name(name), "delete_queue")

    def keep(self, exchange: str, notes: Sequence[str]) -> None:
        """Keep notes for mailboxes that are opened later, beside those of this process."""
        with self._noting:
            now = self._clock.wall()
            queue, kept = self._noted.pop(exchange, ("", []))
            kept = [(at, note) for at, note in kept if at > now - KEPT_SECONDS]
            for note in notes:
                wanted = [*kept, (now, note)]
                if len(_noted(exchange, wanted)) > NOTE_BYTES:
                    self._note(queue, exchange, kept)
                    queue, wanted = "", [(now, note)]
                kept = wanted
            self._noted[exchange] = (self._note(queue, exchange, kept), kept)

    def _note(self, queue: str, exchange: str, kept: list[tuple[float, str]]) -> str:
        """Write notes to this process's queue for them, or to a new one; returns its name."""
        if not kept:
            return queue
        metadata = {
            _UNTIL: f"{kept[-1][0] + KEPT_SECONDS:.0f}",
            _BINDINGS: _text([]),
            _NOTES: _noted(exchange, kept),
        }
        with suppress(QueueNotFound):  # it was removed
            if queue:
                self._do(queue, "set_queue_metadata", metadata)
                return queue
        found = sorted((_read(each)[0], name) for name, each in self._metadata() if _NOTES in each)
        for _, oldest in found[: max(0, len(found) + 1 - MOST_NOTE_QUEUES)]:
            with suppress(AztaskError):  # another process may remove it too
                self._do(oldest, "delete_queue")
        queue = queue_name(f"{_NOTES} {uuid4()}")
        self._create(queue, metadata)
        return queue

    def kept(self, exchange: str) -> list[str]:
        """The notes of the exchange."""
        now, found = self._clock.wall(), dict[str, None]()
        for _, metadata in self._metadata():
            if _read(metadata)[0] >= now:
                found.update(dict.fromkeys(_notes(metadata, exchange)))
        return list(found)


def _text(value: object) -> str:
    """JSON as metadata may hold it."""
    return base64.b64encode(json.dumps(value).encode("ascii")).decode("ascii")


def _noted(exchange: str, kept: Sequence[tuple[float, str]]) -> str:
    return _text([exchange, [note for _, note in kept]])


def _notes(metadata: Mapping[str, str], exchange: str) -> list[str]:
    """The notes of one queue that are for the exchange; none if they are damaged."""
    try:
        of, notes = json.loads(base64.b64decode(metadata[_NOTES], validate=True))
        return [note for note in notes if isinstance(note, str)] if of == exchange else []
    except (KeyError, ValueError, TypeError, binascii.Error):
        return []


def _read(metadata: Mapping[str, str]) -> tuple[float, list[Binding]]:
    """(UTC epoch seconds when it expires, its bindings); what is damaged expires now."""
    try:
        until = float(metadata[_UNTIL])
        rows = json.loads(base64.b64decode(metadata[_BINDINGS], validate=True))
        return until, [Binding(str(exchange), str(key), str(kind)) for exchange, key, kind in rows]
    except (KeyError, ValueError, TypeError, binascii.Error):
        return 0.0, []
