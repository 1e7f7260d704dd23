"""A stream of event files in the order of their appearance.

Rules
1. An offset is a moment of the place's own clock. A batch is the files that appeared between two
   moments, so a batch that is run again finds the same files.
2. A file counts some seconds after it appeared, when nothing older can come up any more.
3. A stream reads lines: what is compacted was lines before. A compaction must come well behind.
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
    """most: files for one batch, and those of the same moment. settle: seconds of rule 2."""

    def __init__(self, place: EventPlace, most: int | None, settle: float | None) -> None:
        self._place = place
        self._most = most
        self._settle = SETTLE_SECONDS if settle is None else settle
        self._target: float | None = None

    def initialOffset(self) -> dict[str, int]:
        """Before every file."""
        return {"until": 0}

    def getDefaultReadLimit(self) -> ReadLimit:
        """What the option ``maxfilespertrigger`` says."""
        return ReadAllAvailable() if self._most is None else ReadMaxFiles(self._most)

    def prepareForTriggerAvailableNow(self) -> None:
        """From now on nothing newer counts."""
        self._target = self._ripe()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, int]:
        """The moment, in microseconds, up to which the next batch goes."""
        begin = int(start["until"])
        end = self._ripe() if self._target is None else self._target
        moments = sorted(
            moment for moment in map(_moment, self._lines()) if begin < moment <= end * 1e6
        )
        if not moments:
            return {"until": begin}
        most = limit.max_files if isinstance(limit, ReadMaxFiles) else len(moments)
        return {"until": moments[min(most, len(moments)) - 1]}

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
