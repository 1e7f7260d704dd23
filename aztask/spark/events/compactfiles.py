"""Reads compacted files: their origin in the Parquet footer, and the rows inside.

Rules
1. A compacted file names its sources, the files whose lines it holds. Readers skip a source that
   still exists, so no line counts twice and none is missed. It also says when each source appeared
   and which rows are its, so that a stream reads the sources that it has not read before.
2. A file with an unreadable footer is skipped as damaged; its sources are read if they still exist.
3. A file that is damaged further in, or holds other rows than events, is read up to the damage. One
   problem row reports it, and the other files are read.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from aztask.spark.events.files import EventFile, FileListing
from aztask.spark.events.lines import ARROW, DAMAGED, NOT_AN_EVENT, TEXTS, odd_table
from aztask.spark.events.places import EventPlace, ReadablePlace

logger = logging.getLogger(__name__)

ORIGIN_KEY: Final = b"aztask.origin"
THREADS: Final = 8
ROWS: Final = 1 << 16
SUPERSEDED: Final = "compacted already"
REQUIRED: Final = (*TEXTS, "ts")
"""Columns that every event has."""

_DAMAGE: Final = (pa.ArrowException, OSError, ValueError)
"""What Arrow raises for a damaged file, or one that is not Parquet."""


@dataclass(frozen=True, slots=True)
class CompactedOrigin:
    """What a compacted file was made from.

    sources: names of the files, relative to the place. duplicates: further copies of events in
    them, which the compaction dropped. moments: when each source appeared, in microseconds since
    1970. rows: how many rows are each source's, in the order of the sources. The last two are
    empty in a file of an earlier release.
    """

    sources: tuple[str, ...] = ()
    duplicates: int = 0
    moments: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()

    @property
    def divided(self) -> bool:
        """Whether each source's rows and moment are known."""
        return len(self.sources) == len(self.moments) == len(self.rows)

    def to_json(self) -> str:
        """The text that is stored in the footer."""
        return json.dumps(asdict(self))

    @classmethod
    def from_metadata(cls, metadata: pq.FileMetaData) -> CompactedOrigin:
        """The origin that a footer records; empty for a file of another program."""
        text = (metadata.metadata or {}).get(ORIGIN_KEY)
        return cls() if text is None else cls.from_json(text)

    @classmethod
    def from_json(cls, text: str | bytes) -> CompactedOrigin:
        """The origin that `to_json` wrote. Raises ValueError, KeyError and TypeError."""
        record: Any = json.loads(text)
        numbers = (tuple(map(int, record.get(name, ()))) for name in ("moments", "rows"))
        return cls(tuple(map(str, record["sources"])), int(record["duplicates"]), *numbers)


@dataclass(slots=True)
class ReadingPlan:
    """Which files to read, no line twice. superseded: sources to skip. listing: all files found."""

    lines: list[EventFile]
    compacted: list[EventFile]
    superseded: list[EventFile]
    duplicates: int
    listing: FileListing = field(default_factory=FileListing)


def plan_of(place: EventPlace) -> ReadingPlan:
    """List the place, read the footers, and decide which files to read."""
    listing = place.list()
    return planned(listing, _origins(place, [file for file in listing.files if file.compacted]))


def planned(
    listing: FileListing, origins: Iterable[tuple[EventFile, CompactedOrigin | None]]
) -> ReadingPlan:
    """Which of the listed files to read. origins: of each compacted one, None if it is damaged."""
    compacted: list[EventFile] = []
    sources: set[str] = set()
    duplicates = 0
    for file, origin in origins:
        if origin is None:
            listing.skipped[DAMAGED] += 1
            continue
        compacted.append(file)
        sources.update(origin.sources)
        duplicates += origin.duplicates
    written = [file for file in listing.files if not file.compacted]
    lines = [file for file in written if file.name not in sources]
    superseded = [file for file in written if file.name in sources]
    if superseded:
        listing.skipped[SUPERSEDED] += len(superseded)
    return ReadingPlan(lines, compacted, superseded, duplicates, listing)


def _origins(
    place: EventPlace, files: Sequence[EventFile]
) -> Iterable[tuple[EventFile, CompactedOrigin | None]]:
    with ThreadPoolExecutor(THREADS) as pool:
        return list(
            zip(files, pool.map(lambda file: _origin(place, file.name), files), strict=True)
        )


def _origin(place: EventPlace, name: str) -> CompactedOrigin | None:
    """As `origin_of`; empty for a file that was removed since: reading it will report that."""
    try:
        return origin_of(place, name)
    except FileNotFoundError:
        return CompactedOrigin()


def origin_of(place: ReadablePlace, name: str) -> CompactedOrigin | None:
    """What a compacted file was made from; None if its footer cannot be read.

    Raises FileNotFoundError.
    """
    try:
        with place.open_seekable(name) as stream:
            return CompactedOrigin.from_metadata(pq.read_metadata(stream))
    except FileNotFoundError:
        raise
    except (*_DAMAGE, KeyError, TypeError) as error:
        logger.warning("skipping %s of %s, whose footer cannot be read: %s", name, place, error)
        return None


def read_compacted(place: ReadablePlace, name: str) -> Iterator[pa.RecordBatch]:
    """The rows of one compacted file; a column that it lacks is null.

    A damaged file gives the rows before the damage and one problem row. A row without the columns
    that every event has becomes a problem row too. Raises FileNotFoundError.
    """
    with place.local_copy(name) as path:
        try:
            with pq.ParquetFile(path) as file:
                for batch in _batches(file):
                    events, others = _split(batch)
                    yield events
                    if others:
                        wrong = [(NOT_AN_EVENT, "a row that lacks what every event has", None)]
                        yield from odd_table(name, wrong * others).to_batches()
        except FileNotFoundError:
            raise
        except _DAMAGE as error:
            yield from odd_table(name, [(DAMAGED, str(error), None)]).to_batches()


def read_rows(
    place: ReadablePlace, name: str, ranges: Sequence[tuple[int, int]]
) -> Iterator[pa.RecordBatch]:
    """As `read_compacted`, only the rows in these ranges (first row, number of rows).

    A damaged file gives the rows before the damage and one problem row.
    """
    wanted = sorted(ranges)
    with place.local_copy(name) as path:
        try:
            with pq.ParquetFile(path) as file:
                first = 0
                for batch in _batches(file):
                    for start, count in wanted:
                        low, high = max(start, first), min(start + count, first + batch.num_rows)
                        if low < high:
                            yield batch.slice(low - first, high - low)
                    first += batch.num_rows
        except FileNotFoundError:
            raise
        except _DAMAGE as error:
            yield from odd_table(name, [(DAMAGED, str(error), None)]).to_batches()


def is_sound(place: ReadablePlace, name: str) -> bool:
    """Whether a file is as a compaction writes it. Reads all of it, up to the last row."""
    with place.local_copy(name) as path:
        try:
            with pq.ParquetFile(path) as file:
                same = all(
                    file.schema_arrow.field(column).type == ARROW.field(column).type
                    for column in _known(file)
                )
                return same and not any(_split(batch)[1] for batch in _batches(file))
        except FileNotFoundError:
            return True  # removed since: reading it will report that
        except _DAMAGE:
            return False


def _known(file: pq.ParquetFile) -> list[str]:
    return [column for column in ARROW.names if column in file.schema_arrow.names]


def _batches(file: pq.ParquetFile) -> Iterator[pa.RecordBatch]:
    """Batches with the columns of `ARROW`. Raises ArrowInvalid if the file cannot give them."""
    known = _known(file)
    lacking = [name for name in REQUIRED if name not in known]
    if lacking:
        raise pa.ArrowInvalid(f"there is no column {lacking[0]!r}, so its rows are not events")
    for batch in file.iter_batches(ROWS, columns=known):
        batch.validate(full=True)  # finds text that is not UTF-8, for example
        columns = [
            batch.column(column.name).cast(column.type)
            if column.name in known
            else pa.nulls(batch.num_rows, column.type)
            for column in ARROW
        ]
        yield pa.RecordBatch.from_arrays(columns, schema=ARROW)


def _split(batch: pa.RecordBatch) -> tuple[pa.RecordBatch, int]:
    """(the rows that are events or problems, how many are neither)."""
    lacking = [batch.column(name) for name in REQUIRED if batch.column(name).null_count]
    if not lacking:
        return batch, 0
    problems = pc.is_valid(batch.column("odd"))
    complete = pc.is_valid(lacking[0])
    for column in lacking[1:]:
        complete = pc.and_(complete, pc.is_valid(column))
    kept = batch.filter(pc.or_(problems, complete))
    return kept, batch.num_rows - kept.num_rows
