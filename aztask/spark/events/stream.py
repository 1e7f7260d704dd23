"""A stream of event files in the order of their appearance.

Rules
1. An offset is a time of the place's own clock. A batch is the files that appeared between two
   times, so a repeated batch reads the same rows.
2. A file is read some seconds after it appeared, when no older one can appear any longer.
3. A compaction may remove a file before it is read. Its rows are then read from the compacted file,
   which says when each of its sources appeared and which rows are its.
4. Compacted files of an earlier release do not say that. Such a file is undivided: if it appeared
   after the query's offset, the query may have read some of its sources. It then ends with an
   error, unless the option ``undivided`` says what to do. A new query has read nothing, and reads
   all that exist at its start.
5. Two compactions at the same time may put one source into two files: it is read from the first.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import replace
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxFiles,
    SupportsTriggerAvailableNow,
)

from aztask.errors import AztaskError
from aztask.spark.events.compactfiles import CompactedOrigin, origin_of
from aztask.spark.events.files import EventFile
from aztask.spark.events.places import EventPlace
from aztask.spark.events.source import Portion, portions, read_portion

SETTLE_SECONDS: Final = 10.0


class EventFilesStream(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads event files as they appear.

    max_files: for one batch; files of the same time stay together. settle: the seconds of rule 2.
    undivided: "read", "skip" or "error", see rule 4. added: compacted files whose rows the reader
    has already, so that neither they nor their sources are read.

    Offsets: ``until`` is the time up to which files were read, and ``undivided`` the time up to
    which undivided files were; both in microseconds since 1970.
    """

    def __init__(
        self,
        place: EventPlace,
        max_files: int | None,
        settle: float | None,
        undivided: str,
        added: Container[str] = (),
    ) -> None:
        self._place = place
        self._max_files = max_files
        self._settle = SETTLE_SECONDS if settle is None else settle
        self._undivided = undivided
        self._added = added
        self._target: float | None = None
        self._origins: dict[str, CompactedOrigin | None] = {}
        self._last: dict[str, int] = {}  # the moments of the lines of the last listing
        self._moments: dict[str, int] = {}  # and of the one before
        self._read_before: set[str] = set()  # undivided files, all of whose sources were read

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
        """Up to where the next batch reads."""
        begin = int(start["until"])
        ripe = int((self._ripe() if self._target is None else self._target) * 1e6)
        known = {"undivided": int(start["undivided"])} if "undivided" in start else {}
        files = self._files(start, {"until": ripe, "undivided": max(ripe, *known.values(), 0)})
        if not files:
            return {"until": begin, **known}
        moments = sorted(file.moment for file in files)
        count = limit.max_files if isinstance(limit, ReadMaxFiles) else len(moments)
        until = moments[min(count, len(moments)) - 1]
        if begin == 0 or any(file.compacted and file.rows is None for file in files):
            known = {"undivided": ripe}
        return {"until": max(begin, until), **known}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[Portion]:
        """The files of one batch."""
        return portions(self._files(start, end))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one portion."""
        yield from read_portion(self._place, partition)

    def _ripe(self) -> float:
        return self._place.clock() - self._settle

    def _files(self, start: dict[str, Any], end: dict[str, Any]) -> list[EventFile]:
        """The files between two offsets, and the parts of compacted ones that stand for files."""
        begin, until = int(start["until"]), int(end["until"])
        found = self._not_added(self._listed(), begin)
        known = {file.name for file in found if not file.compacted}
        files = [file for file in found if not file.compacted and begin < file.moment <= until]
        for file in found:
            if not file.compacted or file.moment <= begin:
                continue  # each of its sources appeared, and was read, before it
            origin = self._origin(file.name)
            if origin is None:
                continue  # damaged: its sources are kept
            if origin.divided:
                files += _parts(file, origin, known, begin, until)
                known.update(origin.sources)
            elif not self._was_read(file, origin, begin) and self._takes(file, start, end):
                files.append(replace(file, appeared=(begin + 1) / 1e6))
        return files

    def _not_added(self, found: list[EventFile], begin: int) -> list[EventFile]:
        """The files without those that the reader has, and without their sources."""
        added = {
            file.name
            for file in found
            if file.compacted and file.moment > begin and file.name in self._added
        }
        origins = [origin for name in added if (origin := self._origin(name)) is not None]
        out = added.union(*(origin.sources for origin in origins))
        return [file for file in found if file.name not in out]

    def _was_read(self, file: EventFile, origin: CompactedOrigin, begin: int) -> bool:
        """Whether this run has read all sources of an undivided file, or will read their lines."""
        if all(self._moments.get(name, begin + 1) <= begin for name in origin.sources):
            self._read_before.add(file.name)
        return file.name in self._read_before or self._last.keys() >= set(origin.sources)

    def _listed(self) -> list[EventFile]:
        """All files. Listed twice: one listing may miss both a compacted file and its sources.

        It misses the compacted file if that appears during the listing, and a source if that is
        removed before its turn. Then the compacted file was there before the second listing.
        """
        listings = [self._place.list().files for _ in range(2)]
        found = {file.name: file for files in listings for file in files}
        lines = {file.name: file.moment for file in found.values() if not file.compacted}
        self._last, self._moments = lines, {**self._last, **lines}
        return list(found.values())

    def _origin(self, name: str) -> CompactedOrigin | None:
        if name not in self._origins:  # a compacted file is never replaced
            try:
                self._origins[name] = origin_of(self._place, name)
            except FileNotFoundError:
                return None
        return self._origins[name]

    def _takes(self, file: EventFile, start: dict[str, Any], end: dict[str, Any]) -> bool:
        """Whether the batch reads an undivided file. Raises AztaskError if that is unknown."""
        first = int(start.get("undivided", 0))
        if file.moment <= first or file.moment > int(end.get("undivided", end["until"])):
            return False
        if int(start["until"]) == 0 or self._undivided == "read":
            return True
        if self._undivided == "skip":
            return False
        raise AztaskError(
            f"{file.name} of {self._place} was compacted by an earlier release while the query "
            "did not run, so it is unknown which of its events the query has read: set the option "
            "undivided to read (some events come twice, with the same ids) or to skip"
        )


def _parts(
    file: EventFile, origin: CompactedOrigin, known: set[str], begin: int, until: int
) -> Iterator[EventFile]:
    """A compacted file's sources that appeared between the times, as parts of the file.

    known: sources that are read from elsewhere.
    """
    first = 0
    for name, moment, rows in zip(origin.sources, origin.moments, origin.rows, strict=True):
        if name not in known and begin < moment <= until:
            size = file.size * rows // max(1, sum(origin.rows))
            yield EventFile(file.name, size, (moment + 0.5) / 1e6, ((first, rows),))
        first += rows
