"""The rows of a task's history: one for each recorded step.

Rules
1. A task's rows are one partition, under its task id, so that a run reads its history with one
   request. Neither generation nor hop is part of the key: a retry and a replay find the same rows.
2. Each history of the task has a name (`history_of`), with which the keys of its rows begin.
   ``force=True`` and ``dlq replay --fresh`` begin a new one; rows of earlier ones stay until they
   are purged. ``context.continue_with`` begins one, too, whose first run removes the one before.
3. A row is made if it is absent, and changed by compare-and-set. So a frozen worker and the one
   that took over record a step once.
4. With signing keys, a row is signed for its task, its history and its step
   (`SignedRows`). If one is refused, the run fails with `StepsDamaged`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from hashlib import blake2b
from typing import Final

import msgpack

from aztask.address.owner import NO_OWNER, Owner
from aztask.errors import CodecError, ContentRefused, StepsDamaged
from aztask.message.codec import Codec
from aztask.message.message import HISTORY, TaskMessage
from aztask.message.signatures import STORED
from aztask.queues.local.payload import envelope_of, payload_of
from aztask.stores.layout import SqlLayout, TablesLayout
from aztask.stores.records.damage import Columns, Damaged
from aztask.stores.records.owners import is_other_broker
from aztask.stores.rows import Change, KeepsRows, Kind, Place, Row, RowStore, move_rows

# -- The signatures of rows that belong to one task ------------------------------------------------
#
# Its steps, its signals, the parts of its stream.
#
# Rules
# 1. With signing keys, a row is signed for its place. One that was changed, or copied from another
#    place, is refused.
# 2. A row without a signature is obeyed until ``old_signatures=False``: a program without keys
#    wrote it. So keys may come to one process after the other.
# 3. A program without keys reads signed rows, too. It verifies nothing.
# 4. With encryption, the data are encrypted for their task and their place, as a message is that is
#    stored. Without the key, reading raises BrokerUnavailable: the task waits for a worker that has
#    it.

_MARK: Final = STORED.encode()
_UNSIGNED: Final = (
    "it is not signed, and old_signatures is False: a program without signing keys wrote it"
)


class SignedRows:
    """Signs the data of one kind of row, and opens what is believed. Any thread may call."""

    def __init__(self, codec: Codec, kind: str, *, keys_name_tasks: bool = False) -> None:
        """For one kind of row.

        * `codec`: signs, if it has keys. `kind`: such as ``step``; it is part of the signature.
        * `keys_name_tasks`: the key of a row says whose it is, so its signature covers that alone.
        """
        self._codec = codec
        self._kind = kind
        self._whole = not keys_name_tasks

    def closed(self, task_id: str, place: Place, data: bytes) -> bytes:
        """The data with their signature; without keys, as they are."""
        if not self._codec.signs:
            return data
        message = TaskMessage(task_id, self._kind, "", data)
        return payload_of(self._codec.to_envelope(message, stored=self._signed_for(place)))

    def opened(self, row: Row) -> bytes:
        """The data of a row, as `closed` got them. Raises ContentRefused, DecodeError, Damaged."""
        data = row.values["data"]
        if not isinstance(data, bytes):
            raise Damaged("the row has no data")
        envelope = envelope_of(data) if _MARK in data else None
        if envelope is not None and STORED in envelope.content_type:
            stored = self._signed_for(row.place)
            if not self._codec.signs:
                return self._codec.from_unsigned(envelope, "", stored=stored).body
            return self._codec.from_envelope(envelope, "", any_age=True, stored=stored).body
        if self._codec.signs and not self._codec.takes_old:
            raise ContentRefused(_UNSIGNED)
        return data

    def _signed_for(self, place: Place) -> str:
        of = f" of {place.partition}" if self._whole else ""
        return f"{self._kind} {place.key}{of}"


# -- The rows of steps -----------------------------------------------------------------------------

_STEPS: Final = (
    """
    CREATE TABLE steps (
        task TEXT NOT NULL, key TEXT NOT NULL, version INTEGER NOT NULL, data BLOB NOT NULL,
        written_at REAL NOT NULL, PRIMARY KEY (task, key))
    WITHOUT ROWID;
    """,
)
_OWNED_STEPS: Final = (
    """
    CREATE TABLE owned_steps (
        broker TEXT NOT NULL, task TEXT NOT NULL, key TEXT NOT NULL, version INTEGER NOT NULL,
        data BLOB NOT NULL, written_at REAL NOT NULL, PRIMARY KEY (broker, task, key))
    WITHOUT ROWID;
    """,
)
STEPS: Final = Kind(
    {"data": bytes},
    SqlLayout(
        "owned_steps",
        "steps",
        "task",
        "key",
        written="written_at",
        steps={"steps": _STEPS, "owned_steps": _OWNED_STEPS},
    ),
    TablesLayout("H", "h"),
    long="data",
)

FIRST_HISTORY: Final = "0"
_NAME: Final = re.compile(r"[0-9]{1,10}(\.[0-9]{1,10})?")
VERSION: Final = 1
_BETWEEN: Final = ","
"""Between keys of signals: hexadecimal digits, colons, dots and hyphens."""
MOST_ROWS: Final = 100_000

DONE: Final = "done"
FAILED: Final = "failed"
RETRYING: Final = "retrying"
WAITING: Final = "waiting"
STATES: Final = (DONE, FAILED, RETRYING, WAITING)

STEP: Final = "step"
WAIT: Final = "wait"
SIGNAL: Final = "signal"
CALL: Final = "call"
PATCH: Final = "patch"
ANY: Final = "any"
"""Waits for signals and for the ends of tasks, see `RunSteps.wait_any`."""
ARGUMENTS: Final = "arguments"
"""Not a step: the arguments with which a task continues in this history, see `next_history`."""
ARGUMENTS_PLACE: Final = (ARGUMENTS, "", "", "")
ORDER: Final = "order"
"""Not a step: it says since when the code asks for steps in another order than the recorded one."""


def history_of(message: TaskMessage) -> str:
    """The name of the history that a run of this message continues."""
    found = message.extra.get(HISTORY)
    return found if isinstance(found, str) and _NAME.fullmatch(found) else FIRST_HISTORY


def arguments_record(message: TaskMessage, taken: Iterable[str] = ()) -> StepRecord:
    """What `StepStore.arguments` reads: the arguments in a message.

    * `taken`: keys of signals that former histories have taken; `taken_signals` gives them.
    """
    values = (message.body, message.content_type, message.content_encoding, message.payload)
    packed = msgpack.packb([*values, message.argsrepr, message.kwargsrepr])
    return StepRecord(
        ARGUMENTS, DONE, "", "", "", False, 0, packed, 0.0,
        queue=message.queue, source=_BETWEEN.join(taken),
    )  # fmt: skip


def taken_signals(records: Iterable[StepRecord]) -> set[str]:
    """The keys of the signals that the waits of a history have taken, and those before it."""
    found: set[str] = set()
    for each in records:
        if each.kind == ARGUMENTS:
            found.update(each.source.split(_BETWEEN))
        else:
            found.add(each.source)
    return found - {""}


def is_renewed(message: TaskMessage) -> bool:
    """True if its task has continued with other arguments, see `next_history`."""
    return "." in history_of(message)


def next_history(name: str) -> str:
    """The history in which a task continues with other arguments: ``0.1`` after ``0``.

    Each is kept until the next one has begun.
    """
    first, _, number = name.partition(".")
    return f"{first}.{int(number or 0) + 1}"


def former_history(name: str) -> str:
    """The history before that of `next_history`."""
    first, _, number = name.partition(".")
    return first if number in ("", "1") else f"{first}.{int(number) - 1}"


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A step as it was recorded.

    * `kind`: `STEP`, `WAIT` (a sleep), `SIGNAL`, `CALL` or `ANY` (waits for one), `PATCH`, `ORDER`
      or `ARGUMENTS`.
    * `state`: `DONE`, `FAILED`, `RETRYING`, or `WAITING` for a wait that has begun.
    * `name`: as the code names it. `branch`: "" for the main line, else the branch of a `gather`.
    * `key`: the number of this call among those of the same name in the branch, or the text that
      the code gave. `keyed`: the code gave it.
    * `number`: steps of a history are recorded in this order.
    * `value`: the encoded value, or the encoded error; of a wait that has begun, the payloads that
      the task's message refers to.
    * `at`: when it was recorded; `due`: before when it is not retried, or until when it waits. UTC
      epoch seconds.
    * `attempts`: how often it failed with a retry policy of its own.
    * `queue`: the queue of the task.
    * `source`: of a wait, the names of its signals, and then the key of the one that it took; or
      the id of the child. Of `ARGUMENTS`, the keys of signals that former histories have taken.
    """

    kind: str
    state: str
    name: str
    branch: str
    key: str
    keyed: bool
    number: int
    value: bytes
    at: float
    due: float = 0.0
    attempts: int = 0
    queue: str = ""
    source: str = ""

    @property
    def place(self) -> tuple[str, str, str, str]:
        """What identifies it in its history."""
        return (self.kind, self.branch, self.name, self.key)

    @property
    def label(self) -> str:
        """Its name for people: ``charge``, ``charge #2``, ``charge [card-7]``."""
        if self.keyed:
            return f"{self.name} [{self.key}]"
        return self.name if self.key == "1" else f"{self.name} #{self.key}"

    def pack(self) -> bytes:
        """The record as bytes; `read_record` reads them."""
        values = [getattr(self, name) for name in _FIELDS]
        packed: bytes = msgpack.packb([VERSION, *values])
        return packed


_FIELDS: Final = tuple(each.name for each in fields(StepRecord))


def read_record(data: bytes) -> StepRecord:
    """The record that `StepRecord.pack` wrote. Raises Damaged."""
    found = Columns({"step": data}).unpacked("step")
    if not isinstance(found, list) or found[:1] != [VERSION] or len(found) <= len(_FIELDS):
        raise Damaged("the step is wrong; a newer aztask may know it")
    columns = Columns(dict(zip(_FIELDS, found[1:], strict=False)))
    record = StepRecord(
        columns.text("kind"),
        columns.text("state"),
        columns.text("name"),
        columns.text("branch"),
        columns.text("key"),
        columns.flag("keyed"),
        columns.count("number"),
        columns.data("value") or b"",
        columns.time("at"),
        columns.time("due"),
        columns.count("attempts"),
        columns.text("queue"),
        columns.text("source"),
    )
    if record.state not in STATES:
        raise Damaged(f"its state {record.state!r} is unknown")
    return record


@lru_cache(4096)
def digest_of(*texts: str) -> str:
    """32 hexadecimal digits that these texts have, and no others."""
    packed: bytes = msgpack.packb(texts, unicode_errors="surrogatepass")
    return blake2b(packed, digest_size=16).hexdigest()


class StepStore:
    """The histories in one result store. Any thread may call."""

    def __init__(self, store: RowStore, owner: Owner, codec: Codec) -> None:
        """owner: whose tasks; histories belong to the broker. codec: signs, if it has keys."""
        self.owner = owner.of_broker
        self.remote = store.remote
        self._store = store
        self._rows = store.of(STEPS)
        self._signed = SignedRows(codec, "step")

    def now(self) -> float:
        """The store's time, UTC epoch seconds."""
        return self._store.now()

    def read(self, task_id: str, history: str) -> list[tuple[Row, StepRecord]]:
        """The rows of one history, in the order of their numbers. Raises StepsDamaged."""
        rows = self._rows.range(self.owner, task_id, f"{history}:", f"{history};", MOST_ROWS)
        found = [(row, self._opened(row)) for row in rows]
        return sorted(found, key=lambda pair: pair[1].number)

    def get(
        self, task_id: str, history: str, place: tuple[str, ...]
    ) -> tuple[Row, StepRecord] | None:
        """One row as it is now; None if there is none. Raises StepsDamaged."""
        (row,) = self._rows.get([self._place(task_id, history, place)])
        return None if row is None else (row, self._opened(row))

    def write(
        self, task_id: str, history: str, record: StepRecord, before: Row | None
    ) -> Row | None:
        """Make a row, or replace the one that was read; None if that is not the current one.

        Raises EncodeError if the store cannot hold it, BrokerUnavailable.
        """
        place = self._place(task_id, history, record.place)
        return self._rows.write(Change(place, {"data": self._closed(place, record)}, before))

    def arguments(self, message: TaskMessage, history: str) -> TaskMessage | None:
        """The message with the arguments with which its task continues in this history.

        None if the history is gone. Raises StepsDamaged.
        """
        found = self.get(message.id, history, ARGUMENTS_PLACE)
        if found is None:
            return None
        try:
            values = msgpack.unpackb(found[1].value)
            body, content_type, encoding, payload, args, kwargs = values
        except ValueError as error:
            raise StepsDamaged(f"the arguments of task {message.id} are damaged: {error}") from None
        return replace(
            message,
            body=body,
            content_type=content_type,
            content_encoding=encoding,
            payload=payload,
            argsrepr=args,
            kwargsrepr=kwargs,
        )

    def remove(self, rows: Sequence[Row]) -> int:
        """Delete rows that did not change since they were read; returns how many."""
        changes = [Change(row.place, None, row) for row in rows]
        return sum(made is not None for made in self._rows.write_all(changes))

    def histories(self, task_id: str) -> list[str]:
        """The names of the task's histories, the oldest first."""
        rows = self._rows.range(self.owner, task_id, limit=MOST_ROWS)
        names = {row.place.key.partition(":")[0] for row in rows}
        return sorted(names, key=lambda name: (len(name), name))

    def old(self, before: float) -> Iterator[Row]:
        """Rows that were written before a time, by task. Reads all rows."""
        yield from self._rows.of_owner(self.owner, written_before=before)

    def opened(self, rows: Iterable[Row]) -> Iterator[StepRecord]:
        """The records in rows; those that cannot be read are skipped."""
        for row in rows:
            try:
                yield self._opened(row)
            except StepsDamaged:
                continue

    def owners(self) -> set[Owner]:
        """Whose histories are in the store."""
        return self._rows.owners()

    def adopt(self, old: Owner) -> int:
        """Make the histories of another owner's broker ours; returns how many rows were found.

        Without this, an adopted task would run its recorded steps again.
        """
        if not is_other_broker(self.owner, old):
            return 0
        return move_rows(self._store, self._rows, old.of_broker, self.owner)

    def _place(self, task_id: str, history: str, place: tuple[str, ...]) -> Place:
        return Place(self.owner, task_id, f"{history}:{digest_of(*place)}")

    def _closed(self, place: Place, record: StepRecord) -> bytes:
        return self._signed.closed(place.partition, place, record.pack())

    def _opened(self, row: Row) -> StepRecord:
        try:
            return read_record(self._signed.opened(row))
        except (CodecError, Damaged) as error:
            raise StepsDamaged(
                f"a recorded step of task {row.place.partition} cannot be read ({error}); replay "
                "it with aztask dlq replay --fresh, or see aztask steps show"
            ) from None


def steps_of(results: object, codec: Codec) -> StepStore | None:
    """The histories in a result store; None if there is none, or if it keeps none."""
    if not isinstance(results, KeepsRows):
        return None
    return StepStore(results.rows, results.owner or NO_OWNER, codec)
