"""The results of a submission as a DataFrame: one row for each key, looked up by executors.

Rules
1. A task's id follows from the submission id and the key, so the keys are enough: those of the
   table that was submitted, or of the manifest that ``submit`` wrote before it sent anything.
2. No key is missing. What the result store does not know is `UNACCOUNTED`: its task waits in the
   queue and has never started, or was never sent, or its result was purged.
3. Looking up changes nothing. Each action on the DataFrame looks all keys up again, so write it to
   Parquet to keep it.
4. A value that is not of the declared type, or cannot be read, fails no job: it is null, and
   `problem` says why.
5. Executors look `ROWS` ids up at a time. A store on a network then lists ranges of ids, if it has
   few others in them. So each Spark task gets one range, sorted: ids are hashes, which would
   otherwise be spread over all that the store has.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from functools import partial
from typing import Any, Final
from urllib.parse import quote

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as spark_types
from pyspark.sql.pandas.types import from_arrow_type
from pyspark.sql.types import DataType, StringType, StructField, StructType

from aztask.app import App
from aztask.errors import CodecError, ConfigurationError, ForeignId, ResultTimeout
from aztask.spark.events.lines import storable
from aztask.spark.kind import analyzed, cores
from aztask.spark.session import first_line
from aztask.spark.submission.submission import Target, id_maker, selected
from aztask.stores.records.base import ResultStore, RunRecord
from aztask.support.display import one_line, safe_str
from aztask.support.durations import to_seconds

OPEN: Final = "open"
"""The state of a task that has started, or that the store knows as sent, and that has not ended."""
UNACCOUNTED: Final = "unaccounted"
"""The state of a key whose task the result store does not know."""
ROWS: Final = 1000
"""Keys of one lookup."""
KEY: Final = "key"
RESULT: Final = "result"
"""The column that `SubmitReport.join` adds."""

_TIME: Final = pa.timestamp("us", tz="UTC")
_BEFORE_VALUE: Final = (("task_id", pa.string()), ("state", pa.string()), ("detail", pa.string()))
_BEHIND_VALUE: Final = (
    ("error_type", pa.string()),
    ("error", pa.string()),
    ("started_at", _TIME),
    ("ended_at", _TIME),
    ("attempts", pa.int64()),
    ("worker", pa.string()),
    ("problem", pa.string()),
)


def columns(value: pa.DataType) -> list[tuple[str, pa.DataType]]:
    """The columns behind the key, with values of this type."""
    return [*_BEFORE_VALUE, ("value", value), *_BEHIND_VALUE]


def results(
    spark: SparkSession,
    submission_id: str,
    *,
    manifest: str | None = None,
    frame: DataFrame | None = None,
    key: str = KEY,
    schema: str | None = None,
    target: Target | None = None,
) -> DataFrame:
    """One row for each key of a submission, with the state and the value of its task.

    manifest: the folder that was given to ``submit``. frame, key: instead, the table that was
    submitted and its key column. schema: the type of the values as in SQL, such as ``INT`` or
    ``STRUCT<width: INT, path: STRING>``; None: JSON texts. target: the app, or the broker and the
    result store; by default those of the environment.

    Columns: key; task_id; state: ``succeeded``, ``failed``, ``cancelled``, ``expired``,
    ``unreadable`` (its row is damaged), ``open`` or ``unaccounted``; detail: of an open task, the
    state in the result store's words; value; error_type and error: of a failed task, or of the
    last failure of an open one; started_at: of the last start; ended_at; attempts: how often it
    started; worker: of the last start; problem: why the value cannot be read, null if it can.

    Raises ConfigurationError.
    """
    if (manifest is None) == (frame is None):
        raise ConfigurationError("give the keys in exactly one way: manifest=FOLDER, or frame=")
    if frame is None:
        frame, key = read_manifest(spark, str(manifest), submission_id), KEY
    if key not in frame.columns:
        raise ConfigurationError(
            f"there is no key column {key!r}; there are {', '.join(map(repr, frame.columns))}"
        )
    kind = value_type(schema)
    keys = selected(frame, [key])
    value = arrow_type(kind)
    target = target or Target.of_environment()
    if target.has_remote_results():
        keys = in_ranges(keys, submission_id)
    plan = LookUp(target, submission_id, value, as_json=schema is None)
    columns = [
        StructField(KEY, keys.schema[0].dataType),
        *(StructField(name, from_arrow_type(each, False)) for name, each in _BEFORE_VALUE),
        StructField("value", kind),
        *(StructField(name, from_arrow_type(each, False)) for name, each in _BEHIND_VALUE),
    ]
    return keys.mapInArrow(plan, StructType(columns))


def beside(
    frame: DataFrame, submission_id: str, key: str, schema: str | None, target: Target, column: str
) -> DataFrame:
    """The table, with a struct of the results of its keys; for `SubmitReport.join`.

    Columns are renamed by their positions first, as in `selected`. Raises ConfigurationError.
    """
    names = frame.columns
    if key not in names:
        raise ConfigurationError(
            f"there is no key column {key!r}; there are {', '.join(map(repr, names))}"
        )
    if column.lower() in (name.lower() for name in names):
        raise ConfigurationError(
            f"the table has a column {column!r}: name another one for the results, column="
        )
    numbered = frame.toDF(*(f"c{number}" for number in range(len(names))))
    at = f"c{names.index(key)}"
    keys = numbered.select(at).dropna().dropDuplicates()
    found = results(
        frame.sparkSession, submission_id, frame=keys, key=at, schema=schema, target=target
    )
    shown = F.struct(*(name for name in found.columns if name != KEY))
    looked_up = found.select(F.col(KEY).alias("found"), shown.alias(column))
    joined = numbered.join(looked_up, F.col(at) == F.col("found"), "left").drop("found")
    return joined.toDF(*names, column)


def value_type(schema: str | None) -> DataType:
    """The Spark type of the values. Raises ConfigurationError."""
    if schema is None:
        return StringType()
    try:
        return DataType.fromDDL(schema)
    except PySparkException as error:
        raise ConfigurationError(
            f"schema is a type as in SQL, such as INT or STRUCT<a: INT>: {first_line(error)}"
        ) from error


_ARROW: Final[dict[type[DataType], pa.DataType]] = {
    spark_types.BooleanType: pa.bool_(),
    spark_types.ByteType: pa.int8(),
    spark_types.ShortType: pa.int16(),
    spark_types.IntegerType: pa.int32(),
    spark_types.LongType: pa.int64(),
    spark_types.FloatType: pa.float32(),
    spark_types.DoubleType: pa.float64(),
    spark_types.StringType: pa.string(),
    spark_types.BinaryType: pa.binary(),
    spark_types.DateType: pa.date32(),
    spark_types.TimestampType: _TIME,
    spark_types.TimestampNTZType: pa.timestamp("us"),
    spark_types.DayTimeIntervalType: pa.duration("us"),
}


def arrow_type(kind: DataType) -> pa.DataType:
    """The Arrow type of values of a Spark type. Raises ConfigurationError for one without.

    PySpark's own function for it is not public, and its parameters change from release to release.
    """
    if isinstance(kind, spark_types.DecimalType):
        return pa.decimal128(kind.precision, kind.scale)
    if isinstance(kind, spark_types.ArrayType):
        return pa.list_(arrow_type(kind.elementType))
    if isinstance(kind, spark_types.MapType):
        return pa.map_(arrow_type(kind.keyType), arrow_type(kind.valueType))
    if isinstance(kind, StructType):
        return pa.struct([(each.name, arrow_type(each.dataType)) for each in kind.fields])
    if type(kind) not in _ARROW:
        raise ConfigurationError(
            f"no value of a task is a {kind.simpleString()}: name another type as schema"
        )
    return _ARROW[type(kind)]


# -- the manifest --------------------------------------------------------------------------


def manifest_path(folder: str, submission_id: str) -> str:
    """Where the manifest of a submission is: Parquet files with the columns key and id."""
    return f"{folder.rstrip('/')}/{quote(submission_id, safe='')}"


def write_manifest(keys: DataFrame, folder: str, submission_id: str) -> None:
    """Add the keys, the only column of the frame, to the manifest of the submission.

    A rerun adds its keys to those of the runs before: it may hold only what failed in them.
    """
    frame = _identified(keys, submission_id)
    frame.write.mode("append").parquet(manifest_path(folder, submission_id))


def read_manifest(spark: SparkSession, folder: str, submission_id: str) -> DataFrame:
    """The keys of a submission, each once. Raises ConfigurationError if there are none."""
    path = manifest_path(folder, submission_id)
    try:
        return analyzed(spark.read.parquet(path).select(KEY).dropDuplicates())
    except PySparkException as error:
        raise ConfigurationError(
            f"there is no manifest of submission {submission_id!r} in {folder}: submit with "
            f"manifest=, or give the table that was submitted ({first_line(error)})"
        ) from error


def in_ranges(keys: DataFrame, submission_id: str) -> DataFrame:
    """The keys, the only column of the frame, in one range of task ids for each core, sorted."""
    with_ids = _identified(keys, submission_id)
    ranges = with_ids.repartitionByRange(cores(keys.sparkSession), "id")
    return ranges.sortWithinPartitions("id").select(KEY)


def _identified(keys: DataFrame, submission_id: str) -> DataFrame:
    """The keys, the only column of the frame, and the task ids."""
    schema = StructType(
        [StructField(KEY, keys.schema[0].dataType), StructField("id", StringType())]
    )
    return keys.mapInArrow(partial(_with_ids, submission_id), schema)


def _with_ids(submission_id: str, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    made = id_maker(submission_id)
    for batch in batches:
        ids = [None if key is None else made(key) for key in batch.column(0).to_pylist()]
        yield pa.RecordBatch.from_arrays([batch.column(0), pa.array(ids, pa.string())], [KEY, "id"])


# -- looking up, on executors --------------------------------------------------------------


@dataclass(frozen=True)
class LookUp:
    """The function of each Spark task: it looks the keys of its batches up."""

    target: Target
    submission_id: str
    value: pa.DataType
    as_json: bool

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """For ``DataFrame.mapInArrow``. Raises ConfigurationError and BrokerUnavailable."""
        with self.target.open() as app:
            store = app.results
            if store is None:
                raise ConfigurationError(
                    "there is no result store to look results up in: name it, in the app or in "
                    f"the environment variable {self.target.results_env}"
                )
            made = id_maker(self.submission_id)
            for batch in batches:
                for first in range(0, batch.num_rows, ROWS):
                    keys = batch.column(0).slice(first, ROWS)
                    ids = [None if key is None else made(key) for key in keys.to_pylist()]
                    yield self._as_batch(keys, self._rows(app, store, ids))

    def _as_batch(self, keys: pa.Array, rows: Sequence[dict[str, Any]]) -> pa.RecordBatch:
        kinds = columns(self.value)
        arrays = [pa.array([row.get(name) for row in rows], kind) for name, kind in kinds]
        return pa.RecordBatch.from_arrays([keys, *arrays], [KEY, *(name for name, _ in kinds)])

    def _rows(
        self, app: App, store: ResultStore, ids: Sequence[str | None]
    ) -> list[dict[str, Any]]:
        known = [each for each in ids if each is not None]
        found = dict(zip(known, store.get_many(known), strict=True))
        return [self._row(app, each, found.get(each or "")) for each in ids]

    def _row(
        self, app: App, task_id: str | None, record: RunRecord | ForeignId | None
    ) -> dict[str, Any]:
        if task_id is None:
            return {"state": UNACCOUNTED, "problem": "the key is null"}
        if isinstance(record, ForeignId):
            return {"task_id": task_id, "state": UNACCOUNTED, "problem": _text(record)}
        if record is None:
            return {"task_id": task_id, "state": UNACCOUNTED}
        row = {"task_id": task_id, **described(record)}
        if record.damage:
            row["problem"] = record.damage
        elif record.outcome is not None and record.outcome.value:
            try:
                row["value"] = self._read(app, record.outcome.value)
            except CodecError as error:
                row["problem"] = _text(error)
            except (pa.ArrowException, TypeError, ValueError, OverflowError):
                row["problem"] = f"the value is not of the type {self.value}"
        return row

    def _read(self, app: App, data: bytes) -> Any:
        """The value as Arrow takes it. Raises CodecError, and what Arrow raises if it refuses."""
        value = app.codec.decode_value(data)
        if self.as_json:
            return storable(json.dumps(value, default=str))
        value = _with_pairs(value, self.value)
        pa.array([value], self.value)
        return value


def described(record: RunRecord) -> dict[str, Any]:
    """The columns of a run, without those of its value."""
    outcome, earlier = record.outcome, record.earlier
    final = record.state.final
    waits = not final and outcome is not None and (outcome.parked or outcome.renewed)
    failure = None if outcome is None or waits or not outcome.error_type else outcome
    starts = len(earlier.kept) + earlier.dropped + (record.started_at is not None)
    return {
        "state": record.state.value if final else OPEN,
        "detail": None if final else record.shown_state,
        "error_type": failure and storable(failure.error_type),
        "error": failure and storable(failure.error),
        "started_at": None if record.started_at is None else int(record.started_at * 1e6),
        "ended_at": int(outcome.at * 1e6) if final and outcome is not None else None,
        "attempts": record.key.hop + starts,
        "worker": storable(record.worker) or None,
    }


def _with_pairs(value: Any, kind: pa.DataType) -> Any:
    """The value with lists of pairs for the maps in it, as Arrow takes them.

    Raises TypeError for a number where a time is declared: Arrow would count it from 1970.
    """
    if value is None:
        return None
    if pa.types.is_temporal(kind) and not isinstance(value, date | timedelta):
        raise TypeError
    if pa.types.is_map(kind):
        pairs = value.items() if isinstance(value, Mapping) else value
        return [
            (_with_pairs(key, kind.key_type), _with_pairs(each, kind.item_type))
            for key, each in pairs
        ]
    if pa.types.is_list(kind) and isinstance(value, list | tuple):
        return [_with_pairs(each, kind.value_type) for each in value]
    if pa.types.is_struct(kind) and isinstance(value, Mapping):
        return {each.name: _with_pairs(value.get(each.name), each.type) for each in kind}
    return value


def _text(error: BaseException) -> str:
    return storable(one_line(safe_str(error)))


# -- waiting -------------------------------------------------------------------------------


def wait(
    found: DataFrame,
    *,
    timeout: float | timedelta | None = None,
    every: float = 10.0,
    progress: Callable[[Mapping[str, int]], None] = lambda counts: None,
) -> dict[str, int]:
    """Wait until every task of a submission has ended; returns how many keys are in which state.

    found: of `results`. timeout: seconds or a ``timedelta``; None: no limit. every: seconds between
    two looks, each of which looks all keys up. progress: called with the counts after each look.

    An unaccounted key is waited for, too: its task may not have started. Raises ResultTimeout.
    """
    seconds = to_seconds(timeout, "timeout") if timeout is not None else None
    give_up_at = None if seconds is None else time.monotonic() + seconds
    while True:
        rows = found.groupBy("state").count().collect()
        counts = {row["state"]: int(row["count"]) for row in rows}
        progress(counts)
        left = counts.get(OPEN, 0) + counts.get(UNACCOUNTED, 0)
        if not left:
            return counts
        if give_up_at is not None and time.monotonic() + every > give_up_at:
            raise ResultTimeout(
                f"{left:,} of {sum(counts.values()):,} tasks have not ended within {seconds:g} s: "
                + ", ".join(f"{count:,} {state}" for state, count in sorted(counts.items()))
            )
        time.sleep(every)
