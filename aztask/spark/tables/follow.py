"""Keeps the tables of events current: each event file is added soon after it appears.

Rules
1. The position, up to when files were read, is a transaction in the log of the table ``events``. It
   is committed with the rows, from one snapshot: there is no checkpoint that could differ from the
   table. A batch is the files that appeared between two positions (`EventFilesStream`).
2. A batch is added only to a snapshot that has the position at which the batch begins. If another
   process was faster, the batch is planned again, from the position that is there now.
3. Odd rows are committed first, with the position in their own table. If that is ahead, a process
   died in between: the next batch ends there, and adds the events only.
4. Tables to which compacted files were added (`append_events`) are taken over: those files, and
   what they were made from, are not read again. From then on `append_events` is refused, because
   the first commit, at position 0, claims the tables.
5. A position is of one log, whose name is a second transaction. Another log is refused, since its
   files may be older than the position.
6. A file that cannot be read ends the stream, as nothing would come back to it. Damaged lines are
   odd rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from deltalake import DeltaTable
from pyspark.sql import SparkSession
from pyspark.sql.streaming.datasource import ReadMaxFiles

from aztask.errors import AztaskError, ConfigurationError
from aztask.spark.events.places import EventPlace
from aztask.spark.events.source import ERROR, Portion, check_stream_options, portions
from aztask.spark.events.stream import EventFilesStream
from aztask.spark.tables.deltalog import Unit, commit, open_table, version_of
from aztask.spark.tables.tablefiles import EVENTS, ODD, REMOVED, WritePortion, WrittenFile, has_date
from aztask.spark.tables.tables import (
    POSITION,
    TableReport,
    add_compacted,
    rows_of,
    written_files,
)
from aztask.support.clock import sleep
from aztask.support.failpoint import hit

MAX_FILES: Final = 1000
TRIGGER_SECONDS: Final = 60.0
REMOVED_ATTEMPTS: Final = 20
"""Batches, one after the other, of which a file was removed, before the stream ends."""
_UNDIVIDED: Final = f"{POSITION} undivided"


@dataclass(frozen=True, slots=True)
class FollowedBatch:
    """What one batch added to the tables.

    files: event files, or parts of compacted ones. rows: events. odd: problem rows. bytes: of the
    new files. version: of the table ``events``. until: up to when files were read, in seconds since
    1970 by the place's clock.
    """

    files: int
    rows: int
    odd: int
    bytes: int
    version: int
    until: float


def follow_events(
    spark: SparkSession | None,
    place: EventPlace,
    tables: EventPlace,
    *,
    available_now: bool = False,
    trigger: float = TRIGGER_SECONDS,
    max_files: int = MAX_FILES,
    settle_seconds: float | None = None,
    undivided: str | None = None,
    log_name: str | None = None,
) -> Iterator[FollowedBatch]:
    """Add event files of `place` to the tables ``events`` and ``odd`` as they appear, without end.

    spark: None works in this process. tables: the folder of the tables, as `place_of` gives it.
    available_now: end when the files that exist now were added. trigger: seconds between two looks
    for new files (60). max_files: of one batch (1,000). settle_seconds, undivided: as for
    `stream_events`. log_name: the log's earlier place, if it was moved; None: `place`.

    Yields what each batch added. You can stop or kill it at any time, start it again, and run it
    twice at once: each file is added once. Compact whenever you like. Raises ConfigurationError,
    BrokerUnavailable, and AztaskError if a file cannot be read.
    """
    check_stream_options(None, settle_seconds, undivided)
    if max_files < 1 or not 0 <= trigger < float("inf"):
        raise ConfigurationError(
            f"max_files is {max_files} and trigger {trigger}: give at least one file, and seconds"
        )
    name = str(place) if log_name is None else log_name
    follower = _Follower(spark, place, tables, name)
    follower.claim()
    added = _Added(open_table(tables, EVENTS.name))
    stream = EventFilesStream(place, None, settle_seconds, undivided or ERROR, added)
    if available_now:
        stream.prepareForTriggerAvailableNow()
    removed = 0
    position = follower.position()
    while True:
        batch = _plan(stream, position, max_files)
        if batch is None:
            if available_now:
                return
            sleep(trigger)
            continue
        written = written_files(spark, batch.parts, WritePortion(place, tables))
        hit("table-written")
        if lost := [file for file in written if file.table is None]:
            removed += 1
            _check_lost(place, lost, removed)
            continue  # a compaction removed it: its compacted file has the rows
        removed = 0
        report = follower.add(batch, written)
        position = follower.position()
        if report is not None:
            yield report


@dataclass(frozen=True, slots=True)
class _Added:
    """The compacted files that `append_events` added before the tables were claimed."""

    table: DeltaTable | None

    def __contains__(self, name: object) -> bool:
        return version_of(self.table, str(name)) is not None


@dataclass(frozen=True, slots=True)
class _Position:
    """Offsets of `EventFilesStream`, in each of the tables."""

    events: dict[str, int]
    odd: dict[str, int]

    @property
    def interrupted(self) -> bool:
        """Whether a process died between the commits of a batch."""
        return self.odd["until"] > self.events["until"]


@dataclass(frozen=True, slots=True)
class _Batch:
    """The files between two offsets, divided for Spark tasks."""

    position: _Position
    end: dict[str, int]
    parts: Sequence[Portion]


def _plan(stream: EventFilesStream, position: _Position, max_files: int) -> _Batch | None:
    """The next batch; None if there is nothing new."""
    start = position.events
    end = position.odd
    if not position.interrupted:
        end = stream.latestOffset(start, ReadMaxFiles(max_files))
    if end["until"] == start["until"]:
        return None
    found = (file for part in stream.partitions(start, end) for file in part.files)
    return _Batch(position, end, portions([file for file in found if has_date(file.name)]))


def _check_lost(place: EventPlace, lost: Sequence[WrittenFile], times: int) -> None:
    """Raise AztaskError unless the batch can be planned again."""
    for file in lost:
        if file.value != REMOVED:
            raise AztaskError(
                f"{file.source} of {place} cannot be read: {file.value}. The tables have all that "
                "appeared before: mend the file, or remove it, and start again"
            )
    if times > REMOVED_ATTEMPTS:
        raise AztaskError(
            f"{lost[0].source} was removed from {place} while it was read, and so were others "
            f"{times} times: start again when the compaction has ended"
        )


@dataclass(frozen=True, slots=True)
class _Follower:
    """The tables, and the log that they follow. log: its name."""

    spark: SparkSession | None
    place: EventPlace
    tables: EventPlace
    log: str

    def claim(self) -> None:
        """Take the tables over, see rule 4. Raises ConfigurationError if they follow another log.

        `append_events` may have died between its two commits. Its files are completed while the
        position is 0, so before the first batch.
        """
        for kind in (EVENTS, ODD):
            commit(self.tables, kind, [Unit(POSITION, 0, (), marks={self._mark: 0})])
            table = open_table(self.tables, kind.name)
            if version_of(table, self._mark) != version_of(table, POSITION):
                raise ConfigurationError(
                    f"the tables in {self.tables} follow another log than {self.log}: name another "
                    "folder for the tables, or, if the log was moved, its earlier place "
                    "(log_name, --log-name)"
                )
            hit("table-claimed")
        events, odd = open_table(self.tables, EVENTS.name), open_table(self.tables, ODD.name)
        if version_of(events, POSITION):
            return
        half = [
            file.name
            for file in self.place.list().files
            if file.compacted
            and version_of(odd, file.name) is not None
            and version_of(events, file.name) is None
        ]
        if half:
            add_compacted(self.spark, half, self.place, self.tables, TableReport())

    def position(self) -> _Position:
        """The position that the tables have now."""
        return _Position(*(self._offset(kind.name) for kind in (EVENTS, ODD)))

    def add(self, batch: _Batch, written: Sequence[WrittenFile]) -> FollowedBatch | None:
        """Commit the batch; None if another process has changed the position.

        If the process dies between the two commits, the next batch is the same again.
        """
        odd = self._unit(batch, written, ODD.name, batch.position.odd)
        if odd.files and not batch.position.interrupted:
            _, added = commit(self.tables, ODD, [odd])
            hit("table-odd")
            if not added:
                return None
        events = self._unit(batch, written, EVENTS.name, batch.position.events)
        version, added = commit(self.tables, EVENTS, [events])
        hit("table-committed")
        if not added:
            return None
        return FollowedBatch(
            files=sum(len(part.files) for part in batch.parts),
            rows=rows_of([events]),
            odd=rows_of([odd]),
            bytes=sum(file.size for file in written),
            version=version,
            until=batch.end["until"] / 1e6,
        )

    @property
    def _mark(self) -> str:
        return f"{POSITION} of {self.log}"

    def _offset(self, name: str) -> dict[str, int]:
        table = open_table(self.tables, name)
        undivided = version_of(table, _UNDIVIDED)
        known = {} if undivided is None else {"undivided": undivided}
        return {"until": version_of(table, POSITION) or 0, **known}

    def _unit(
        self, batch: _Batch, written: Sequence[WrittenFile], name: str, start: dict[str, int]
    ) -> Unit:
        """What one of the tables gets."""
        until = batch.end["until"]
        marks = {self._mark: until}
        if "undivided" in batch.end:
            marks[_UNDIVIDED] = batch.end["undivided"]
        files = [file for file in written if file.table == name]
        return Unit(POSITION, until, files, after=start["until"], marks=marks)
