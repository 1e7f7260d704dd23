"""The broker and the results of a job, in a form that can travel to the executors.

Rules
1. No secret travels, because options show in plans, logs and Spark's own pages. A target holds the
   name of an app, an address without a key, or the *name* of an environment variable, which each
   executor reads itself.
2. A local queue file has an absolute path: an executor may run in another directory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final, Self

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from aztask.address.addresses import LocalAddress
from aztask.address.urls import parse_broker, parse_results
from aztask.app import App
from aztask.app.loading import load_app
from aztask.config import read_environment
from aztask.errors import ConfigurationError
from aztask.spark.session import first_line
from aztask.support.masking import mask

BROKER_VARIABLE: Final = "AZTASK_BROKER"
RESULTS_VARIABLE: Final = "AZTASK_RESULTS"
NAME: Final = "aztask-spark"
"""The name of an app that is made from addresses."""


@dataclass(frozen=True, slots=True)
class Target:
    """An app by name, or the addresses of a broker and a result store.

    app: ``module:app``, which the executors import.
    broker, results: addresses without secrets.
    broker_env, results_env: environment variables that hold addresses. `broker_env` must be set on
        each machine that opens the target, unless `app` or `broker` is given. Without `results` and
        `results_env` there is no result store.
    """

    app: str = ""
    broker: str = ""
    broker_env: str = BROKER_VARIABLE
    results: str = ""
    results_env: str = RESULTS_VARIABLE

    def __post_init__(self) -> None:
        for name, address in (("broker", self.broker), ("results", self.results)):
            if mask(address) != address:
                raise ConfigurationError(
                    f"the option {name} holds a secret, which would show in plans and logs; put it "
                    f"into an environment variable of the executors, and name that variable in the "
                    f"option {name}_env"
                )
        if self.app and self.broker:
            raise ConfigurationError(
                "the options app and broker exclude each other: the app has its own broker"
            )

    @classmethod
    def of_environment(cls, app: str | None = None) -> Self:
        """The target that ``-A`` or this process's environment names.

        Addresses of local files are resolved here. Others stay in the environment; each process
        that opens the target reads its own.
        """
        if app:
            return cls(app=app)
        broker, results = read_environment(BROKER_VARIABLE), read_environment(RESULTS_VARIABLE)
        here = parse_broker(broker or "local://")
        store = parse_results(results) if results else None
        return cls(
            broker=str(here) if isinstance(here, LocalAddress) else "",
            results=str(store) if isinstance(store, LocalAddress) else "",
        )

    @contextmanager
    def open(self, *, keep: bool = False) -> Iterator[App]:
        """Open the app on this machine; its connections are closed at the end.

        keep: leave an app that was imported by name open: on the driver, the program may be using
        it. Raises ConfigurationError if the module or the variable is missing here.
        """
        results = self.results or os.environ.get(self.results_env, "")
        app = app_at(self.app, self.broker, self.broker_env, results)
        try:
            yield app
        finally:
            if not (keep and self.app):
                app.close()


def app_at(app: str, broker: str, broker_env: str, results: str = "") -> App:
    """The app of that name, or a new one of these addresses, in this process; the caller closes it.

    broker_env: the environment variable to read if there is no address. Raises ConfigurationError
    if the module or the variable is missing here.
    """
    if app:
        return load_app(app)
    address = broker or os.environ.get(broker_env, "")
    if not address:
        raise ConfigurationError(
            f"the environment variable {broker_env} is not set where Spark runs this; set it "
            "on driver and executors, from the platform's secret store (Spark's own settings show "
            "in its pages), or name a variable that is set in the option broker_env"
        )
    return App(NAME, broker=address, results=results or None)


# -- reads tables from files: Parquet, CSV and JSON lines ----------------------------------
#
# Rules
# 1. A row that cannot be read fails the job (Spark's FAILFAST); it never becomes a row of nulls.
# 2. If you give a schema for CSV, the file's header must have its names, in its order.


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
