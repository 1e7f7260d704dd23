"""Event files dealt out to Spark's tasks, and read there.

Rules
1. A file that is gone when its turn comes fails the read: what is missing is never passed over in
   silence.
2. A file that cannot be read, or not to its end (permissions, a bad disk), is an odd row after the
   events before that point. The other files are read.
3. What travels to executors names files and holds no secret.
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
"""Bytes of lines for one Spark task."""
COMPACTED_WEIGHT: Final = 8
"""A compacted byte is as much work as so many bytes of lines."""


@dataclass(frozen=True)
class Portion(InputPartition):
    """The files of one Spark task."""

    files: tuple[EventFile, ...]


def portions(files: Sequence[EventFile]) -> list[Portion]:
    """The files in portions of about equal work."""
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
    """The rows of a portion's files. Raises AztaskError where one is gone.

    Spark asks for no portion at all where there is none.
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
            what = error.strerror or str(error)
            yield from odd_table(file.name, [(UNREADABLE, what, None)]).to_batches()


def read_files(spark: SparkSession, place: EventPlace, files: Sequence[EventFile]) -> DataFrame:
    """The rows of files that the driver has listed, a Spark task for each portion."""
    return deal(spark, portions(files), partial(read_portion, place), DDL)


def unsound_files(
    spark: SparkSession, place: EventPlace, files: Sequence[EventFile]
) -> list[EventFile]:
    """Those of these compacted files that only `read_files` can read: damaged or foreign ones.

    Runs a job that reads all of them: only that shows what is inside.
    """
    if not files:
        return []
    rows = deal(spark, portions(files), partial(_unsound, place), "name STRING").collect()
    names = {row["name"] for row in rows}
    return [file for file in files if file.name in names]


def _unsound(place: EventPlace, portion: Portion) -> Iterator[pa.RecordBatch]:
    names = [file.name for file in portion.files if not is_sound(place, file.name)]
    yield pa.RecordBatch.from_pydict({"name": names}, pa.schema([("name", pa.string())]))
