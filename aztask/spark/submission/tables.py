"""Tables from files: Parquet, CSV and JSON lines, named by what their rows have to hold.

Rules
1. A row that cannot be read fails the job (Spark's FAILFAST): it is not a row of nulls.
2. Where a schema is given for CSV, the names in the file's header must be those of the schema, in
   its order.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Final

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from aztask.errors import ConfigurationError
from aztask.spark.session import first_line

FORMATS: Final = ("parquet", "csv", "json")
_SUFFIXES: Final = {".csv": "csv", ".json": "json", ".jsonl": "json", ".ndjson": "json"}
_OPTIONS: Final = {
    "parquet": {},
    "csv": {"header": "true", "enforceSchema": "false", "mode": "FAILFAST"},
    "json": {"mode": "FAILFAST"},
}


def read_table(
    spark: SparkSession, path: str, *, kind: str | None = None, schema: str | None = None
) -> DataFrame:
    """The table in a file, a folder or whatever path Spark understands.

    kind: "parquet", "csv" or "json"; by default as the path's suffix says, else Parquet. schema:
    as in SQL, ``path STRING, width INT``; without one, CSV columns are strings. Raises
    ConfigurationError.
    """
    kind = kind_of(path, kind)
    reader = spark.read.format(kind).options(**_OPTIONS[kind])
    try:
        if schema:
            reader = reader.schema(schema)
        return reader.load(path)
    except PySparkException as error:
        raise ConfigurationError(f"{path} cannot be read as {kind}: {first_line(error)}") from error


def read_stream(
    spark: SparkSession,
    path: str,
    *,
    schema: str,
    kind: str | None = None,
    most_files: int | None = None,
) -> DataFrame:
    """The rows of files as they come into a folder. most_files: in one batch."""
    kind = kind_of(path, kind)
    reader = spark.readStream.format(kind).options(**_OPTIONS[kind])
    if most_files is not None:
        reader = reader.option("maxFilesPerTrigger", most_files)
    try:
        return reader.schema(schema).load(path)
    except PySparkException as error:
        raise ConfigurationError(f"{path} cannot be read as {kind}: {first_line(error)}") from error


def kind_of(path: str, kind: str | None) -> str:
    """The format's name."""
    kind = kind or _SUFFIXES.get(PurePosixPath(path).suffix.lower(), FORMATS[0])
    if kind not in FORMATS:
        raise ConfigurationError(f"there is no format {kind!r}; there are {', '.join(FORMATS)}")
    return kind
