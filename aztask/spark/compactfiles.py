"""Compacted files: what the Parquet footer says of a file's origin, and the rows inside.

Rules
1. A compacted file names the files whose lines it holds. While such a file is still there, readers
   leave it out: no line counts twice, and none is missed.
2. A file whose footer cannot be read counts as damaged and is not read; its sources are, where they
   are still there.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from aztask.spark.eventcolumns import ARROW
from aztask.spark.eventfiles import EventFile, Listing
from aztask.spark.eventplaces import EventPlace

logger = logging.getLogger(__name__)

ORIGIN_KEY: Final = b"aztask.origin"
THREADS: Final = 8
ROWS: Final = 1 << 16
DAMAGED: Final = "damaged Parquet file"
SUPERSEDED: Final = "compacted already"


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
        return list(zip(files, pool.map(lambda file: _origin(place, file), files), strict=True))


def _origin(place: EventPlace, file: EventFile) -> Origin | None:
    """None: the footer cannot be read."""
    try:
        with place.open_seekable(file.name) as stream:
            return Origin.from_metadata(pq.read_metadata(stream))
    except FileNotFoundError:
        return Origin()  # removed meanwhile: reading it will say so
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s of %s cannot be read, so it is left out: %s", file.name, place, error)
        return None


def read_compacted(place: EventPlace, name: str) -> Iterator[pa.RecordBatch]:
    """The rows of one compacted file; a column that it lacks is null."""
    with place.local_copy(name) as path, pq.ParquetFile(path) as file:
        known = [column for column in ARROW.names if column in file.schema_arrow.names]
        for batch in file.iter_batches(ROWS, columns=known):
            columns = [
                batch.column(column.name).cast(column.type)
                if column.name in known
                else pa.nulls(batch.num_rows, column.type)
                for column in ARROW
            ]
            yield pa.RecordBatch.from_arrays(columns, schema=ARROW)
