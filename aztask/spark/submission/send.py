"""Sends one partition: rows become envelopes, envelopes go to the broker, every row is counted.

Rules
1. Each row is either sent, or counted as failed with its reason. No row is dropped silently.
2. Messages that the service did not confirm, or refused because it is busy or full, are sent again
   under the same ids until patience ends. Then the partition fails, and with it the job.
3. A row that cannot be sent (a value too long, a NaN with the json serializer, a date that Python
   does not have) fails alone: the others are sent, and the submission is reported as failed.
4. An event ``enqueued`` is written for each message that the broker accepted, and for no other. A
   message that stayed unconfirmed to the end gets ``send_unconfirmed`` instead.

Crash window: a Python worker or an executor that dies here has sent some of the partition's rows.
When Spark retries the partition, or the caller submits again, the same rows get the same ids, and
workers with a result store run each id once. Without a result store, a task that was sent twice
runs twice.
"""

from __future__ import annotations

import gc
import os
import random
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any, Final

import numpy as np
import pyarrow as pa
from pyspark import TaskContext

from aztask.app import App
from aztask.errors import (
    BrokerError,
    BrokerUnavailable,
    CodecError,
    ConfigurationError,
    QueueFull,
    SendUnconfirmed,
)
from aztask.message.envelope import Envelope
from aztask.message.template import Template
from aztask.spark.submission.matching import readable
from aztask.spark.submission.submission import Submission, id_maker
from aztask.stores.events.sink import Event, EventKind
from aztask.support.display import one_line, safe_str, short_repr

# -- Pacing ----------------------------------------------------------------------------------------
#
# Pacing: how fast one partition sends, and how long it waits when the service is busy.
#
# Rules
# 1. A partition waits before it sends: after t seconds it has sent at most rate * t messages, in
#    whatever batches. Unused time is not saved up.
# 2. After each refusal the pause doubles, up to `MAX_PAUSE`. It is never shorter than the service
#    asked for. Pauses are random, so that partitions do not retry together.
# 3. Patience is counted from the first failure after the last success.

FIRST_PAUSE = 0.2
MAX_PAUSE = 30.0


class SendingPace:
    """The sending rate of one partition, in messages a second; None: unlimited."""

    def __init__(
        self,
        rate: float | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._rate = rate
        self._clock = clock
        self._sleep = sleep
        self._paid_until = clock()

    def batch(self, limit: int) -> int:
        """The size of a batch: half a second's messages, at least 1 and at most `limit`."""
        return limit if self._rate is None else max(1, min(limit, int(self._rate / 2)))

    def pay(self, count: int) -> None:
        """Wait until the rate allows `count` more messages."""
        if self._rate is None:
            return
        now = self._clock()
        self._paid_until = max(self._paid_until, now) + count / self._rate
        self._sleep(self._paid_until - now)


class Backoff:
    """The pauses between attempts, until `seconds` have passed without a success."""

    def __init__(
        self,
        seconds: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._seconds = seconds
        self._clock = clock
        self._sleep = sleep
        self._chance = chance
        self._give_up_at: float | None = None
        self._pause = FIRST_PAUSE

    def succeeded(self) -> None:
        """Reset pause and patience after a success."""
        self._give_up_at = None
        self._pause = FIRST_PAUSE

    def wait(self, asked: float | None) -> bool:
        """Pause before the next attempt. False, without a pause, if patience has ended.

        asked: seconds to wait that the service asked for.
        """
        now = self._clock()
        if self._give_up_at is None:
            self._give_up_at = now + self._seconds
        pause = max(self._pause * (0.5 + self._chance()), asked or 0.0)
        if now + pause > self._give_up_at:
            return False
        self._pause = min(2 * self._pause, MAX_PAUSE)
        self._sleep(pause)
        return True


# -- Sending ---------------------------------------------------------------------------------------


BATCH: Final = 500
"""Messages in one send, as in `App.map`."""
MAX_ERRORS: Final = 5
REASON_LIMIT: Final = 1000
"""Characters of a failure's reason that are kept."""

REPORT_SCHEMA: Final = (
    "partition int, rows long, sent long, retried long, failed long, errors string"
)


@dataclass(frozen=True)
class PartitionReport:
    """The outcome of one partition: rows = sent + failed.

    retried: repeated sends of a message. errors: the first few reasons of failures, one per line.
    """

    partition: int
    rows: int
    sent: int
    retried: int
    failed: int
    errors: str = ""


def send_batches(
    submission: Submission, columns: Sequence[str], batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """For ``DataFrame.mapInArrow``: send this task's rows, return one row of `REPORT_SCHEMA`.

    columns: the names of the batches' columns, which Spark could not handle.
    """
    named = (pa.RecordBatch.from_arrays(batch.columns, list(columns)) for batch in batches)
    report = send_partition(submission, named, partition=partition_number())
    names = [each.name for each in fields(report)]
    yield pa.RecordBatch.from_pydict(
        {name: [value] for name, value in zip(names, astuple(report), strict=True)},
        schema=pa.schema(
            [
                ("partition", pa.int32()),
                *((name, pa.int64()) for name in names[1:5]),
                ("errors", pa.string()),
            ]
        ),
    )


def partition_number() -> int:
    """The number of this task's partition; 0 outside of Spark."""
    context = TaskContext.get()
    return context.partitionId() if context is not None else 0


def send_partition(
    submission: Submission, batches: Iterable[pa.RecordBatch], *, partition: int
) -> PartitionReport:
    """Send the rows of one partition. Columns are looked up by name.

    Raises ConfigurationError, BrokerUnavailable (when the submission's patience ends),
    QueueNotFound and the other errors of a broker.
    """
    rate = None
    if submission.rate is not None:
        writers = submission.writers or 1
        if partition >= writers:
            raise ConfigurationError(
                f"writers={writers} partitions share the rate, but there are more: write "
                f"df.coalesce({writers}), or set writers to their number"
            )
        rate = submission.rate / writers
    app = submission.open_app()
    # Otherwise each garbage collection goes through all loaded modules while rows are sent.
    gc.freeze()
    try:
        return _Partition(submission, app, partition, SendingPace(rate)).send(batches)
    finally:
        gc.unfreeze()
        app.close()


class _Partition:
    """The state of one partition while its rows are sent."""

    def __init__(
        self,
        submission: Submission,
        app: App,
        partition: int,
        pace: SendingPace,
        patience: Backoff | None = None,
    ) -> None:
        self._submission = submission
        self._app = app
        self._partition = partition
        self._pace = pace
        self._patience = patience or Backoff(submission.patience)
        self._queue = submission.queue or app.settings.default_queue
        expires, task = submission.expires, app.tasks.get(submission.task)
        self._template = Template(
            app.codec,
            submission.task,
            self._queue,
            delay=submission.delay,
            expires_at=None if expires is None else time.time() + expires,
            secret=task is not None and task.conversion.secret,
        )
        self._id = id_maker(submission.submission_id)
        self._columns = submission.columns or ()
        self._names = [parameter for parameter, _ in self._columns]
        nulls = dict(submission.nulls)
        self._needed = {name: each for each, name in self._columns if nulls.get(each)}
        self._with_default = [n for n, each in enumerate(self._names) if nulls.get(each) == ""]
        self._sending: Sequence[Any] = ()  # the keys of the envelopes that are sent now
        writer = f"sender-{socket.gethostname()}-{os.getpid()}"
        self._events = app.open_events(writer) if app.settings.events is not None else None
        self._rows = self._sent = self._retried = self._failed = 0
        self._errors: list[str] = []
        self._unconfirmed: dict[str, Envelope] = {}

    def send(self, batches: Iterable[pa.RecordBatch]) -> PartitionReport:
        """Send all batches, and report the partition's counts."""
        try:
            for batch in batches:
                self._send_batch(batch)
        finally:
            self._emit("send_unconfirmed", tuple(self._unconfirmed.values()))
            if self._events is not None:
                self._events.close()
        return PartitionReport(
            self._partition,
            self._rows,
            self._sent,
            self._retried,
            self._failed,
            "\n".join(self._errors),
        )

    def _send_batch(self, batch: pa.RecordBatch) -> None:
        names = dict.fromkeys([self._submission.key, *(name for _, name in self._columns)])
        found: dict[str, list[Any]] = {}
        reasons: dict[int, str] = {}
        for name in names:
            found[name], unreadable = readable(_column(batch, name))
            for place, reason in unreadable.items():
                reasons.setdefault(place, f"column {name!r}: {reason}")
            for place in _nulls(batch, name) if name in self._needed else ():
                reasons.setdefault(place, self._null_reason(name))
        for place in _nulls(batch, self._submission.key):
            reasons[place] = f"the key column {self._submission.key!r} is null: a row needs a key"
        keys = found[self._submission.key]
        columns = [found[name] for _, name in self._columns]
        rows = list(zip(*columns, strict=True)) if columns else [()] * len(keys)
        if reasons:
            self._rows += len(reasons)
            for place, reason in reasons.items():
                self._fail(f"key {short_repr(keys[place])}: {reason}")
            kept = [place for place in range(len(keys)) if place not in reasons]
            keys, rows = [keys[place] for place in kept], [rows[place] for place in kept]
        size = self._pace.batch(BATCH)
        for first in range(0, len(keys), size):
            part = self._sending = keys[first : first + size]
            self._rows += len(part)
            envelopes: list[Envelope] = []
            for given, some, values in self._without_nulls(part, rows[first : first + size]):
                envelopes += self._encoded(some, given, values)
            if not self._submission.dry_run:
                self._deliver(envelopes)
            else:
                self._sent += len(envelopes)

    def _null_reason(self, column: str) -> str:
        parameter = self._needed[column]
        annotation = dict(self._submission.nulls)[parameter]
        return f"column {column!r} is null, and {parameter}: {annotation} takes no None"

    def _without_nulls(
        self, keys: Sequence[Any], rows: Sequence[tuple[Any, ...]]
    ) -> Iterator[tuple[Sequence[str], Sequence[Any], Sequence[tuple[Any, ...]]]]:
        """(parameters, keys, rows): a null for which a default stands in is no argument.

        Rows with the same arguments are encoded together. Normally these are all rows.
        """
        groups: dict[tuple[int, ...], list[int]] = {}
        if self._with_default:
            for place, row in enumerate(rows):
                missing = tuple(n for n in self._with_default if row[n] is None)
                groups.setdefault(missing, []).append(place)
        if not any(groups):
            yield self._names, keys, rows
            return
        for missing, places in groups.items():
            kept = [n for n in range(len(self._names)) if n not in missing]
            yield (
                [self._names[n] for n in kept],
                [keys[place] for place in places],
                [tuple(rows[place][n] for n in kept) for place in places],
            )

    def _encoded(
        self, keys: Sequence[Any], names: Sequence[str], rows: Sequence[tuple[Any, ...]]
    ) -> list[Envelope]:
        """Rows as envelopes; those that cannot be sent are counted as failed."""
        try:
            return self._template.envelopes(map(self._id, keys), names, rows)
        except (CodecError, TypeError, ValueError, OverflowError, RecursionError):
            return self._one_by_one_encoded(keys, names, rows)

    def _one_by_one_encoded(
        self, keys: Sequence[Any], names: Sequence[str], rows: Sequence[tuple[Any, ...]]
    ) -> list[Envelope]:
        """As `_encoded`, row by row, because at least one cannot be sent."""
        made = []
        for key, values in zip(keys, rows, strict=True):
            kwargs = dict(zip(names, values, strict=True))
            try:
                made.append(self._template.envelope(self._id(key), kwargs))
            except CodecError as error:
                self._fail(f"key {short_repr(key)}: {error}")
        return made

    def _deliver(self, envelopes: Sequence[Envelope]) -> None:
        """Send these, and repeat what the service refused or did not confirm."""
        remaining = envelopes
        while remaining:
            failure: BrokerError
            self._pace.pay(len(remaining))
            try:
                self._app.broker.send(self._queue, remaining)
            except SendUnconfirmed as error:
                self._accept(_without(remaining, error.unconfirmed))
                remaining, failure = error.unconfirmed, error
                self._unconfirmed.update((each.message_id, each) for each in remaining)
            except CodecError as error:
                self._deliver_apart(remaining, error)
                return
            except (BrokerUnavailable, QueueFull) as error:
                failure = error
            else:
                self._accept(remaining)
                return
            self._retried += len(remaining)
            if not self._patience.wait(_requested_pause(failure)):
                raise self._gave_up(failure) from failure

    def _deliver_apart(self, envelopes: Sequence[Envelope], error: CodecError) -> None:
        """Send these in halves, down to the one that the broker refuses, which fails alone.

        The broker stored none of them, because one cannot be sent; usually it is too large.
        """
        if len(envelopes) == 1:
            (envelope,) = envelopes
            self._unconfirmed.pop(envelope.message_id, None)
            key = next(each for each in self._sending if self._id(each) == envelope.correlation_id)
            self._fail(f"key {short_repr(key)}: {error}")
            return
        middle = len(envelopes) // 2
        self._deliver(envelopes[:middle])
        self._deliver(envelopes[middle:])

    def _gave_up(self, error: BrokerError) -> BrokerError:
        """The error that ends the partition, of the same class as `error`."""
        doubt = (
            f", {len(self._unconfirmed):,} more may be stored or not" if self._unconfirmed else ""
        )
        return type(error)(
            f"{safe_str(error)}; no success for {self._submission.patience:g} s, with "
            f"{self._sent:,} rows of partition {self._partition} sent{doubt}: submit again under "
            "the same submission id when the service has recovered"
        )

    def _accept(self, envelopes: Sequence[Envelope]) -> None:
        """Count envelopes that the broker accepted, and write their events."""
        if envelopes:
            self._sent += len(envelopes)
            self._patience.succeeded()
            if self._unconfirmed:
                for each in envelopes:
                    self._unconfirmed.pop(each.message_id, None)
            self._emit("enqueued", envelopes)

    def _fail(self, reason: str) -> None:
        self._failed += 1
        if len(self._errors) < MAX_ERRORS:
            self._errors.append(one_line(reason, REASON_LIMIT))

    def _emit(self, kind: EventKind, envelopes: Sequence[Envelope]) -> None:
        if self._events is None or not envelopes:
            return
        now, task = time.time(), self._submission.task
        for each in envelopes:
            self._events.emit(Event(kind, each.correlation_id or "", task, self._queue, ts=now))
        self._events.flush()


def _without(envelopes: Sequence[Envelope], others: Sequence[Envelope]) -> list[Envelope]:
    """The envelopes that are not among the others; equal message ids are matched one to one."""
    excluded = Counter(each.message_id for each in others)
    kept = []
    for each in envelopes:
        if excluded[each.message_id] > 0:
            excluded[each.message_id] -= 1
        else:
            kept.append(each)
    return kept


def _requested_pause(failure: BaseException) -> float | None:
    """Seconds to wait that the service asked for, in the error or in its cause; None: none."""
    seconds: float | None = getattr(failure, "retry_after", None)
    return seconds or getattr(failure.__cause__, "retry_after", None)


def _nulls(batch: pa.RecordBatch, name: str) -> list[int]:
    """The places of a column's nulls."""
    column = _column(batch, name)
    if not column.null_count:
        return []
    found: list[int] = np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False)).tolist()
    return found


def _column(batch: pa.RecordBatch, name: str) -> pa.Array:
    at = batch.schema.get_field_index(name)
    if at < 0:
        raise ConfigurationError(
            f"there is no column {name!r} among {', '.join(map(repr, batch.schema.names))}"
        )
    return batch.column(at)
