"""Dead letters as a DataFrame, and the replay of those that a query selects.

Rules
1. Reading removes nothing: it is a paged peek. Another action, or a task that Spark retries, reads
   the same rows again, unless a replay or a purge ran in between.
2. A read covers the positions that existed when it was planned. Later dead letters are not in it.
3. Memory does not grow with the number of dead letters: a partition holds one page at a time. Only
   a replay keeps all positions, at eight bytes each.
4. A service that shows only some of its dead letters is refused, not read in part, unless a result
   store has the index of the others.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema

from aztask.app import App
from aztask.errors import CapabilityError, CodecError, ConfigurationError
from aztask.message.codec import Codec
from aztask.message.message import TaskMessage
from aztask.operate.deadletters.letters import Positions
from aztask.operate.deadletters.view import DeadLetters, DeadLetterView, Report, Selection
from aztask.queues.base import Position
from aztask.spark.dealing import deal
from aztask.spark.submission.submission import Target
from aztask.stores.records.deadindex import index_for
from aztask.support.display import short_repr

PAGE: Final = 250
DEFAULT_SLICES: Final = 8
"""Ranges of positions of one queue that are read in parallel."""
GROUP_BY: Final = ("queue", "task", "reason", "signature")

SCHEMA: Final = pa.schema(
    [
        ("queue", pa.string()),
        ("position", pa.string()),
        ("id", pa.string()),
        ("message_id", pa.string()),
        ("task", pa.string()),
        ("reason", pa.string()),
        ("description", pa.string()),
        ("signature", pa.string()),
        ("enqueued_at", pa.timestamp("us", tz="UTC")),
        ("delivery_count", pa.int64()),
        ("resubmit_count", pa.int64()),
        ("generation", pa.int64()),
        ("origin", pa.string()),
        ("args", pa.string()),
        ("kwargs", pa.string()),
        ("body_bytes", pa.int64()),
        ("problem", pa.string()),
    ]
)
"""One row for each dead letter. id: the task id, else the message id, else ``@POSITION``.
signature: see `aztask.operate.deadletters.letters`. args, kwargs: as text, shortened.
problem: why the message or its arguments cannot be decoded, "" if they can."""


def dead_letters(
    spark: SparkSession,
    target: Target,
    queues: Sequence[str] = (),
    *,
    slices: int = DEFAULT_SLICES,
) -> DataFrame:
    """The dead letters of these queues, or of all, with the columns of `SCHEMA`.

    slices: ranges of positions in which each queue is read in parallel, 1 to 1000. This call plans
    them, and each action on the DataFrame reads them again; write the result to Parquet to keep a
    snapshot. Raises ConfigurationError, QueueNotFound, BrokerUnavailable, and CapabilityError (see
    `plan`).
    """
    if isinstance(slices, bool) or not isinstance(slices, int) or not 1 <= slices <= 1000:
        raise ConfigurationError(f"slices takes a whole number from 1 to 1000, not {slices!r}")
    with target.open(keep=True) as app:
        names = queues or app.broker.queues()
        found = [each for name in names for each in plan(app, name, slices)]
    return deal(spark, found, partial(_read, target), from_arrow_schema(SCHEMA))


def groups(letters: DataFrame) -> DataFrame:
    """Counts by queue, task, reason and error signature, the largest group first.

    Columns: those four, count, first_at and last_at (when the first and the last were sent: no
    service tells when it was dead-lettered), and example, the id of the oldest one.
    """
    return (
        letters.groupBy(*GROUP_BY)
        .agg(
            F.count(F.lit(1)).alias("count"),
            F.min("enqueued_at").alias("first_at"),
            F.max("enqueued_at").alias("last_at"),
            F.min_by("id", F.struct("enqueued_at", "position")).alias("example"),
        )
        .orderBy(F.desc("count"), *GROUP_BY)
    )


def sample(letters: DataFrame, each: int) -> DataFrame:
    """Up to `each` of every group, chosen by a hash of the positions: always the same ones."""
    order = Window.partitionBy(*GROUP_BY).orderBy(F.xxhash64("queue", "position"), "position")
    ranked = letters.withColumn("_rank", F.row_number().over(order))
    return ranked.where(F.col("_rank") <= each).drop("_rank")


def selections(letters: DataFrame) -> dict[str, Selection]:
    """The dead letters of the DataFrame by queue, as `replay` takes them.

    The selection is fixed here: later changes of the queue do not change it. It holds positions, at
    eight bytes each, or message ids where the service has no numbered positions.
    """
    numbers: dict[str, array[int]] = {}
    names: dict[str, set[str]] = {}
    for row in letters.select("queue", "position", "message_id").toLocalIterator():
        if row.position.isdecimal():
            numbers.setdefault(row.queue, array("q")).append(int(row.position))
        else:
            names.setdefault(row.queue, set()).add(row.message_id or f"@{row.position}")
    return {
        queue: Selection(positions=Positions(numbers[queue]))
        if queue in numbers
        else Selection(frozenset(names[queue]))
        for queue in sorted({*numbers, *names})
    }


def size(selection: Selection) -> int:
    """The number of dead letters in a selection made by `selections`."""
    return len(selection.ids if selection.positions is None else selection.positions)


def replay(
    app: App,
    selected: Mapping[str, Selection],
    *,
    rate: float | None = None,
    progress: Callable[[Report], None] = lambda report: None,
) -> dict[str, Report]:
    """Send the selected messages again as new generations, queue by queue, and complete them.

    rate: messages per second at most; None: as fast as the broker takes them. It runs on the
    driver: the broker is the bottleneck, not the cluster, and one process can keep one rate. Crash
    window: see `aztask.operate.deadletters.view.DeadLetters.replay`. After a crash, select and
    replay again: each message is replayed once.
    """
    return {
        queue: DeadLetters(app, queue).replay(selection, rate=rate, progress=progress)
        for queue, selection in selected.items()
    }


@dataclass(frozen=True)
class Slice:
    """Dead letters of one queue at positions above `after`, up to `last`. None: no limit."""

    queue: str
    after: int | None = None
    last: int | None = None


def _read(target: Target, part: Slice) -> Iterator[pa.RecordBatch]:
    """Read a slice on an executor, one page at a time."""
    with target.open() as app:
        paged = app.broker.capabilities.paged_peek
        for page in pages(DeadLetters(app, part.queue), part, paged=paged):
            yield pa.RecordBatch.from_pylist([row_of(letter, app.codec) for letter in page], SCHEMA)


def plan(app: App, queue: str, slices: int) -> list[Slice]:
    """The slices of one queue; none if it has no dead letters.

    Raises CapabilityError if the service does not show all of them and no result store has the
    index of the others.
    """
    capabilities = app.broker.capabilities
    letters = DeadLetters(app, queue)
    page = letters.list(limit=PAGE)
    if not page:
        return []
    if not capabilities.paged_peek:
        dead = app.broker.stats(queue).dead or 0
        shown = len(app.broker.peek(queue, dead_letter=True, limit=PAGE))  # copies among them
        if dead > shown and index_for(app.broker, app.results) is None:
            raise CapabilityError(
                f"queue {queue!r} has about {dead:,} dead letters, and {capabilities.name} shows "
                f"{shown} of them; name the result store too, where workers keep an index of "
                "them, or use aztask dlq replay, which takes them one by one"
            )
        return [Slice(queue)]
    first = page[0].position
    if not isinstance(first, int):
        return [Slice(queue)]
    last = last_position(letters, first)
    width = -(-(last - first + 1) // slices)
    starts = range(first, last + 1, width)
    return [Slice(queue, start - 1, min(start + width - 1, last)) for start in starts]


def last_position(letters: DeadLetters, first: int) -> int:
    """The highest position, found with about 2 log2(span) peeks from `first`, the lowest."""
    low, step, high = first, 1, None
    while high is None:
        found = letters.list(limit=1, after=low + step)
        if found:
            low, step = int(found[0].position), 2 * step
        else:
            high = low + step
    while low < high:
        middle = (low + high) // 2
        found = letters.list(limit=1, after=middle)
        if found:
            low = int(found[0].position)
        else:
            high = middle
    return low


def pages(letters: DeadLetters, part: Slice, *, paged: bool) -> Iterator[Sequence[DeadLetterView]]:
    """The dead letters of a slice, page by page. paged: whether the broker can page."""
    if not paged:
        found = letters.find(Selection(everything=True))
        while some := tuple(islice(found, PAGE)):
            yield some
        return
    after: Position | None = part.after
    while page := letters.list(limit=PAGE, after=after):
        inside = [each for each in page if part.last is None or int(each.position) <= part.last]
        if inside:
            yield inside
        if len(inside) < len(page):
            return
        after = page[-1].position


def row_of(letter: DeadLetterView, codec: Codec) -> dict[str, Any]:
    """A dead letter as a row of `SCHEMA`."""
    message = letter.message
    args, kwargs = _arguments(message, codec) if message else (None, None)
    locked = codec.locked(message) if message else ""
    return {
        "queue": letter.queue,
        "position": str(letter.position),
        "id": _text(letter.id),
        "message_id": _text(letter.envelope.message_id),
        "task": _text(letter.task),
        "reason": _text(letter.reason),
        "description": _text(letter.description),
        "signature": _text(letter.signature),
        "enqueued_at": int(letter.at * 1e6),
        "delivery_count": letter.delivery_count,
        "resubmit_count": letter.resubmit_count,
        "generation": message.generation if message else None,
        "origin": _text(message.origin) if message else None,
        "args": _text(args),
        "kwargs": _text(kwargs),
        "body_bytes": len(letter.envelope.body),
        "problem": _text(letter.problem or (f"the arguments: {locked}" if locked else "")),
    }


def _arguments(message: TaskMessage, codec: Codec) -> tuple[str | None, str | None]:
    """The arguments as text, from the headers or else from the body; None if it is damaged."""
    if message.argsrepr is not None or message.kwargsrepr is not None:
        return message.argsrepr, message.kwargsrepr
    try:
        args, kwargs = codec.decode_arguments(message)
    except CodecError:
        return None, None
    size = len(message.body)
    return short_repr(args, size), short_repr(kwargs, size)


def _text(text: str | None) -> str | None:
    """`text` with lone surrogates escaped, because Arrow stores UTF-8 only."""
    return None if text is None else text.encode("utf-8", "backslashreplace").decode()
