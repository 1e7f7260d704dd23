"""Compares aztask's statistics with plain Spark SQL and DuckDB on the same Parquet files.

    python benchmarks/spark_stats.py [--check]       interleaved, BENCH_EVENTS (5,000,000) events
    python benchmarks/spark_stats.py --once N        one run over N events: JSON with seconds, and
                                                     the peak memory of JVM and Python

The plain query computes only the same percentiles of the same levels. Ours also checks for
duplicates and counts every kind of event and problem. BENCH_EVENTS_DIR keeps the events for the
next run.
"""

from __future__ import annotations

import json
import os
import statistics as numbers
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), str(HERE.parent)])

from common import Check, conclude, machine, spread  # noqa: E402
from pyspark.sql import SparkSession  # noqa: E402
from spark_events import write_compacted  # noqa: E402

from aztask.spark import get_session, read_events, statistics  # noqa: E402
from aztask.spark.events.statistics import ACCURACY, OUTCOMES, RAN, SPREADS, plain  # noqa: E402

ROUNDS = int(os.environ.get("BENCH_ROUNDS", "5"))
EVENTS = int(os.environ.get("BENCH_EVENTS", "5000000"))
MEMORY = "2200m"
MOST = 3.0
"""Our time must stay below the plain query's times this factor."""


def _in(kinds: tuple[str, ...]) -> str:
    return ", ".join(f"'{kind}'" for kind in kinds)


MEASURES = f"""
    SELECT task, queue, CAST(floor(ts / 3600) AS BIGINT) AS hour,
        CASE WHEN event = 'started' THEN wait_seconds END AS wait,
        CASE WHEN event IN ({_in(RAN)}) THEN duration_seconds END AS run,
        CASE WHEN event IN ({_in(OUTCOMES)}) THEN margin_seconds END AS margin,
        held_seconds AS held
    FROM events
"""
LEVELS = "GROUP BY GROUPING SETS ((task), (queue), (queue, hour), ())"


def events_in(folder: Path, number: int) -> Path:
    """The folder with the events, which are made if they are missing."""
    directory = Path(os.environ.get("BENCH_EVENTS_DIR", folder)) / f"events-{number}"
    if not directory.exists():
        began = time.perf_counter()
        size = write_compacted(directory, number)
        print(f"{number:,} events: {size / 1e6:,.0f} MB, {time.perf_counter() - began:.0f} s")
    return directory


def by_aztask(spark: SparkSession, directory: Path) -> int:
    """Compute every figure of every level, as ``aztask spark stats`` does."""
    events = read_events(spark, directory)
    counts = events.counts
    figures = statistics(events.events)
    frames = (figures.by_task, figures.by_queue, figures.by_queue_hour, figures.total)
    rows = sum(len(plain(frame)) for frame in frames)
    figures.close()
    events.close()
    assert counts.duplicates == 0
    return rows


def by_plain_spark(spark: SparkSession, directory: Path) -> int:
    """Compute only the percentiles, in Spark SQL."""
    spark.read.parquet(f"{directory}/date=*/hour=*").createOrReplaceTempView("events")
    percentiles = ", ".join(
        f"percentile_approx({name}, array({', '.join(map(str, shares.values()))}), {ACCURACY})"
        for name, shares in SPREADS.items()
    )
    return len(
        spark.sql(f"SELECT task, queue, hour, {percentiles} FROM ({MEASURES}) {LEVELS}").collect()
    )


def by_duckdb(directory: Path) -> int:
    """Compute only the percentiles, in DuckDB with its own sketch."""
    percentiles = ", ".join(
        f"approx_quantile({name}, [{', '.join(map(str, shares.values()))}])"
        for name, shares in SPREADS.items()
    )
    measures = MEASURES.replace(
        "FROM events", f"FROM read_parquet('{directory}/date=*/hour=*/*.parquet')"
    ).replace(" AS hour", " AS the_hour")
    levels = LEVELS.replace("hour", "the_hour")
    import duckdb  # noqa: PLC0415  # a single run does without it

    with duckdb.connect() as connection:
        connection.execute("SET threads TO 2")
        query = f"SELECT task, queue, the_hour, {percentiles} FROM ({measures}) {levels}"
        return len(connection.execute(query).fetchall())


def stats(spark: SparkSession) -> list[Check]:
    """The part ``stats`` of ``benchmarks/spark.py``."""
    with tempfile.TemporaryDirectory(prefix="aztask-bench-") as folder:
        directory = events_in(Path(folder), EVENTS)
        ways: dict[str, Callable[[], int]] = {
            "aztask stats": lambda: by_aztask(spark, directory),
            "Spark SQL, the same percentiles alone": lambda: by_plain_spark(spark, directory),
            "DuckDB, the same percentiles alone": lambda: by_duckdb(directory),
        }
        rows = {name: way() for name, way in ways.items()}  # once to warm up
        assert len(set(rows.values())) == 1, rows
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(ROUNDS):
            for name, way in ways.items():
                began = time.perf_counter()
                way()
                seconds[name].append(time.perf_counter() - began)
    print(f"\nstats: {EVENTS:,} events in compacted hours, seconds")
    for name, values in seconds.items():
        print(f"  {name:<44} {spread(values)}")
    ours, theirs, _ = (numbers.median(values) for values in seconds.values())
    return [Check("stats beside plain Spark SQL", ours / theirs, MOST, "times", at_least=False)]


class Memory:
    """Measures the peak memory of this process and its children together, in bytes."""

    def __init__(self) -> None:
        self.most = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> int:
        self._stopping.set()
        self._thread.join()
        return self.most

    def _watch(self) -> None:
        while not self._stopping.wait(0.2):
            self.most = max(self.most, _held_below(os.getpid()))


def _held_below(root: int) -> int:
    """Proportional set size of a process tree; shared pages count once."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(entry.name)] = int(stat[1])
    family = {root}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return sum(map(_held, family))


def _held(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # it has ended
    return 0


def session() -> SparkSession:
    return get_session(
        name="aztask-benchmark",
        master="local[2]",
        conf={"spark.sql.shuffle.partitions": "8", "spark.driver.memory": MEMORY},
    )


def once(number: int) -> None:
    """Run once over `number` events, and print the result as JSON."""
    with tempfile.TemporaryDirectory(prefix="aztask-bench-") as folder:
        directory = events_in(Path(folder), number)
        size = sum(path.stat().st_size for path in directory.rglob("*.parquet"))
        memory = Memory()
        spark = session()
        began = time.perf_counter()
        rows = by_aztask(spark, directory)
        seconds = time.perf_counter() - began
        spark.stop()
        told = {"events": number, "disk_bytes": size, "seconds": seconds, "rows": rows}
        print(json.dumps({**told, "memory_bytes": memory.stop()}))


def main() -> None:
    if "--once" in sys.argv:
        once(int(sys.argv[sys.argv.index("--once") + 1]))
        return
    print(machine(("pyspark", "pyarrow", "duckdb")))
    spark = session()
    checks = stats(spark)
    spark.stop()
    conclude(checks)


if __name__ == "__main__":
    main()
