"""Results of a submission read back in bulk: rows per second from a file and from Azure Tables.

A part of ``benchmarks/spark.py``. BENCH_RESULTS (100,000) tasks have ended in a local file, and
BENCH_TABLES (10,000) in Azurite's tables, beside as many of other submissions. Beside Tables stands
what the bare SDK lists of the same rows, in pages of a thousand and on as many threads as Spark has
cores, and what the store gives when it is asked for one task at a time.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "tests")]

import azurite  # noqa: E402
from azure.data.tables import TableClient  # noqa: E402
from common import Check, spread  # noqa: E402
from pyspark.sql import SparkSession  # noqa: E402

from aztask import App  # noqa: E402
from aztask.settlement import Complete  # noqa: E402
from aztask.spark import Target, results, task_id  # noqa: E402
from aztask.stores.records.base import (  # noqa: E402
    Finish,
    Outcome,
    Provisioned,
    ResultStore,
    RunKey,
    RunRecord,
    Start,
    State,
)
from aztask.stores.records.tables.store import TABLE  # noqa: E402

ROUNDS = int(os.environ.get("BENCH_ROUNDS", "5"))
LOCAL = int(os.environ.get("BENCH_RESULTS", "100000"))
TABLES = int(os.environ.get("BENCH_TABLES", "10000"))
SINGLE = 500
"""Tasks that are asked for one at a time."""
BATCH = 1000
CORES = 2
RANGES = [f"t-{first}" for first in "02468ace"]
"""Where the listings of the bare SDK begin: ids are hashes in hexadecimal digits."""
VARIABLE = "BENCH_RESULTS_ACCOUNT"
PORTS = {service: azurite.free_port() for service in ("table", "blob")}
os.environ[VARIABLE] = (
    f"DefaultEndpointsProtocol=http;AccountName={azurite.ACCOUNT};AccountKey={azurite.KEY};"
    f"TableEndpoint=http://127.0.0.1:{PORTS['table']}/{azurite.ACCOUNT};"
    f"BlobEndpoint=http://127.0.0.1:{PORTS['blob']}/{azurite.ACCOUNT};"
)  # before Spark starts: executors have the environment of that moment
FROM_LOCAL = 50_000
OF_THE_SDK = 0.8
"""The share of the bare SDK's rows per second that we must reach."""


def fill(store: ResultStore, ids: Iterable[str]) -> None:
    """Let all these tasks be sent, start, and succeed."""
    outcome = Outcome(State.SUCCEEDED, Complete(), b"\x01", at=time.time(), duration=0.1)
    todo = list(ids)
    for first in range(0, len(todo), BATCH):
        keys = [RunKey(each) for each in todo[first : first + BATCH]]
        store.expect([RunRecord(key, "bench.one", "default", State.PENDING) for key in keys])
        store.start(
            [
                Start(key, "bench.one", "default", 1, key.task_id, "bench", time.time())
                for key in keys
            ]
        )
        store.record([Finish(key, key.task_id, outcome) for key in keys])


def filled(broker: str, address: str, number: int) -> None:
    """A result store with a submission ``bench`` of so many tasks, and one of as many others."""
    app = App("bench", broker=broker, results=address)
    assert app.results is not None
    if isinstance(app.results, Provisioned):
        app.results.create()
    for submission in ("bench", "others"):
        fill(app.results, (task_id(submission, key) for key in range(number)))
    app.close()


def by_spark(spark: SparkSession, target: Target, number: int) -> int:
    """Look all keys of the submission up; returns how many had succeeded."""
    keys = spark.range(0, number, 1, CORES).withColumnRenamed("id", "key")
    found = results(spark, "bench", frame=keys, target=target)
    return found.where("state = 'succeeded'").count()


def by_the_sdk(connection: str) -> int:
    """List all rows of tasks with the bare SDK, a range for each thread; returns their number."""

    def listed(place: int) -> int:
        end = RANGES[place + 1] if place + 1 < len(RANGES) else "t."
        text = "PartitionKey ge @first and PartitionKey lt @end"
        with TableClient.from_connection_string(connection, TABLE) as table:
            rows = table.query_entities(
                text, parameters={"first": RANGES[place], "end": end}, results_per_page=1000
            )
            return sum(1 for _ in rows)

    with ThreadPoolExecutor(CORES) as pool:
        return sum(pool.map(listed, range(len(RANGES))))


def one_by_one(broker: str, address: str, number: int) -> int:
    """Ask the store for one task at a time, with sixteen threads."""
    app = App("bench", broker=broker, results=address)
    store = app.results
    assert store is not None
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(store.get, [task_id("bench", key) for key in range(number)]))
    app.close()
    return sum(each is not None for each in found)


def speeds(ways: dict[str, tuple[Callable[[], int], int]]) -> dict[str, list[float]]:
    """{name: rows per second of each round}. ways: what to call, and how many rows it gives."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, (way, number) in ways.items():
            began = time.perf_counter()
            assert way() == number, name
            found[name].append(number / (time.perf_counter() - began))
    return found


def shown(found: dict[str, list[float]]) -> Sequence[float]:
    """Print the figures; returns the medians."""
    for name, values in found.items():
        print(f"  {name:<44} {spread(values)}")
    return [statistics.median(values) for values in found.values()]


def read_back(spark: SparkSession) -> list[Check]:
    """The part ``results`` of ``benchmarks/spark.py``."""
    with tempfile.TemporaryDirectory(prefix="aztask-bench-") as name:
        folder = Path(name)
        broker = f"local://{folder}/queues.db"
        filled(broker, broker, LOCAL)
        target = Target(broker=broker, results=broker)
        by_spark(spark, target, 1000)  # once to warm up
        print(f"\nresults: {LOCAL:,} of {2 * LOCAL:,} tasks in a file, rows/s")
        (local,) = shown(
            speeds({"aztask results": (lambda: by_spark(spark, target, LOCAL), LOCAL)})
        )
        with (
            azurite.running(folder / "table", service="table", port=PORTS["table"]),
            azurite.running(folder / "blob", service="blob", port=PORTS["blob"]),
        ):
            connection = os.environ[VARIABLE]
            filled(broker, connection, TABLES)
            far = Target(broker=broker, results_env=VARIABLE)
            rows = by_the_sdk(connection)
            single = min(SINGLE, TABLES)
            print(
                f"results: {TABLES:,} of {2 * TABLES:,} tasks in Azurite's tables "
                f"({rows:,} rows), rows/s"
            )
            ours, bare, _ = shown(
                speeds(
                    {
                        "aztask results": (lambda: by_spark(spark, far, TABLES), TABLES),
                        "bare SDK, all rows listed": (lambda: by_the_sdk(connection), rows),
                        "one task at a time, 16 threads": (
                            lambda: one_by_one(broker, connection, single),
                            single,
                        ),
                    }
                )
            )
    # What the SDK lists has the rows of the others, too, and two rows for some tasks.
    possible = bare * TABLES / rows
    return [
        Check("results from a file", local, FROM_LOCAL, "rows/s"),
        Check("results from Tables beside the bare SDK", ours / possible, OF_THE_SDK, "times"),
    ]
