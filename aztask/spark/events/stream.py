"""A stream of event files in the order of their appearance.

Rules
1. An offset is a time of the place's own clock. A batch is the files that appeared between two
   times, so a repeated batch reads the same files.
2. A file is read some seconds after it appeared, when no older one can appear any longer.
3. A stream reads JSON lines only: compacted files were lines before. So compact with a delay long
   enough that the stream has read the lines.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxFiles,
    SupportsTriggerAvailableNow,
)

from aztask.spark.events.files import EventFile
from aztask.spark.events.places import EventPlace
from aztask.spark.events.portions import Portion, portions, read_portion

SETTLE_SECONDS: Final = 10.0


class EventFilesStream(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads event files as they appear.

    max_files: for one batch; files of the same time stay together. settle: the seconds of rule 2.
    """

    def __init__(self, place: EventPlace, max_files: int | None, settle: float | None) -> None:
        self._place = place
        self._max_files = max_files
        self._settle = SETTLE_SECONDS if settle is None else settle
        self._target: float | None = None

    def initialOffset(self) -> dict[str, int]:
        """The offset before the first file."""
        return {"until": 0}

    def getDefaultReadLimit(self) -> ReadLimit:
        """The limit that the option ``maxfilespertrigger`` sets."""
        return ReadAllAvailable() if self._max_files is None else ReadMaxFiles(self._max_files)

    def prepareForTriggerAvailableNow(self) -> None:
        """Fix the end of the stream: files that appear from now on are not read."""
        self._target = self._ripe()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, int]:
        """The time, in microseconds since 1970, up to which the next batch reads."""
        begin = int(start["until"])
        end = self._ripe() if self._target is None else self._target
        moments = sorted(
            moment for moment in map(_moment, self._lines()) if begin < moment <= end * 1e6
        )
        if not moments:
            return {"until": begin}
        count = limit.max_files if isinstance(limit, ReadMaxFiles) else len(moments)
        return {"until": moments[min(count, len(moments)) - 1]}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[Portion]:
        """The files of one batch."""
        begin, until = int(start["until"]), int(end["until"])
        return portions([file for file in self._lines() if begin < _moment(file) <= until])

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one portion."""
        yield from read_portion(self._place, partition)

    def _ripe(self) -> float:
        return self._place.clock() - self._settle

    def _lines(self) -> list[EventFile]:
        return [file for file in self._place.list().files if not file.compacted]


def _moment(file: EventFile) -> int:
    return int(file.appeared * 1e6)
