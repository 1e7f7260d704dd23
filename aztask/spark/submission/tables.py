"""Reads tables from files: Parquet, CSV and JSON lines.

Rules
1. A row that cannot be read fails the job (Spark's FAILFAST); it never becomes a row of nulls.
2. If you give a schema for CSV, the file's header must have its names, in its order.
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
    """The table in a file, a folder or any other path that Spark reads.

    kind: "parquet", "csv" or "json"; None: by the path's suffix, otherwise Parquet. schema: as in
    SQL, ``path STRING, width INT``; without one, CSV columns are strings. Raises
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
    max_files: int | None = None,
) -> DataFrame:
    """The rows of files as they arrive in a folder. max_files: of one batch; None: all."""
    kind = kind_of(path, kind)
    reader = spark.readStream.format(kind).options(**_OPTIONS[kind])
    if max_files is not None:
        reader = reader.option("maxFilesPerTrigger", max_files)
    try:
        return reader.schema(schema).load(path)
    except PySparkException as error:
        raise ConfigurationError(f"{path} cannot be read as {kind}: {first_line(error)}") from error


def kind_of(path: str, kind: str | None) -> str:
    """The format's name: `kind`, or by the path's suffix. Raises ConfigurationError."""
    kind = kind or _SUFFIXES.get(PurePosixPath(path).suffix.lower(), FORMATS[0])
    if kind not in FORMATS:
        raise ConfigurationError(f"there is no format {kind!r}; there are {', '.join(FORMATS)}")
    return kind
