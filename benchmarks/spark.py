"""The speed of the data pipeline on two cores: python benchmarks/spark.py [--check] [PART...]

The parts are those of `PARTS`; without names all of them run. Every figure is the median of
interleaved runs: each round measures every figure of a part once. BENCH_ROUNDS and BENCH_ROWS make
it shorter.

writer: submits a DataFrame of three columns to a broker that keeps nothing, through
``df.write.format("aztask")`` and through ``submit``. For comparison, Spark's own noop sink takes
the same rows (only the JVM works), and a Python function drops the same Arrow batches.

stats: see ``benchmarks/spark_stats.py``, which needs duckdb.

results: see ``benchmarks/spark_results.py``, which needs Azurite.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), str(HERE.parent)])

import pyarrow as pa  # noqa: E402
from common import Check, conclude, machine, spread  # noqa: E402
from pyspark.sql import DataFrame, SparkSession  # noqa: E402
from pyspark.sql import functions as F  # noqa: E402, N812
from spark_results import read_back  # noqa: E402
from spark_stats import stats  # noqa: E402

from aztask.spark import get_session, register, submit  # noqa: E402

ROUNDS = int(os.environ.get("BENCH_ROUNDS", "5"))
ROWS = int(os.environ.get("BENCH_ROWS", "2000000"))
CORES = 2
TARGET = 200_000
"""Rows per second that the writer must reach on two cores with a null broker."""


def table(spark: SparkSession) -> DataFrame:
    """Rows like those of a list of files, kept in memory."""
    made = spark.range(0, ROWS, 1, 2 * CORES).select(
        F.concat(F.lit("images/"), "id", F.lit(".png")).alias("path"),
        (F.col("id") % 4000).cast("int").alias("width"),
        (F.col("id") % 3000).cast("int").alias("height"),
    )
    made = made.cache()
    made.count()
    return made


def through_the_data_source(rows: DataFrame) -> None:
    options = {
        "app": "spark_null",
        "task": "bench.resize",
        "key": "path",
        "submission_id": "bench",
    }
    rows.write.format("aztask").options(**options).mode("append").save()


def through_submit(rows: DataFrame) -> None:
    report = submit(
        rows,
        "bench.resize",
        app="spark_null",
        key="path",
        submission_id="bench",
        check_keys=False,
    )
    assert report.sent == ROWS


def into_noop(rows: DataFrame) -> None:
    rows.write.format("noop").mode("overwrite").save()


def into_python(rows: DataFrame) -> None:
    rows.mapInArrow(_count, "rows long").collect()


def _count(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield pa.RecordBatch.from_pydict({"rows": [sum(batch.num_rows for batch in batches)]})


def writer(spark: SparkSession) -> list[Check]:
    """Measure rows per second through the writer, without a real broker."""
    rows = table(spark)
    ways: dict[str, Callable[[DataFrame], None]] = {
        "format('aztask'), null broker": through_the_data_source,
        "submit(), null broker": through_submit,
        "Python function that drops its batches": into_python,
        "Spark's noop sink (no Python)": into_noop,
    }
    for way in ways.values():
        way(rows)  # once to warm up
    speeds = interleaved(
        {name: lambda way=way: ROWS / timed(way, rows) for name, way in ways.items()}
    )
    rows.unpersist()
    print(f"\nwriter: {ROWS:,} rows of 3 columns, {CORES} cores, rows/s")
    show(speeds)
    name = next(iter(ways))
    return [Check(name, statistics.median(speeds[name]), TARGET, "rows/s")]


def interleaved(ways: dict[str, Callable[[], float]]) -> dict[str, list[float]]:
    """{name: figures}; each round measures every figure once."""
    found: dict[str, list[float]] = defaultdict(list)
    for _ in range(ROUNDS):
        for name, measure in ways.items():
            found[name].append(measure())
    return found


def timed(way: Callable[[DataFrame], None], rows: DataFrame) -> float:
    """The seconds that `way` takes for the rows."""
    began = time.perf_counter()
    way(rows)
    return time.perf_counter() - began


def show(figures: dict[str, list[float]]) -> None:
    """Print one line for each figure."""
    for name, values in figures.items():
        print(f"  {name:<44} {spread(values)}")


PARTS: dict[str, Callable[[SparkSession], list[Check]]] = {
    "writer": writer,
    "stats": stats,
    "results": read_back,
}
"""A part prints its figures and returns the checks."""


def main() -> None:
    """Run the named parts, and conclude with the checks."""
    named = [name for name in sys.argv[1:] if not name.startswith("-")] or list(PARTS)
    print(machine(("pyspark", "pyarrow", "pandas")))
    spark = get_session(
        name="aztask-benchmark",
        master=f"local[{CORES}]",
        conf={"spark.sql.shuffle.partitions": "2", "spark.driver.memory": "2g"},
    )
    register(spark)
    checks = [check for name in named for check in PARTS[name](spark)]
    spark.stop()
    conclude(checks)


if __name__ == "__main__":
    main()
