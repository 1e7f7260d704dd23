"""Where a run's steps are kept, and what it waits for: in a result store, or in memory for tests.

Rules
1. A keeper records steps of one task, in one history. It does not know their order, see
   `aztask.steps.history`.
2. Signals and ends of other tasks are only looked at. What a wait takes is decided by its record.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final, Protocol

from aztask.address.owner import NO_OWNER
from aztask.errors import StepError
from aztask.message.codec import Codec
from aztask.message.message import TaskMessage
from aztask.message.payload import StoredValue, names_in
from aztask.steps.records import (
    RETRYING,
    WAITING,
    StepRecord,
    StepStore,
    arguments_record,
    former_history,
    history_of,
    next_history,
)
from aztask.steps.waits import Signal, WaitStore
from aztask.stores.payloads.payloads import Payloads
from aztask.stores.payloads.store import PayloadKind, belongs
from aztask.stores.records.base import ResultStore, RunRecord
from aztask.stores.rows import Place as RowPlace
from aztask.stores.rows import Row
from aztask.support.clock import Clock
from aztask.support.display import short_repr
from aztask.support.failpoint import hit_in_pool

APART_BYTES: Final = 16 * 1024
"""Encoded values of more bytes are stored apart, where the app has a store for payloads."""

Place = tuple[str, str, str, str]


class StepKeeper(Protocol):
    """Keeps the steps of one run: in a result store, or in memory for code without a worker.

    * `remote`: calls wait for a network.
    * `parks`: a worker runs the task, and goes on with it after a wait.
    """

    remote: bool
    parks: bool

    def now(self) -> float:
        """The time that all who record agree on, UTC epoch seconds."""
        ...

    def read(self) -> list[StepRecord]:
        """The recorded steps, in the order of their numbers."""
        ...

    def write(self, record: StepRecord) -> StepRecord:
        """Record a step; returns the one that is recorded, which another delivery may have been."""
        ...

    def drop(self, place: Place) -> None:
        """Delete a row, if it is as it was read."""
        ...

    def renew(self, args: tuple[Any, ...], kwargs: dict[str, Any], taken: Collection[str]) -> None:
        """Record the arguments with which the task continues in its next history.

        taken: keys of signals that are not to be taken again.

        Raises StepError, EncodeError, TypeError.
        """
        ...

    def forget_former(self) -> None:
        """Remove the history from which the task has continued in this one."""
        ...

    def encode(self, value: Any) -> bytes:
        """A value as bytes. Raises EncodeError."""
        ...

    def kept(self, data: bytes) -> bytes:
        """These bytes, or a reference if they are stored apart."""
        ...

    def decode(self, data: bytes) -> Any:
        """The value in these bytes. Raises CodecError."""
        ...


class TakesArguments(Protocol):
    """A task, as far as its calls are checked: `aztask.Task`."""

    def check_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise TypeError if they do not match its signature."""
        ...

    def plain_arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], given: int = 0
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """These arguments as a message holds them. Raises EncodeError."""
        ...


class StoredSteps:
    """The steps of one task in the result store."""

    parks = True

    def __init__(
        self,
        store: StepStore,
        message: TaskMessage,
        codec: Codec,
        payloads: Payloads | None,
        worker: int,
        task: TakesArguments | None = None,
    ) -> None:
        """payloads: where large values are stored apart. worker: its process id, for failpoints.

        task: that of the message, if the app knows it.
        """
        self._worker = worker
        self._called = task
        self._message = message
        self.remote = store.remote
        self._store = store
        self._task, self._history = message.id, history_of(message)
        self._codec = codec
        self._payloads = payloads
        self._rows: dict[Place, Row] = {}

    def now(self) -> float:
        """The clock of the result store, which all workers share."""
        return self._store.now()

    def read(self) -> list[StepRecord]:
        """All rows of the history: one request."""
        found = self._store.read(self._task, self._history)
        self._rows = {record.place: row for row, record in found}
        return [record for _, record in found]

    def write(self, record: StepRecord) -> StepRecord:
        """One request. If another delivery of the task was faster, its record stands."""
        before = self._rows.get(record.place)
        hit_in_pool("step-ran", self._worker)
        made = self._store.write(self._task, self._history, record, before)
        if made is not None:
            hit_in_pool("step-recorded", self._worker)
            self._rows[record.place] = made
            return record
        found = self._store.get(self._task, self._history, record.place)
        if found is None:  # aztask steps reset has removed it
            self._rows.pop(record.place, None)
            return self.write(record)
        self._rows[record.place] = found[0]
        open_still = found[1].state == WAITING and record.state != WAITING
        if found[1].state == RETRYING or open_still:
            return self.write(record)  # of this delivery before a lost answer, or of an ended one
        return found[1]

    def renew(self, args: tuple[Any, ...], kwargs: dict[str, Any], taken: Collection[str]) -> None:
        """Record them in the next history: one request. If an earlier run has, its record stands.

        Crash window: if the process dies before the record, nothing refers to arguments that are
        stored apart, until ``aztask doctor --collect`` removes them. After it, the task runs again,
        and comes here again.
        """
        message = replace(self._message, payload=None)
        if self._called is not None:
            self._called.check_arguments(args, kwargs)
            args, kwargs = self._called.plain_arguments(args, kwargs)
        (made,) = self._encoded(message, args, kwargs)
        history = next_history(self._history)
        record = replace(arguments_record(made, taken), at=self.now())
        if self._store.write(self._task, history, record, None) is None:
            if self._payloads is not None:
                self._payloads.drop([made])
            self._store.arguments(message, history)  # raises if nothing could go on with them
        hit_in_pool("renewed", self._worker)

    def _encoded(
        self, message: TaskMessage, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[TaskMessage]:
        """The message with these arguments, which are stored apart if they are long."""
        large = self._payloads is not None
        body, kind, encoding = self._codec.encode_arguments(args, kwargs, large=large)
        shown = self._codec.argsrepr
        made = replace(
            message,
            body=body,
            content_type=kind,
            content_encoding=encoding,
            argsrepr=short_repr(args, len(body)) if shown else None,
            kwargsrepr=short_repr(kwargs, len(body)) if shown else None,
        )
        return [made] if self._payloads is None else self._payloads.offload([made])

    def forget_former(self) -> None:
        """Remove its rows, and what they refer to: no run of it can begin any longer."""
        rows = [row for row, _ in self._store.read(self._task, former_history(self._history))]
        if rows and self._store.remove(rows) and self._payloads is not None:
            found = (name for row in rows for name in names_in(row.values["data"]))
            kept = set(names_in((self._message.payload or "").encode()))
            self._payloads.discard(
                name for name in found if belongs(name, self._task) and name not in kept
            )

    def drop(self, place: Place) -> None:
        """Delete it unless another delivery has changed it."""
        row = self._rows.pop(place, None)
        if row is not None:
            self._store.remove([row])

    def encode(self, value: Any) -> bytes:
        """As the result of a task is encoded."""
        return self._codec.encode_value(value, large=self._payloads is not None)

    def kept(self, data: bytes) -> bytes:
        """Long values go to the store of payloads.

        Crash window: if the process dies before the row is written, nothing refers to the payload,
        until ``aztask doctor --collect`` removes it.
        """
        if self._payloads is None or len(data) <= APART_BYTES:
            return data
        stored: StoredValue = self._payloads.keep(PayloadKind.CHECKPOINT, data, owner=self._task)
        return self._codec.encode_value(stored)

    def decode(self, data: bytes) -> Any:
        """Fetches what is stored apart."""
        return self._codec.decode_value(data)


class MemorySteps:
    """The steps of a function that is called without a worker: they end with its context."""

    remote = False
    parks = False

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._codec = Codec()
        self._records: dict[Place, StepRecord] = {}

    def now(self) -> float:
        """The time of this machine."""
        return self._clock.wall()

    def read(self) -> list[StepRecord]:
        """All that was recorded with this context."""
        return list(self._records.values())

    def write(self, record: StepRecord) -> StepRecord:
        """Keep it until the context ends."""
        self._records[record.place] = record
        return record

    def renew(self, args: tuple[Any, ...], kwargs: dict[str, Any], taken: Collection[str]) -> None:
        """Nothing would run the function again."""
        raise StepError("continue_with needs a worker; in a test use app.inline()")

    def forget_former(self) -> None:
        """In memory there is one history alone."""

    def drop(self, place: Place) -> None:
        """Forget the step of this place."""
        self._records.pop(place, None)

    def encode(self, value: Any) -> bytes:
        """As a worker would, so that a test meets the values that no worker can record."""
        return self._codec.encode_value(value)

    def kept(self, data: bytes) -> bytes:
        """They stay where they are."""
        return data

    def decode(self, data: bytes) -> Any:
        """The value as a later run would get it."""
        return self._codec.decode_value(data)


class Outside(Protocol):
    """What a run may wait for: signals, and the ends of other tasks."""

    def signals(self, names: Collection[str], taken: Collection[str]) -> list[Signal]:
        """The first signals of these names for the task, the oldest first.

        Those of keys `taken` are gone.
        """
        ...

    def take(self, signal: Signal) -> None:
        """Remove a signal whose wait is recorded."""
        ...

    def forget(self, taken: Collection[str]) -> None:
        """Remove the signals of these keys, if they are there: their waits are recorded."""
        ...

    def child(self, task_id: str) -> RunRecord | None:
        """The newest run of another task; None if it is not known."""
        ...


class StoredOutside:
    """What the result store has for one task."""

    def __init__(self, waits: WaitStore, results: ResultStore, task_id: str) -> None:
        self._waits, self._results = waits, results
        self._task = task_id

    def signals(self, names: Collection[str], taken: Collection[str]) -> list[Signal]:
        """One request for each name, which gives the oldest signal of it.

        Crash window: if the process dies between the record of a wait and the removal of its
        signal, the next look removes it.
        """
        found = [self._waits.oldest(self._task, name, taken) for name in dict.fromkeys(names)]
        if gone := [row for _, rows in found for row in rows]:
            self._waits.remove(gone)
        signals = [signal for signal, _ in found if signal is not None]
        return sorted(signals, key=lambda each: (each.at, each.key))

    def take(self, signal: Signal) -> None:
        """One request, which changes nothing if another delivery was faster."""
        self._waits.remove([signal.row])

    def forget(self, taken: Collection[str]) -> None:
        """One request, and another one if some are there."""
        found = self._waits.read(self._task).signals
        if rows := [each.row for each in found if each.key in taken]:
            self._waits.remove(rows)

    def child(self, task_id: str) -> RunRecord | None:
        """One request. Raises ForeignId for the id of another app."""
        return self._results.get(task_id)


class MemoryOutside:
    """The signals that a test gives to a function which it calls without a worker."""

    def __init__(self, given: Mapping[str, Iterable[Any]] | None = None) -> None:
        """given: values by name, in order."""
        self._signals: list[Signal] = []
        for name, values in (given or {}).items():
            for value in values:
                number = len(self._signals)
                row = Row(RowPlace(NO_OWNER, "", f"{number}"), {}, "")
                self._signals.append(Signal(name, Codec().encode_value(value), number, row))

    def signals(self, names: Collection[str], taken: Collection[str]) -> list[Signal]:
        """Those that the test gave."""
        return [each for each in self._signals if each.name in names and each.key not in taken]

    def take(self, signal: Signal) -> None:
        """No later wait gets it."""
        self._signals.remove(signal)

    def forget(self, taken: Collection[str]) -> None:
        """Nothing is left to do: `take` has removed them."""

    def child(self, task_id: str) -> RunRecord | None:
        """There is none: children are called."""
