"""Event files as a data source: ``spark.read.format("aztask_events")`` and ``readStream``.

Python workers fetch the files and hand Spark Arrow batches, so a blob container needs no jars.

Rules
1. Options hold no secret: ``accountvariable`` is the name of an environment variable.
2. A batch read lists once, on the driver, and reads what it listed. A file that is gone when its
   turn comes fails the read: what is missing is never passed over in silence.
3. Streams have a module of their own, `aztask.spark.events.stream`, which needs PySpark 4.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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

from aztask.errors import ConfigurationError
from aztask.spark.events.columns import DDL
from aztask.spark.events.compactfiles import plan_of
from aztask.spark.events.places import EventPlace, place_of
from aztask.spark.events.portions import Portion, portions, read_portion
from aztask.support.masking import printable

FORMAT: Final = "aztask_events"
STREAMS: Final = "aztask.spark.events.stream"


class EventSource(DataSource):
    """Options: ``path`` (or what ``load`` is given), a directory or ``blob://ACCOUNT/CONTAINER``;
    ``accountvariable``; for streams ``maxfilespertrigger`` and ``settleseconds``.
    """

    @classmethod
    def name(cls) -> str:
        """The format's name."""
        return FORMAT

    def schema(self) -> str:
        """The columns of `aztask.spark.events.columns`."""
        return DDL

    def reader(self, schema: Any) -> EventFilesReader:
        """For a batch read."""
        return EventFilesReader(self._place())

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


class EventFilesReader(DataSourceReader):
    """Reads all that the place holds."""

    def __init__(self, place: EventPlace) -> None:
        self._place = place

    def partitions(self) -> list[Portion]:
        """The files, dealt out."""
        plan = plan_of(self._place)
        return portions([*plan.compacted, *plan.lines])

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one portion."""
        yield from read_portion(self._place, partition)
