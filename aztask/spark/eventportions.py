"""Event files dealt out to Spark's tasks, and read there.

Rules
1. A file that is gone when its turn comes fails the read: what is missing is never passed over in
   silence.
2. What travels to executors names files and holds no secret.
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
from aztask.spark.compactfiles import read_compacted
from aztask.spark.dealing import deal
from aztask.spark.eventcolumns import DDL
from aztask.spark.eventfiles import EventFile
from aztask.spark.eventlines import read_lines
from aztask.spark.eventplaces import EventPlace

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


def read_files(spark: SparkSession, place: EventPlace, files: Sequence[EventFile]) -> DataFrame:
    """The rows of files that the driver has listed, a Spark task for each portion."""
    return deal(spark, portions(files), partial(read_portion, place), DDL)
