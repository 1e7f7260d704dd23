"""Event files as a data source: ``spark.read.format("aztask_events")`` and ``readStream``.

Python workers fetch the files and hand Spark Arrow batches, so a blob container needs no jars.

Rules
1. Options hold no secret: ``accountvariable`` is the name of an environment variable.
2. A batch read lists once, on the driver, and reads what it listed. A file that is gone when its
   turn comes fails the read: what is missing is never passed over in silence.
3. Streams have a module of their own, `aztask.spark.eventstream`, which needs PySpark 4.2.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

import pyarrow as pa
import pyspark
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
)

from aztask.errors import AztaskError, ConfigurationError
from aztask.masking import printable
from aztask.spark.compactfiles import plan_of, read_compacted
from aztask.spark.eventcolumns import DDL
from aztask.spark.eventfiles import EventFile
from aztask.spark.eventlines import read_lines
from aztask.spark.eventplaces import EventPlace, place_of

FORMAT: Final = "aztask_events"
PARTITION_BYTES: Final = 64 << 20
"""Bytes of lines for one Spark task."""
COMPACTED_WEIGHT: Final = 8
"""A compacted byte is as much work as so many bytes of lines."""
STREAMS: Final = "aztask.spark.eventstream"


class EventSource(DataSource):
    """Options: ``path`` (or what ``load`` is given), a directory or ``blob://ACCOUNT/CONTAINER``;
    ``accountvariable``; for streams ``maxfilespertrigger`` and ``settleseconds``.
    """

    @classmethod
    def name(cls) -> str:
        """The format's name."""
        return FORMAT

    def schema(self) -> str:
        """The columns of `aztask.spark.eventcolumns`."""
        return DDL

    def reader(self, schema: Any) -> EventFilesReader:
        """For a batch read."""
        files = self.options.get("files")
        return EventFilesReader(self._place(), unpack(files) if files else None)

    def streamReader(self, schema: Any) -> DataSourceStreamReader:
        """For a stream. Raises ConfigurationError where PySpark is too old, or an option wrong."""
        try:
            streams = import_module(STREAMS)
        except ImportError:
            raise ConfigurationError(
                f"streams of events need PySpark 4.2 or newer, and this is {pyspark.__version__}"
            ) from None
        most = self._number("maxfilespertrigger", int)
        settle = self._number("settleseconds", float)
        reader: DataSourceStreamReader = streams.EventFilesStream(self._place(), most, settle)
        return reader

    def _number(self, name: str, kind: Callable[[str], Any]) -> Any:
        """An option above 0, None where it is not given."""
        text = self.options.get(name)
        if text is None:
            return None
        try:
            number = kind(text)
        except ValueError:
            number = 0
        if not 0 < number < float("inf"):
            raise ConfigurationError(f"{name} is {printable(text)}; give a number above 0")
        return number

    def _place(self) -> EventPlace:
        path = self.options.get("path")
        if not path:
            raise ConfigurationError(f'{FORMAT} needs a path: .load("DIRECTORY")')
        return place_of(path, self.options.get("accountvariable"))


@dataclass(frozen=True)
class Portion(InputPartition):
    """The files of one Spark task."""

    files: tuple[EventFile, ...]


class EventFilesReader(DataSourceReader):
    """Reads the files that it is given, or all that the place holds."""

    def __init__(self, place: EventPlace, files: Sequence[EventFile] | None) -> None:
        self._place = place
        self._files = files

    def partitions(self) -> list[Portion]:
        """The files, dealt out."""
        files = self._files
        if files is None:
            plan = plan_of(self._place)
            files = [*plan.compacted, *plan.lines]
        return portions(files)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one portion."""
        yield from read_portion(self._place, partition)


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


def pack(files: Sequence[EventFile]) -> str:
    """The files as the text of an option."""
    rows = [[file.name, file.size] for file in files]
    return base64.b64encode(zlib.compress(json.dumps(rows).encode())).decode()


def unpack(text: str) -> list[EventFile]:
    """What `pack` packed."""
    rows = json.loads(zlib.decompress(base64.b64decode(text)))
    return [EventFile(name, size, 0.0) for name, size in rows]
