"""Event files as a data source: ``spark.read.format("aztask_events")`` and ``readStream``.

Python workers fetch the files and hand Spark Arrow batches, so a blob container needs no jars.

Rules
1. Options hold no secret: ``accountvariable`` is the name of an environment variable.
2. A batch read lists once, on the driver, and reads the listed files. A file that was removed since
   fails the read: nothing is missed silently.
3. Streams are in `aztask.spark.events.stream`, because they need PySpark 4.2.
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
    """The data source ``aztask_events``.

    Options: ``path`` (or the argument of ``load``), a directory or ``blob://ACCOUNT/CONTAINER``;
    ``accountvariable``; for streams ``maxfilespertrigger`` and ``settleseconds``.
    """

    @classmethod
    def name(cls) -> str:
        """The format's name in ``spark.read.format``."""
        return FORMAT

    def schema(self) -> str:
        """The columns, those of `aztask.spark.events.columns`."""
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
        reader: DataSourceStreamReader = streams.EventFilesStream(self._place(), max_files, settle)
        return reader

    def _number(self, name: str, kind: Callable[[str], Any]) -> Any:
        """A number above 0 from the options; None if it is not given."""
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
