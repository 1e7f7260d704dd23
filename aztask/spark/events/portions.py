"""Distributes event files over Spark tasks, and reads them there.

Rules
1. A listed file that was removed before its turn fails the read: nothing is missed silently.
2. A file that cannot be read to its end (permissions, a bad disk) gives the events up to that point
   and a problem row. The other files are read.
3. Portions travel to executors: they name files and hold no secret.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import InputPartition

from aztask.errors import AztaskError
from aztask.spark.dealing import deal
from aztask.spark.events.columns import DDL, UNREADABLE, odd_table
from aztask.spark.events.compactfiles import is_sound, read_compacted
from aztask.spark.events.files import EventFile
from aztask.spark.events.lines import read_lines
from aztask.spark.events.places import EventPlace

PARTITION_BYTES: Final = 64 << 20
"""Bytes of JSON lines for one Spark task."""
COMPACTED_WEIGHT: Final = 8
"""Reading a compacted byte is as much work as reading so many bytes of lines."""


@dataclass(frozen=True)
class Portion(InputPartition):
    """The files of one Spark task."""

    files: tuple[EventFile, ...]


def portions(files: Sequence[EventFile]) -> list[Portion]:
    """Divide the files into portions of about equal work."""
    made: list[Portion] = []
    portion: list[EventFile] = []
    size = 0
    for file in files:
        weight = file.size * (COMPACTED_WEIGHT if file.compacted else 1)
        if portion and size + weight > PARTITION_BYTES:
            made.append(Portion(tuple(portion)))
            portion, size = [], 0
        portion.append(file)
        size += weight
    return [*made, Portion(tuple(portion))] if portion else made


def read_portion(place: EventPlace, partition: InputPartition | None) -> Iterator[pa.RecordBatch]:
    """The rows of a portion's files. Raises AztaskError if one was removed.

    partition: a `Portion`; Spark passes None if a read has no portions.
    """
    for file in partition.files if isinstance(partition, Portion) else ():
        try:
            if file.compacted:
                yield from read_compacted(place, file.name)
            else:
                with place.open(file.name) as stream:
                    yield from read_lines(stream, file.name)
        except FileNotFoundError:
            raise AztaskError(
                f"{file.name} was removed from {place} while it was read, probably by a compaction "
                "or an upload: read again"
            ) from None
        except OSError as error:
            reason = error.strerror or str(error)
            yield from odd_table(file.name, [(UNREADABLE, reason, None)]).to_batches()


def read_files(spark: SparkSession, place: EventPlace, files: Sequence[EventFile]) -> DataFrame:
    """The rows of files that the driver has listed, in one Spark task per portion."""
    return deal(spark, portions(files), partial(read_portion, place), DDL)


def unsound_files(
    spark: SparkSession, place: EventPlace, files: Sequence[EventFile]
) -> list[EventFile]:
    """The compacted files that Spark's own Parquet reader must not get: damaged or foreign ones.

    `read_files` can read those. Runs a job that reads all files, because damage shows only then.
    """
    if not files:
        return []
    rows = deal(spark, portions(files), partial(_unsound, place), "name STRING").collect()
    names = {row["name"] for row in rows}
    return [file for file in files if file.name in names]


def _unsound(place: EventPlace, portion: Portion) -> Iterator[pa.RecordBatch]:
    names = [file.name for file in portion.files if not is_sound(place, file.name)]
    yield pa.RecordBatch.from_pydict({"name": names}, pa.schema([("name", pa.string())]))
