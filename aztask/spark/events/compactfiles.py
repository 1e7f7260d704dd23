"""Compacted files: what the Parquet footer says of a file's origin, and the rows inside.

Rules
1. A compacted file names the files whose lines it holds. While such a file is still there, readers
   leave it out: no line counts twice, and none is missed.
2. A file whose footer cannot be read counts as damaged and is not read; its sources are, where they
   are still there.
3. A file that is damaged further in, or that holds something else than events, is read as far as it
   goes. A row of its own then says so, and no other file suffers.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from aztask.spark.events.columns import ARROW, DAMAGED, NOT_AN_EVENT, TEXTS, odd_table
from aztask.spark.events.files import EventFile, Listing
from aztask.spark.events.places import EventPlace

logger = logging.getLogger(__name__)

ORIGIN_KEY: Final = b"aztask.origin"
THREADS: Final = 8
ROWS: Final = 1 << 16
SUPERSEDED: Final = "compacted already"
REQUIRED: Final = (*TEXTS, "ts")
"""Columns that every event has."""

_DAMAGE: Final = (pa.ArrowException, OSError, ValueError)
"""What Arrow raises for a file that is damaged, or something else than Parquet."""


@dataclass(frozen=True, slots=True)
class Origin:
    """sources: names of the files, relative to the place. duplicates: events that were in them
    more than once and are here once.
    """

    sources: tuple[str, ...] = ()
    duplicates: int = 0

    def to_json(self) -> str:
        """As it stands in the footer."""
        return json.dumps({"sources": self.sources, "duplicates": self.duplicates})

    @classmethod
    def from_metadata(cls, metadata: pq.FileMetaData) -> Origin:
        """What a footer says; a foreign file says nothing."""
        text = (metadata.metadata or {}).get(ORIGIN_KEY)
        if text is None:
            return cls()
        record: Any = json.loads(text)
        return cls(tuple(map(str, record["sources"])), int(record["duplicates"]))


@dataclass(slots=True)
class Plan:
    """What is to be read: lines and compacted files, no line twice. listing: all that was found."""

    lines: list[EventFile]
    compacted: list[EventFile]
    superseded: list[EventFile]
    duplicates: int
    listing: Listing = field(default_factory=Listing)


def plan_of(place: EventPlace) -> Plan:
    """Look at the place and decide what to read."""
    listing = place.list()
    compacted: list[EventFile] = []
    sources: set[str] = set()
    duplicates = 0
    for file, origin in _origins(place, [file for file in listing.files if file.compacted]):
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
    return Plan(lines, compacted, superseded, duplicates, listing)


def _origins(
    place: EventPlace, files: Sequence[EventFile]
) -> Iterable[tuple[EventFile, Origin | None]]:
    with ThreadPoolExecutor(THREADS) as pool:
        return list(
            zip(files, pool.map(lambda file: _origin(place, file.name), files), strict=True)
        )


def _origin(place: EventPlace, name: str) -> Origin | None:
    """As `origin_of`; a file that was removed meanwhile says nothing, and reading it will fail."""
    try:
        return origin_of(place, name)
    except FileNotFoundError:
        return Origin()


def origin_of(place: EventPlace, name: str) -> Origin | None:
    """What a compacted file was made from; None: its footer cannot be read.

    Raises FileNotFoundError.
    """
    try:
        with place.open_seekable(name) as stream:
            return Origin.from_metadata(pq.read_metadata(stream))
    except FileNotFoundError:
        raise
    except (*_DAMAGE, KeyError, TypeError) as error:
        logger.warning("%s of %s cannot be read, so it is skipped: %s", name, place, error)
        return None


def read_compacted(place: EventPlace, name: str) -> Iterator[pa.RecordBatch]:
    """The rows of one compacted file; a column that it lacks is null.

    Where the file is damaged, the rows before the damage, and one that names the damage. A row
    without the columns that every event has is odd too. Raises FileNotFoundError.
    """
    with place.local_copy(name) as path:
        try:
            with pq.ParquetFile(path) as file:
                for batch in _batches(file):
                    events, others = _parted(batch)
                    yield events
                    if others:
                        wrong = [(NOT_AN_EVENT, "a row that lacks what every event has", None)]
                        yield from odd_table(name, wrong * others).to_batches()
        except FileNotFoundError:
            raise
        except _DAMAGE as error:
            yield from odd_table(name, [(DAMAGED, str(error), None)]).to_batches()


def is_sound(place: EventPlace, name: str) -> bool:
    """Whether a compacted file is what a compaction writes, up to its last row: it is all read."""
    with place.local_copy(name) as path:
        try:
            with pq.ParquetFile(path) as file:
                same = all(
                    file.schema_arrow.field(column).type == ARROW.field(column).type
                    for column in _known(file)
                )
                return same and not any(_parted(batch)[1] for batch in _batches(file))
        except FileNotFoundError:
            return True  # removed meanwhile: reading it will say so
        except _DAMAGE:
            return False


def _known(file: pq.ParquetFile) -> list[str]:
    return [column for column in ARROW.names if column in file.schema_arrow.names]


def _batches(file: pq.ParquetFile) -> Iterator[pa.RecordBatch]:
    """Batches of the columns of `ARROW`. Raises ArrowInvalid where they cannot be made."""
    known = _known(file)
    lacking = [name for name in REQUIRED if name not in known]
    if lacking:
        raise pa.ArrowInvalid(f"there is no column {lacking[0]!r}: these are no events")
    for batch in file.iter_batches(ROWS, columns=known):
        batch.validate(full=True)  # text that is no UTF-8, for one
        columns = [
            batch.column(column.name).cast(column.type)
            if column.name in known
            else pa.nulls(batch.num_rows, column.type)
            for column in ARROW
        ]
        yield pa.RecordBatch.from_arrays(columns, schema=ARROW)


def _parted(batch: pa.RecordBatch) -> tuple[pa.RecordBatch, int]:
    """The rows that are events or tell of something odd, and how many are neither."""
    lacking = [batch.column(name) for name in REQUIRED if batch.column(name).null_count]
    if not lacking:
        return batch, 0
    sound = pc.is_valid(batch.column("odd"))
    whole = pc.is_valid(lacking[0])
    for column in lacking[1:]:
        whole = pc.and_(whole, pc.is_valid(column))
    kept = batch.filter(pc.or_(sound, whole))
    return kept, batch.num_rows - kept.num_rows
