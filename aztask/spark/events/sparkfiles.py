"""Event files at a path that Spark itself lists and reads: abfss://, wasbs://, dbfs:/, file:// ...

Rules
1. Everything goes through DataFrame readers, so it works over Spark Connect and wherever Spark has
   the file system, with the credentials that Spark has. Python opens no file.
2. Spark hands out whole files, so lines are parsed as those of a directory are: with their
   numbers, and damaged ones apart. A Spark task holds 128 MB of files, or one larger file.
3. Only reading: Spark's readers can neither publish a file atomically nor remove one, so
   compactions and streams need a directory or a container.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from aztask.errors import ConfigurationError
from aztask.spark.events.compactfiles import CompactedOrigin, is_sound, origin_of
from aztask.spark.events.files import EventFile, Fetched, FileListing
from aztask.spark.events.lines import DDL
from aztask.spark.events.source import Portion, read_portion
from aztask.spark.kind import SPARK_ERRORS
from aztask.spark.session import first_line
from aztask.support.display import mask, printable

SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/+")
"""How a path with a scheme begins. A single letter would be a drive of Windows."""
_PATTERN: Final = re.compile(r"([\[\]{}*?\\])")
_FOUND: Final = "name STRING, origin STRING, sound BOOLEAN"
_FOUND_ARROW: Final = pa.schema(
    [("name", pa.string()), ("origin", pa.string()), ("sound", pa.bool_())]
)


def is_of_spark(path: str) -> bool:
    """Whether the path has a scheme that is left to Spark."""
    return SCHEME.match(path) is not None and not path.startswith("blob://")


def escaped(path: str) -> str:
    """The path as Spark's readers take it: these characters are a pattern to them.

    It is no URI: Spark does not decode ``%20``.
    """
    return _PATTERN.sub(r"\\\1", path)


@dataclass(slots=True)
class SparkPath:
    """A folder of event files that Spark reads. unsound: compacted files that are damaged."""

    spark: SparkSession
    path: str
    unsound: set[str] = field(default_factory=set)

    def __str__(self) -> str:
        return mask(self.path)

    def list(self) -> FileListing:
        """List the files, sorted by name. Raises ConfigurationError if that fails."""
        listing = FileListing()
        reader = self.spark.read.format("binaryFile").option("recursiveFileLookup", "true")
        try:
            found = reader.load(escaped(self.path)).select("path", "length", "modificationTime")
            rows = found.collect()
        except SPARK_ERRORS as error:
            raise ConfigurationError(
                f"the events in {printable(str(self))} cannot be listed: {mask(first_line(error))}"
            ) from error
        root = f"{_without_scheme(self.path)}/"
        for row in rows:
            name = _without_scheme(row["path"]).removeprefix(root)
            listing.add(name, row["length"], row["modificationTime"].timestamp())
        listing.files.sort(key=lambda file: file.name)
        return listing

    def origins(
        self, files: Sequence[EventFile], *, check: bool
    ) -> Sequence[tuple[EventFile, CompactedOrigin | None]]:
        """What each compacted file was made from; None if it is damaged. Runs a job over them.

        check: find the files that are damaged behind their footers, too.
        """
        if not files:
            return []
        rows = self._deal(files, partial(_look, check), _FOUND).collect()
        self.unsound |= {row["name"] for row in rows if not row["sound"]}
        told = {row["name"]: row["origin"] for row in rows if row["origin"] is not None}
        return [
            (file, CompactedOrigin.from_json(told[file.name]) if file.name in told else None)
            for file in files
        ]

    def read(self, files: Sequence[EventFile]) -> DataFrame:
        """The rows of these files."""
        return self._deal(files, _read, DDL)

    def _deal(
        self,
        files: Sequence[EventFile],
        work: Callable[[Fetched, str], Iterator[pa.RecordBatch]],
        schema: StructType | str,
    ) -> DataFrame:
        """The rows that `work` makes of each file."""
        if not files:
            return self.spark.createDataFrame([], schema)
        paths = [escaped(f"{self.path.rstrip('/')}/{each.name}") for each in files]
        contents = self.spark.read.format("binaryFile").load(paths)
        root = f"{_without_scheme(self.path)}/"
        return contents.select("path", "content").mapInArrow(_WorkOnFiles(root, work), schema)


def _without_scheme(path: str) -> str:
    """``lake/a`` of ``viewfs://lake/a``: Spark writes ``file:///a`` as ``file:/a``."""
    return SCHEME.sub("", path, count=1).rstrip("/")


@dataclass(frozen=True)
class _WorkOnFiles:
    """The function of each Spark task: it works on the files whose content it gets."""

    root: str
    work: Callable[[Fetched, str], Iterator[pa.RecordBatch]]

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for path, content in zip(*batch.columns, strict=True):
                name = _without_scheme(path.as_py()).removeprefix(self.root)
                yield from self.work(Fetched(self.root, content.as_py()), name)


def _read(file: Fetched, name: str) -> Iterator[pa.RecordBatch]:
    yield from read_portion(file, Portion((EventFile(name, len(file.content), 0.0),)))


def _look(check: bool, file: Fetched, name: str) -> Iterator[pa.RecordBatch]:
    origin = origin_of(file, name)
    row = {
        "name": [name],
        "origin": [None if origin is None else origin.to_json()],
        "sound": [origin is not None and (not check or is_sound(file, name))],
    }
    yield pa.RecordBatch.from_pydict(row, _FOUND_ARROW)
