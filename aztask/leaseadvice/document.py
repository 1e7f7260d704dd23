"""The document in which lease advice is shared: one for all queues of one or more apps, as JSON.

Workers, senders and the data pipeline read it; workers and the pipeline write it.

Rules
1. A writer publishes a change to the revision that it read. If another writer stored one in
   between, the write is refused and the writer must read again, so no counts are lost.
2. Reading trusts nothing: anything that is not a document of this version raises DecodeError, and
   the reader keeps the last good one. Leases are clamped to what any service grants. Unknown fields
   are ignored, so that a newer writer may add some.
3. Apps with brokers of their own may share a document, so an entry has the name of its queue and of
   its broker (`entry_name`). An entry without a broker was written by a release before 0.2, or in a
   place that belongs to one broker anyway; a broker without an entry of its own begins with it.
   Releases before 0.2 keep entries with a broker, and do not use them.
4. A worker that is about to publish sets a damaged document aside and begins a new one, because
   nothing could be learned otherwise. It never touches the document of a newer release.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, NoReturn, Protocol

from aztask.address.owner import NO_OWNER, Owner
from aztask.errors import DecodeError
from aztask.leaseadvice.advice import LAST_BIN, Advice, Evidence, Observation
from aztask.queues.lease.bounds import LONGEST
from aztask.stores.rows import Kept, New, change

VERSION: Final = 1
NAME: Final = "leases.json"
"""The document's name in its directory or container."""
AT: Final = " @ "
"""Between the queue and the broker in the name of an entry."""
ASIDE: Final = ".damaged"
"""The suffix in the name of a document that was set aside."""
SIZE_LIMIT: Final = 4 << 20
SHORTEST: Final = 0.1
TEXT_LIMIT: Final = 1000
COUNT_LIMIT: Final = 2.0**53
NO_TIME: Final = 1e-9
"""Seconds: the shortest value that is accepted as a duration."""


@dataclass(frozen=True, slots=True)
class QueueEntry:
    """The document's entry of one queue: the advice, and the counts of the workers."""

    advice: Advice | None = None
    observed: Observation = field(default_factory=Observation)


@dataclass(frozen=True, slots=True)
class LeaseDocument:
    """The shared document.

    * `revision`: rises by one with every publication; 0 if there is none yet.
    * `queues`: the entries by `entry_name`.
    * `owner`: the broker of its reader, whose entries `entry` and `with_entry` use.
    """

    revision: int = 0
    queues: Mapping[str, QueueEntry] = field(default_factory=dict)
    owner: Owner = NO_OWNER

    def entry(self, queue: str) -> QueueEntry:
        """The queue's entry, else the one without a broker; an empty one if there is none."""
        own = self.queues.get(entry_name(queue, self.owner))
        return own or self.queues.get(queue) or QueueEntry()

    def with_entry(self, queue: str, entry: QueueEntry) -> LeaseDocument:
        """A copy with another entry for the queue."""
        return replace(self, queues={**self.queues, entry_name(queue, self.owner): entry})

    def with_advice(self, queue: str, advice: Advice) -> LeaseDocument:
        """A copy with other advice for the queue.

        Its counts stay, except for the losses under the lease that the advice replaces.
        """
        entry = self.entry(queue)
        observed = entry.observed
        former = entry.advice.lease_seconds if entry.advice else None
        if advice.lease_seconds != former:
            observed = observed.after_change()
        return self.with_entry(queue, QueueEntry(advice, observed))


def entry_name(queue: str, owner: Owner) -> str:
    """The name of a queue's entry."""
    return f"{queue}{AT}{owner.broker}" if owner.known else queue


def owner_of(name: str) -> Owner:
    """The broker in the name of an entry; `NO_OWNER` if it has none."""
    return Owner(name.rpartition(AT)[2]) if AT in name else NO_OWNER


@dataclass(frozen=True, slots=True)
class Stored:
    """A document as it was read. `tag` proves later that it has not changed in the store."""

    document: LeaseDocument
    tag: str | None


class LeaseStore(Protocol):
    """The place of the document. Any thread may call, one at a time."""

    @property
    def owner(self) -> Owner:
        """The broker whose entries its documents use; `NO_OWNER` for those without one."""
        ...

    @property
    def remote(self) -> bool:
        """True if a call waits for a network."""
        ...

    def load(self) -> Stored:
        """Read the document; an empty one if none is stored.

        Raises BrokerUnavailable if the store is unreachable, DecodeError if the content is damaged.
        """
        ...

    def publish(self, document: LeaseDocument, based_on: Stored) -> bool:
        """Store `document` as the revision after `based_on`; False if another one was stored first.

        Raises BrokerUnavailable.
        """
        ...

    def set_aside(self) -> str | None:
        """Rename a damaged document, replacing the one renamed before; returns where it is now.

        None if it is not damaged, or is gone. Raises BrokerUnavailable.
        """
        ...

    def close(self) -> None:
        """Close the store's connections, if any."""
        ...


@dataclass(frozen=True, slots=True)
class DocumentCell:
    """The lease document, for `aztask.stores.rows.change`."""

    store: LeaseStore

    def read(self) -> Stored:
        """The document as it is stored."""
        return self.store.load()

    def write(self, document: LeaseDocument, based_on: Stored) -> bool:
        """Publish it as the revision after `based_on`."""
        return self.store.publish(document, based_on)


def adopt(store: LeaseStore, old: Owner) -> int:
    """Make the entries of another owner's broker those of the store's; returns how many.

    An entry that the store's broker has already stays. Repeating it changes nothing. Raises as
    `LeaseStore.load` and `LeaseStore.publish`.
    """
    mine = store.owner
    if not mine.known or old.broker == mine.broker:
        return 0

    def adopted(stored: Stored) -> New[LeaseDocument, int] | Kept[int]:
        queues = dict(stored.document.queues)
        moved = [name for name in queues if owner_of(name) == old.of_broker]
        for name in moved:
            queue = name.rpartition(AT)[0] if old.known else name
            queues.setdefault(entry_name(queue, mine), queues.pop(name))
        if not moved:
            return Kept(0)
        return New(replace(stored.document, queues=queues), len(moved))

    return change(DocumentCell(store), adopted, "the lease document")


def owners(store: LeaseStore) -> set[Owner]:
    """Whose entries are in the document; with `NO_OWNER` if some have no broker."""
    return {owner_of(name) for name in store.load().document.queues}


def publish_advice(store: LeaseStore, advice: Mapping[str, Advice], based_on: Stored) -> bool:
    """Publish advice for some queues; the other queues and all counts stay as they are.

    * `based_on`: the document that the advice was made from. If this returns False, another writer
      has published since: read again and decide again.

    Raises BrokerUnavailable.
    """
    document = based_on.document
    for queue, each in advice.items():
        document = document.with_advice(queue, each)
    return store.publish(document, based_on)


def to_json(document: LeaseDocument) -> bytes:
    """The document as UTF-8 text, readable and in a fixed order."""
    queues = {}
    for name in sorted(document.queues):
        entry = document.queues[name]
        observed = asdict(entry.observed)
        for bins in ("held", "cut"):
            observed[bins] = {str(n): round(c, 3) for n, c in sorted(observed[bins].items())}
        queues[name] = {
            "advice": None if entry.advice is None else asdict(entry.advice),
            "observed": observed,
        }
    text = json.dumps(
        {"version": VERSION, "revision": document.revision, "queues": queues}, indent=1
    )
    return text.encode() + b"\n"


def from_json(data: bytes, owner: Owner = NO_OWNER) -> LeaseDocument:
    """The document that `data` contains, for a reader of this owner. Raises DecodeError."""
    if len(data) > SIZE_LIMIT:
        raise DecodeError(f"the lease document has {len(data)} bytes; at most {SIZE_LIMIT}")
    try:
        record = _Record(json.loads(data), "the lease document")
    except (ValueError, RecursionError):
        raise DecodeError("the lease document is not JSON; delete it to begin anew") from None
    version = record.number("version", 0, COUNT_LIMIT)
    if version != VERSION:
        raise DecodeError(
            f"the lease document has version {version:g}, known here is {VERSION}; update aztask"
        )
    return LeaseDocument(
        int(record.number("revision", 0, COUNT_LIMIT)),
        {name: _entry(value, f"queue {name[:80]!a}") for name, value in record.map("queues")},
        owner,
    )


def is_damaged(data: bytes) -> bool:
    """True if `data` is not a document of this or a newer release."""
    try:
        from_json(data)
    except DecodeError:
        return not _is_newer(data)
    return False


def _is_newer(data: bytes) -> bool:
    try:
        version = json.loads(data)["version"]
        return isinstance(version, int) and version > VERSION
    except (ValueError, TypeError, KeyError, RecursionError):
        return False


def _entry(value: object, what: str) -> QueueEntry:
    record = _Record(value, what)
    advice, observed = record.value("advice"), record.value("observed")
    return QueueEntry(
        None if advice is None else _advice(_Record(advice, f"the advice of {what}")),
        Observation()
        if observed is None
        else _observed(_Record(observed, f"the observation of {what}")),
    )


def _advice(record: _Record) -> Advice:
    lease = record.optional("lease_seconds", NO_TIME, COUNT_LIMIT)
    return Advice(
        None if lease is None else min(max(lease, SHORTEST), LONGEST),
        record.value("renew") is True,
        record.text("reason")[:TEXT_LIMIT],
        _evidence(_Record(record.value("evidence"), "the evidence of an advice")),
        "pipeline" if record.text("source") == "pipeline" else "worker",
        record.number("at", 0.0, COUNT_LIMIT),
        record.text("latest")[:TEXT_LIMIT],
    )


def _evidence(record: _Record) -> Evidence:
    return Evidence(
        record.count("samples"),
        record.optional("p50_seconds", 0.0, COUNT_LIMIT),
        record.optional("p99_seconds", 0.0, COUNT_LIMIT),
        record.count("cut_off"),
        record.count("lost_leases"),
        record.count("failed_settlements"),
    )


def _observed(record: _Record) -> Observation:
    return Observation(
        record.bins("held"),
        record.bins("cut"),
        record.number("lost", 0.0, COUNT_LIMIT),
        record.number("failed", 0.0, COUNT_LIMIT),
        record.count("lost_ever"),
        record.count("failed_ever"),
        record.number("at", 0.0, COUNT_LIMIT),
    )


class _Record:
    """A JSON object that is read field by field; a missing or wrong field raises DecodeError."""

    def __init__(self, value: object, what: str) -> None:
        if not isinstance(value, dict):
            raise DecodeError(f"{what} is not an object")
        self._fields: dict[str, Any] = value
        self._what = what

    def value(self, name: str) -> object:
        return self._fields.get(name)

    def map(self, name: str) -> list[tuple[str, object]]:
        value = self._fields.get(name)
        if not isinstance(value, dict):
            self._wrong(name)
        return list(value.items())

    def text(self, name: str) -> str:
        value = self._fields.get(name)
        if not isinstance(value, str):
            self._wrong(name)
        return value

    def optional(self, name: str, least: float, most: float) -> float | None:
        return None if self._fields.get(name) is None else self.number(name, least, most)

    def count(self, name: str) -> int:
        return int(self.number(name, 0.0, COUNT_LIMIT))

    def number(self, name: str, least: float, most: float) -> float:
        value = self._fields.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            self._wrong(name)
        if not (least <= value <= most and math.isfinite(value)):
            self._wrong(name)
        return float(value)

    def bins(self, name: str) -> dict[int, float]:
        found = {}
        for key, value in self.map(name):
            number = int(key) if key.isascii() and key.isdigit() and len(key) < 6 else -1
            if not 0 <= number <= LAST_BIN:
                self._wrong(name)
            found[number] = _Record({key: value}, self._what).number(key, 0.0, COUNT_LIMIT)
        return found

    def _wrong(self, name: str) -> NoReturn:
        raise DecodeError(f"{self._what}: {name} is missing or wrong")
