"""A submission: the task, its columns, its ids and the queue. It travels to the executors.

Rules
1. It holds no secret, because options show in plans, logs and web pages. It names an app that the
   executors import, a broker without a key, or the environment variable that holds the address.
   A secret among the options is refused, and the error does not repeat it.
2. A submission checks its values when it is made. Checks that need the schema or the task are in
   `aztask.spark.submission.matching`; they run before anything is sent.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from datetime import date
from pathlib import PurePosixPath
from typing import Any, Final, Self

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from aztask.address.addresses import LocalAddress
from aztask.address.urls import parse_broker, parse_results
from aztask.app import App
from aztask.app.loading import load_app
from aztask.config import read_environment
from aztask.errors import AztaskError, ConfigurationError, did_you_mean
from aztask.spark.kind import analyzed
from aztask.spark.session import file_in, first_line
from aztask.support.display import mask, short_repr
from aztask.support.durations import parse_duration

# -- The target ------------------------------------------------------------------------------------
#
# The broker and the results of a job, in a form that can travel to the executors.
#
# Rules
# 1. No secret travels, because options show in plans, logs and Spark's own pages. A target holds
#    the name of an app, an address without a key, or the *name* of an environment variable, which
#    each executor reads itself.
# 2. A local queue file has an absolute path: an executor may run in another directory.

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

    def has_remote_results(self) -> bool:
        """Whether its results are on a network, or if this machine cannot tell."""
        try:
            with self.open(keep=True) as app:
                return app.results is not None and app.results.remote
        except AztaskError:
            return True


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
_DAMAGED: Final = "_damaged_line"
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
        return analyzed(reader.load(path))
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
        return analyzed(reader.schema(schema).load(path))
    except PySparkException as error:
        raise ConfigurationError(f"{path} cannot be read as {kind}: {first_line(error)}") from error


def with_damaged_line(
    spark: SparkSession, error: AztaskError, path: str, kind: str | None, schema: str | None
) -> AztaskError:
    """An error that names the damaged line at which the job of `error` ended; `error` if none did.

    Spark names only the file, so that is read once more, to its first damaged line.
    """
    kind, file = kind_of(path, kind), file_in(str(error.__cause__))
    if file is None or schema is None or kind not in ("csv", "json"):
        return error
    options = {"header": "true", "mode": "PERMISSIVE", "columnNameOfCorruptRecord": _DAMAGED}
    reader = spark.read.format(kind).options(**options).schema(f"{schema}, {_DAMAGED} STRING")
    try:
        row = reader.load(file).where(f"{_DAMAGED} IS NOT NULL").first()
    except PySparkException:
        return error  # the file is gone, or it cannot be read at all
    if row is None:
        return error
    line = short_repr(mask(row[_DAMAGED]))
    return type(error)(f"the line {line} of {file} does not fit the schema: mend it; {error}")


def kind_of(path: str, kind: str | None) -> str:
    """The format's name: `kind`, or by the path's suffix. Raises ConfigurationError."""
    kind = kind or _SUFFIXES.get(PurePosixPath(path).suffix.lower(), FORMATS[0])
    if kind not in FORMATS:
        raise ConfigurationError(f"there is no format {kind!r}; there are {', '.join(FORMATS)}")
    return kind


def selected(frame: DataFrame, names: Sequence[str]) -> DataFrame:
    """These columns as ``column0``, ``column1`` and so on.

    Spark looks names up without their case and takes a dot for a field, so that it would not find
    ``a.b``, or ``N`` beside ``n``. Columns are therefore renamed by their positions first.
    """
    numbered = frame.toDF(*(f"c{number}" for number in range(len(frame.columns))))
    places = [frame.columns.index(name) for name in names]
    return numbered.select(*(F.col(f"c{at}").alias(f"column{n}") for n, at in enumerate(places)))


# -- The submission --------------------------------------------------------------------------------


SCOPES: Final = ("stream", "batch")
PATIENCE_SECONDS: Final = 300.0
_SPARK_OPTIONS: Final = ("checkpointlocation",)
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MAX_WRITERS: Final = 100_000
_MAX_RATE: Final = 1e9


@dataclass(frozen=True)
class Submission:
    """The options of `aztask.spark.submit` and ``format("aztask")``, checked.

    task: its registered name.
    key: the column from which task ids are made, see `aztask.spark.submission.submission`.
    submission_id: the same in every rerun; "" for a stream means its query's id.
    queue, columns: None until `matching` fills them in; columns are pairs (parameter, column).
    nulls: pairs (parameter, annotation) of arguments that take no None, filled in too. The
        annotation is "" if the parameter has a default, which then stands in for a null.
    app: ``module:app``, which the executors import.
    broker: an address without a secret.
    broker_env: the executors' environment variable that holds the address.
    rate: messages per second, of all writers together; None: unlimited.
    writers: partitions that send at most.
    delay, expires, patience: seconds.
    unique: "stream" if a key is unique in the whole stream, "batch" if only within a batch.
    dry_run: do everything but the sending.
    """

    task: str
    key: str
    submission_id: str = ""
    queue: str | None = None
    columns: tuple[tuple[str, str], ...] | None = None
    nulls: tuple[tuple[str, str], ...] = ()
    app: str | None = None
    broker: str | None = None
    broker_env: str | None = None
    rate: float | None = None
    writers: int | None = None
    delay: float = 0.0
    expires: float | None = None
    patience: float = PATIENCE_SECONDS
    unique: str = "stream"
    dry_run: bool = False

    def __post_init__(self) -> None:
        for each in fields(self):
            _refuse_secret(each.name, getattr(self, each.name))
        for name in ("task", "key"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise ConfigurationError(f"{name} takes a text, not {getattr(self, name)!r}")
        if not isinstance(self.submission_id, str):
            raise ConfigurationError(f"submission_id takes a text, not {self.submission_id!r}")
        _check_number("rate", self.rate, above=0.0)
        _check_number("writers", self.writers, above=0.0, integer=True, maximum=_MAX_WRITERS)
        _check_number("expires", self.expires, above=0.0)
        _check_number("delay", self.delay)
        _check_number("patience", self.patience)
        if self.unique not in SCOPES:
            raise ConfigurationError(f"unique takes {' or '.join(SCOPES)}, not {self.unique!r}")
        self._check_place()

    def _check_place(self) -> None:
        """Raise ConfigurationError unless exactly one option names the broker."""
        given = [name for name in ("app", "broker", "broker_env") if getattr(self, name)]
        if len(given) != 1:
            raise ConfigurationError(
                "name the broker in exactly one way: app='module:app', which executors import, "
                "broker='servicebus://NAMESPACE' (an address without a key), or broker_env='NAME', "
                "the executors' environment variable that holds the address"
                + (f"; given: {', '.join(given)}" if given else "")
            )
        if self.broker:
            address = parse_broker(self.broker)
            if not isinstance(address, LocalAddress) and not address.uses_entra:
                raise _secret("broker")
        if self.broker_env and not _VARIABLE.fullmatch(self.broker_env):
            raise ConfigurationError("broker_env takes the name of an environment variable")

    @classmethod
    def from_options(cls, options: Mapping[str, str]) -> Self:
        """Make it from the options of ``df.write`` or ``writeStream``, which are texts.

        Raises ConfigurationError, also for an unknown option.
        """
        names = [each.name for each in fields(cls) if each.name != "dry_run"]
        values: dict[str, Any] = {}
        for given, text in options.items():
            name = given.lower()
            if name in _SPARK_OPTIONS:
                continue
            if name not in names:
                raise ConfigurationError(
                    f"format('aztask') has no option {name!r}.{did_you_mean(name, names)} "
                    f"It has: {', '.join(names)}."
                )
            _refuse_secret(name, text)
            values[name] = _READERS[name](name, text) if name in _READERS else text
        for name in ("task", "key"):
            if name not in values:
                raise ConfigurationError(f"the option {name!r} is missing; see docs/how-to/spark")
        return cls(**values)

    def as_options(self) -> dict[str, str]:
        """The fields as texts, as `from_options` reads them."""
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        del given["dry_run"]
        if self.columns is not None:
            given["columns"] = json.dumps(dict(self.columns))
        given["nulls"] = json.dumps(dict(self.nulls)) if self.nulls else ""
        return {name: str(value) for name, value in given.items() if value not in (None, "")}

    def open_app(self) -> App:
        """Open the sending app in this process; the caller closes it."""
        return app_at(self.app or "", self.broker or "", self.broker_env or "")

    def in_batch(self, query_id: str, batch_id: str) -> Self:
        """The submission of one batch of a stream."""
        name = self.submission_id or query_id
        return replace(self, submission_id=f"{name}/{batch_id}" if self.unique == "batch" else name)


def pairs_of(
    columns: Mapping[str, str] | Sequence[str] | None,
) -> tuple[tuple[str, str], ...] | None:
    """Pairs (parameter, column) from a caller's list or mapping."""
    if columns is None:
        return None
    if isinstance(columns, str):
        raise ConfigurationError(f"columns takes a list of names or a mapping, not {columns!r}")
    if isinstance(columns, Mapping):
        return tuple((str(parameter), str(column)) for parameter, column in columns.items())
    return tuple((str(name), str(name)) for name in columns)


def _columns(name: str, text: str) -> tuple[tuple[str, str], ...]:
    """Read ``path,width``, ``path=file,width``, or a JSON object for names with ``,`` or ``=``."""
    if text.lstrip().startswith("{"):
        try:
            found = json.loads(text)
        except ValueError as error:
            raise ConfigurationError(f"option {name!r} is not JSON: {error}") from None
        return tuple((str(parameter), str(column)) for parameter, column in found.items())
    pairs = []
    for part in text.split(","):
        parameter, equals, column = part.strip().partition("=")
        pairs.append((parameter.strip(), column.strip() if equals else parameter.strip()))
    if not all(parameter and column for parameter, column in pairs):
        raise ConfigurationError(f"option {name!r} holds an empty name; write a,b or a=column,b")
    return tuple(pairs)


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigurationError(f"option {name!r} takes a number, not {text!r}") from None


def _whole(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigurationError(f"option {name!r} takes a whole number, not {text!r}") from None


def _seconds(name: str, text: str) -> float:
    return parse_duration(text)


_READERS: Final = {
    "columns": _columns,
    "nulls": _columns,
    "rate": _number,
    "writers": _whole,
    "delay": _seconds,
    "expires": _seconds,
    "patience": _seconds,
}


def _check_number(
    name: str,
    value: object,
    *,
    above: float = -1.0,
    integer: bool = False,
    maximum: float = _MAX_RATE,
) -> None:
    if value is None:
        return
    kinds: tuple[type, ...] = (int,) if integer else (int, float)
    if (
        isinstance(value, bool)
        or not isinstance(value, kinds)
        or not isinstance(value, int | float)
        or math.isnan(value)
        or not max(above, 0.0) <= value <= maximum
        or value == above
    ):
        least = "more than 0" if above == 0 else "0 or more"
        raise ConfigurationError(
            f"{name} takes a {'whole ' * integer}number, {least}, not {value!r}"
        )


def _refuse_secret(name: str, value: object) -> None:
    if isinstance(value, str) and mask(value) != value:
        raise _secret(name)


def _secret(name: str) -> ConfigurationError:
    return ConfigurationError(
        f"the option {name!r} holds a key or a password, and options show in plans, logs and web "
        "pages: put it into an environment variable of the executors and name that variable in "
        "broker_env, or name an app that reads it"
    )


# -- task ids from keys: the same row gets the same id in every run, on every machine ------
#
# The id is the UUID version 5 (RFC 9562) of the key's text, in a namespace derived from the
# submission id. It does not depend on partition, row number or time, so a retried, speculative or
# repeated Spark task sends the same ids again.


NAMESPACE: Final = uuid.UUID("0b6bd0a4-3c1f-5a52-8f7a-9d8d5a0f6a11")
"""The namespace of all submissions. It must never change, or reruns would get other ids."""

Key = str | int | date


def task_id(submission_id: str, key: Key) -> str:
    """The id of the task submitted for `key`, for example to look up its result.

    key: the value in the key column: text, an integer or a date.
    """
    return id_maker(submission_id)(key)


def id_maker(submission_id: str) -> Callable[[Key], str]:
    """A faster `task_id` for many keys of one submission."""
    begun = hashlib.sha1(uuid.uuid5(NAMESPACE, submission_id).bytes, usedforsecurity=False)

    def made(key: Key) -> str:
        digest = begun.copy()
        digest.update(str(key).encode())
        digits = digest.hexdigest()
        variant = "89ab"[int(digits[16], 16) & 3]
        return (
            f"{digits[:8]}-{digits[8:12]}-5{digits[13:16]}-{variant}{digits[17:20]}-{digits[20:32]}"
        )

    return made
