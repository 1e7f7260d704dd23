"""Compacts the lines of closed hours into Parquet files: smaller, and much faster to read.

Rules
1. A compacted file appears atomically and is never replaced. It names its sources
   (`CompactedOrigin`), which are removed only after it exists. Whenever a compaction dies, nothing
   is lost or counted twice, and the next compaction finishes the work.
2. Its name is derived from its sources' names, so a repeated compaction makes the same file. Two
   compactions at the same time may divide an hour differently: readers then drop the second copy
   of each event like any duplicate.
3. An hour is closed some time after its end, because a dead worker's last file appears late. A file
   that appears even later is compacted into a file of its own.
4. Damaged lines are kept, as problem rows. A file with events of a newer release stays as it is,
   for that release to compact: of such an event only the beginning would be kept.
5. A source is removed only if the published compacted file names it. A source that cannot be read
   to its end is not named: it stays, and the others are compacted.
6. A file that a worker has yet to upload is no source: the container would never get it.
"""

from __future__ import annotations

import calendar
import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import groupby
from typing import Any, BinaryIO, Final

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from aztask.errors import ConfigurationError
from aztask.spark.dealing import deal
from aztask.spark.events.compactfiles import ORIGIN_KEY, CompactedOrigin, origin_of, plan_of
from aztask.spark.events.files import PARQUET, EventFile
from aztask.spark.events.lines import ARROW, CLOCK_BACK, NEWER, read_lines
from aztask.spark.events.places import EventPlace
from aztask.stores.events.retention import UPLOAD_LOCK
from aztask.support.display import plural
from aztask.support.failpoint import hit

logger = logging.getLogger(__name__)

CLOSED_SECONDS: Final = 3600.0
"""How long an hour stays open after its end."""
CHUNK_BYTES: Final = 256 << 20
"""Bytes of lines for one compacted file; one executor holds all their ids in memory."""
GROUP_ROWS: Final = 1 << 18
JOB_CHUNKS: Final = 64
"""Compacted files of one Spark job; progress is reported after each job."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Files of one hour that become one compacted file. moments: when each appeared."""

    folder: str
    names: tuple[str, ...]
    bytes: int
    moments: tuple[int, ...]

    @property
    def target(self) -> str:
        """The compacted file's name, derived from those of its sources."""
        digest = hashlib.blake2b("\n".join(self.names).encode(), digest_size=10).hexdigest()
        return f"{self.folder}/compacted-{digest}{PARQUET}"


@dataclass(slots=True)
class CompactionReport:
    """What a compaction did.

    hours: compacted. source_files, bytes_before: of lines. compacted_files, bytes_after: written.
    events: each once. duplicates: further copies of events, dropped. odd: damaged lines, kept as
    problem rows. clock_steps: how often a writer's clock went back; these events count as events.
    removed: source files that were removed. unreadable: files that could not be read to their end,
    and stay. newer: files with events of a newer release, which stay, too. open_hours: with lines,
    not compacted yet. open_until: when the last of them can be compacted, in seconds since 1970; 0
    without one.
    """

    hours: int = 0
    compacted_files: int = 0
    source_files: int = 0
    events: int = 0
    duplicates: int = 0
    odd: int = 0
    clock_steps: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    removed: int = 0
    unreadable: int = 0
    newer: int = 0
    open_hours: int = 0
    open_until: float = 0.0

    def add(self, other: CompactionReport) -> None:
        """Add the numbers of another report."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


def compact(
    spark: SparkSession | None,
    place: EventPlace,
    *,
    closed_seconds: float = CLOSED_SECONDS,
    keep: bool = False,
    chunk_bytes: int = CHUNK_BYTES,
    now: float | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> CompactionReport:
    """Compact every hour that ended at least `closed_seconds` ago, one Spark task per new file.

    spark: None compacts in this process. keep: keep the sources; readers skip them. chunk_bytes: of
    lines for one new file. now: seconds since 1970; None: the clock's. progress: called with (files
    written, files in all) after each job. Raises ConfigurationError if the place cannot be listed.

    You can repeat it at any time, after a crash or a success.
    """
    moment = time.time() if now is None else now
    plan = plan_of(place)
    report = CompactionReport()
    if not keep:
        for file in plan.superseded:  # an earlier compaction died before removing them
            if not place.waits(file.name):
                place.remove(file.name)
                report.removed += 1
    ends = {file.folder: _end_of(file.folder) + closed_seconds for file in plan.lines}
    ended = [file for file in plan.lines if ends[file.folder] <= moment]
    opened = [end for end in ends.values() if moment < end < float("inf")]
    report.open_hours, report.open_until = len(opened), max(opened, default=0.0)
    closed = [file for file in ended if not place.waits(file.name)]
    if waiting := len(ended) - len(closed):
        logger.warning(
            "%s of %s %s uploaded yet and not compacted; if no worker uploads this directory any "
            "more, remove the file %s in it",
            plural(waiting, "event file"),
            place,
            "is not" if waiting == 1 else "are not",
            UPLOAD_LOCK,
        )
    chunks = list(_chunks(closed, chunk_bytes))
    report.hours = len({chunk.folder for chunk in chunks})
    done = _on_spark(spark, place, chunks, keep) if spark else _here(place, chunks, keep)
    for part in done:
        report.add(part)
        if progress is not None:
            progress(report.compacted_files, len(chunks))
    return report


def compact_chunk(place: EventPlace, chunk: Chunk, *, keep: bool) -> CompactionReport:
    """Make one compacted file, then remove its sources.

    If the process dies before the file is published, at most a hidden scratch file remains. If it
    dies later, some sources remain: readers skip them, and the next compaction removes them.
    """
    report = CompactionReport(source_files=len(chunk.names), bytes_before=chunk.bytes)
    newer: set[str] = set()
    if not _is_there(place, chunk.target) and not _write(place, chunk, report, newer):
        if newer:
            return _compact_others(place, chunk, newer, keep=keep)
        return report
    origin = origin_of(place, chunk.target)
    if origin is None:
        logger.warning(
            "keeping the sources of %s, which exists but is damaged: remove it and compact again",
            chunk.target,
        )
        return report
    report.compacted_files = 1
    for name in () if keep else origin.sources:
        place.remove(name)
        report.removed += 1
        hit("compact-removed")
    return report


def _compact_others(
    place: EventPlace, chunk: Chunk, newer: set[str], *, keep: bool
) -> CompactionReport:
    """`compact_chunk` without the files that a newer release has to compact."""
    kept = [n for n, name in enumerate(chunk.names) if name not in newer]
    report = CompactionReport()
    if kept:
        names, moments = (chunk.names[n] for n in kept), (chunk.moments[n] for n in kept)
        size = chunk.bytes * len(kept) // len(chunk.names)
        others = Chunk(chunk.folder, tuple(names), size, tuple(moments))
        report = compact_chunk(place, others, keep=keep)
    report.newer += len(newer)
    return report


def _is_there(place: EventPlace, name: str) -> bool:
    """Whether an earlier attempt, a Spark task that was retried, has published the file."""
    try:
        place.open(name).close()
    except FileNotFoundError:
        return False
    return True


def _write(place: EventPlace, chunk: Chunk, report: CompactionReport, newer: set[str]) -> bool:
    """Publish the compacted file; False if none of its sources could be read, or some are newer.

    newer: the names of sources with events of a newer release are added to it.
    """
    with place.scratch(chunk.target) as path:
        with pq.ParquetWriter(path, ARROW, compression="zstd") as writer:
            unreadable: set[str] = set()
            rows = dict.fromkeys(chunk.names, 0)
            for table in _groups(_unique(place, chunk, report, unreadable, newer, rows)):
                writer.write_table(table)
            report.unreadable = len(unreadable)
            origin = _origin_of(chunk, report, unreadable, rows)
            writer.add_key_value_metadata({ORIGIN_KEY.decode(): origin.to_json()})
        if newer:
            return False
        if pq.read_metadata(path).num_rows != report.events + report.odd + report.clock_steps:
            raise RuntimeError(f"{path} does not hold the rows that were written: try again")
        if not origin.sources:
            return False
        report.bytes_after = path.stat().st_size
        hit("compact-written")
        place.publish(path, chunk.target)
    hit("compact-published")
    return True


def _end_of(folder: str) -> float:
    """The end of the hour ``date=YYYY-MM-DD/hour=HH``; infinity if there is no such hour."""
    try:
        began = time.strptime(folder, "date=%Y-%m-%d/hour=%H")
    except ValueError:
        return float("inf")
    return calendar.timegm(began) + 3600.0


def _chunks(files: Sequence[EventFile], max_bytes: int) -> Iterator[Chunk]:
    """Each hour's files, in pieces of about `max_bytes`."""
    for folder, group in groupby(sorted(files, key=lambda file: file.name), lambda f: f.folder):
        some: list[EventFile] = []
        size = 0
        for file in group:
            if some and size + file.size > max_bytes:
                yield _chunk(folder, some)
                some, size = [], 0
            some.append(file)
            size += file.size
        yield _chunk(folder, some)


def _chunk(folder: str, files: Sequence[EventFile]) -> Chunk:
    names, moments = (file.name for file in files), (file.moment for file in files)
    return Chunk(folder, tuple(names), sum(file.size for file in files), tuple(moments))


def _origin_of(
    chunk: Chunk, report: CompactionReport, unreadable: set[str], rows: dict[str, int]
) -> CompactedOrigin:
    """What the written file was made from.

    Rows of an unreadable source are in the file and belong to no source: they follow the rows of
    the source before it, whose number of rows stays its own. So the file is divided only if every
    source could be read.
    """
    sources = tuple(name for name in chunk.names if name not in unreadable)
    if any(rows[name] for name in unreadable):
        return CompactedOrigin(sources, report.duplicates)
    moments = dict(zip(chunk.names, chunk.moments, strict=True))
    return CompactedOrigin(
        sources,
        report.duplicates,
        tuple(moments[name] for name in sources),
        tuple(rows[name] for name in sources),
    )


def _unique(
    place: EventPlace,
    chunk: Chunk,
    report: CompactionReport,
    unreadable: set[str],
    newer: set[str],
    rows: dict[str, int],
) -> Iterator[pa.RecordBatch]:
    """The rows of the chunk's files without further copies of events.

    unreadable: the names of files that cannot be read to their end are added to it. newer: those of
    files with events of a newer release. rows: the number of rows of each file is added to it.
    """
    seen: set[str] = set()
    for name in chunk.names:
        try:
            with _opened(place, name) as stream:
                for batch in read_lines(stream, name):
                    if batch.column("odd").null_count == 0:  # they come in batches of their own
                        kinds = batch.column("odd").to_pylist()
                        if NEWER in kinds:
                            newer.add(name)
                        report.clock_steps += kinds.count(CLOCK_BACK)
                        report.odd += len(kinds) - kinds.count(CLOCK_BACK)
                        rows[name] += batch.num_rows
                        yield batch
                        continue
                    fresh = _fresh(batch, seen)
                    report.duplicates += batch.num_rows - fresh.num_rows
                    report.events += fresh.num_rows
                    rows[name] += fresh.num_rows
                    yield fresh
        except OSError as error:
            reason = error.strerror or error
            logger.warning("keeping %s of %s, which cannot be read: %s", name, place, reason)
            unreadable.add(name)


def _fresh(batch: pa.RecordBatch, seen: set[str]) -> pa.RecordBatch:
    """The rows whose ids are not in `seen`; adds them to it."""
    ids = batch.column("id").to_pylist()
    fresh = set(ids)
    if len(fresh) == len(ids) and fresh.isdisjoint(seen):  # the usual case
        seen |= fresh
        return batch
    is_new = []
    for key in ids:
        is_new.append(key not in seen)
        seen.add(key)
    return batch.filter(pa.array(is_new))


def _opened(place: EventPlace, name: str) -> BinaryIO:
    try:
        return place.open(name)
    except FileNotFoundError:
        raise ConfigurationError(
            f"{name} was removed from {place} while it was compacted, by another compaction or an "
            "upload: wait until that has ended, then run this one again"
        ) from None


def _groups(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """The batches joined into tables of about `GROUP_ROWS` rows, one row group each."""
    waiting: list[pa.RecordBatch] = []
    rows = 0
    for batch in batches:
        waiting.append(batch)
        rows += batch.num_rows
        if rows >= GROUP_ROWS:
            yield pa.Table.from_batches(waiting, ARROW)
            waiting, rows = [], 0
    if waiting:
        yield pa.Table.from_batches(waiting, ARROW)


def _here(place: EventPlace, chunks: Iterable[Chunk], keep: bool) -> Iterator[CompactionReport]:
    for chunk in chunks:
        yield compact_chunk(place, chunk, keep=keep)


def _on_spark(
    spark: SparkSession, place: EventPlace, chunks: Sequence[Chunk], keep: bool
) -> Iterator[CompactionReport]:
    for first in range(0, len(chunks), JOB_CHUNKS):
        some = chunks[first : first + JOB_CHUNKS]
        frame = deal(spark, some, partial(_reported, place, keep), "report STRING")
        for row in frame.collect():
            yield CompactionReport(**json.loads(row["report"]))


def _reported(place: EventPlace, keep: bool, chunk: Chunk) -> Iterator[pa.RecordBatch]:
    """Compact a chunk on an executor; its report as one row."""
    report = compact_chunk(place, chunk, keep=keep)
    record: dict[str, Any] = {f.name: getattr(report, f.name) for f in fields(report)}
    yield pa.RecordBatch.from_pydict({"report": [json.dumps(record)]})
