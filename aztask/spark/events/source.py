"""Event files as a data source: ``spark.read.format("aztask_events")`` and ``readStream``.

Python workers fetch the files and hand Spark Arrow batches, so a blob container needs no jars.

Rules
1. Options hold no secret: ``accountvariable`` is the name of an environment variable.
2. A batch read lists once, on the driver, and reads the listed files. A file that was removed since
   fails the read: nothing is missed silently.
3. Streams are in `aztask.spark.events.stream`, because they need PySpark 4.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, Final

import pyarrow as pa
import pyspark
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
)

from aztask.errors import AztaskError, ConfigurationError
from aztask.spark.dealing import deal
from aztask.spark.events.compactfiles import is_sound, plan_of, read_compacted, read_rows
from aztask.spark.events.files import EventFile
from aztask.spark.events.lines import DDL, UNREADABLE, odd_table, read_lines
from aztask.spark.events.places import EventPlace, ReadablePlace, place_of
from aztask.support.display import printable

# -- distributes event files over Spark tasks, and reads them there ------------------------
#
# Rules
# 1. A listed file that was removed before its turn fails the read: nothing is missed silently.
# 2. A file that cannot be read to its end (permissions, a bad disk) gives the events up to that
#    point and a problem row. The other files are read.
# 3. Portions travel to executors: they name files and hold no secret.


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


def read_portion(
    place: ReadablePlace, partition: InputPartition | None
) -> Iterator[pa.RecordBatch]:
    """The rows of a portion's files. Raises AztaskError if one was removed.

    partition: a `Portion`; Spark passes None if a read has no portions.
    """
    for file in partition.files if isinstance(partition, Portion) else ():
        try:
            yield from read_file(place, file)
        except FileNotFoundError:
            raise AztaskError(
                f"{file.name} was removed from {place} while it was read, probably by a compaction "
                "or an upload: read again"
            ) from None
        except OSError as error:
            reason = error.strerror or str(error)
            yield from odd_table(file.name, [(UNREADABLE, reason, None)]).to_batches()


def read_file(place: ReadablePlace, file: EventFile) -> Iterator[pa.RecordBatch]:
    """The rows of one file. Raises OSError, FileNotFoundError if it was removed."""
    if file.rows is not None:
        yield from read_rows(place, file.name, file.rows)
    elif file.compacted:
        yield from read_compacted(place, file.name)
    else:
        with place.open(file.name) as stream:
            yield from read_lines(stream, file.name)


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


FORMAT: Final = "aztask_events"
STREAMS: Final = "aztask.spark.events.stream"
ERROR: Final = "error"
UNDIVIDED: Final = ("read", "skip", ERROR)
"""What a stream does with a compacted file of which it may have read some sources."""


class EventSource(DataSource):
    """The data source ``aztask_events``.

    Options: ``path`` (or the argument of ``load``), a directory or ``blob://ACCOUNT/CONTAINER``;
    ``accountvariable``; for streams ``maxfilespertrigger``, ``settleseconds`` and ``undivided``.
    """

    @classmethod
    def name(cls) -> str:
        """The format's name in ``spark.read.format``."""
        return FORMAT

    def schema(self) -> str:
        """The columns, those of `aztask.spark.events.lines`."""
        return DDL

    def reader(self, schema: Any) -> EventFilesReader:
        """The reader of a batch; called on the driver."""
        return EventFilesReader(self._place())

    def streamReader(self, schema: Any) -> DataSourceStreamReader:
        """The reader of a stream. Raises ConfigurationError: PySpark too old, or a wrong option."""
        try:
            streams = import_module(STREAMS)
        except ImportError:
            raise ConfigurationError(
                f"streams of events need PySpark 4.2 or newer, and this is {pyspark.__version__}"
            ) from None
        max_files = self._number("maxfilespertrigger", int)
        settle = self._number("settleseconds", float)
        undivided = self.options.get("undivided", ERROR)
        check_stream_options(max_files, settle, undivided)
        reader: DataSourceStreamReader = streams.EventFilesStream(
            self._place(), max_files, settle, undivided
        )
        return reader

    def _number(self, name: str, kind: Callable[[str], Any]) -> Any:
        """A number from the options; None if it is not given."""
        text = self.options.get(name)
        if text is None:
            return None
        try:
            return kind(text)
        except ValueError:
            said = printable(text)
            raise ConfigurationError(f"{name} is {said}; give a number above 0") from None

    def _place(self) -> EventPlace:
        path = self.options.get("path")
        if not path:
            raise ConfigurationError(f'{FORMAT} needs a path: .load("DIRECTORY")')
        return place_of(path, self.options.get("accountvariable"))


def check_stream_options(
    max_files: float | None, settle: float | None, undivided: str | None
) -> None:
    """Raise ConfigurationError for a value that no stream takes.

    A stream that settled for 0 seconds would miss files: a directory may show a file later than a
    newer one.
    """
    for name, number in (("maxfilespertrigger", max_files), ("settleseconds", settle)):
        if number is not None and not 0 < number < float("inf"):
            raise ConfigurationError(f"{name} is {number}; give a number above 0")
    if undivided is not None and undivided not in UNDIVIDED:
        raise ConfigurationError(f"undivided is {printable(undivided)}; give read, skip or error")


class EventFilesReader(DataSourceReader):
    """Reads all event files of a place."""

    def __init__(self, place: EventPlace) -> None:
        self._place = place

    def partitions(self) -> list[Portion]:
        """List the files and divide them into portions."""
        plan = plan_of(self._place)
        return portions([*plan.compacted, *plan.lines])

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one portion."""
        yield from read_portion(self._place, partition)
