"""Statistics of 50 million events: within 4 GB, and at most ten times as long as 5 million take.

    python benchmarks/spark_long.py [--check] [> docs/benchmarks/spark-long.txt]

Each run is a separate process (``spark_stats.py --once``), which first makes its events in a
temporary folder. BENCH_LONG_EVENTS sets another number of events; the smaller run has a tenth of
it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import Check, conclude, machine

HERE = Path(__file__).parent
MANY = int(os.environ.get("BENCH_LONG_EVENTS", "50000000"))
TIMES = 10
MEMORY = 4 << 30


def once(number: int, folder: str) -> dict[str, Any]:
    """One run over `number` events: its seconds, bytes on disk, rows of figures, peak memory."""
    done = subprocess.run(
        [sys.executable, str(HERE / "spark_stats.py"), "--once", str(number)],
        env={**os.environ, "BENCH_EVENTS_DIR": folder},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(
        f"  {number:>12,} events  {measured['disk_bytes'] / 1e6:>7,.0f} MB of Parquet  "
        f"{measured['seconds']:>7,.1f} s  {measured['memory_bytes'] / 2**30:>5.2f} GiB at most"
    )
    return measured


def main() -> None:
    """Measure both runs, print the figures, and check them."""
    print("benchmark: statistics of many events, Spark on two cores, one run each")
    print(machine(("pyspark", "pyarrow")))
    print("command: python benchmarks/spark_long.py\n")
    with tempfile.TemporaryDirectory(prefix="aztask-bench-") as folder:
        few = once(MANY // TIMES, folder)
        many = once(MANY, folder)
    if many["rows"] != few["rows"]:
        raise SystemExit(f"the runs differ in their rows: {few['rows']} and {many['rows']}")
    growth = many["seconds"] / few["seconds"]
    memory = many["memory_bytes"] / 2**30
    conclude(
        [
            Check(f"time for {TIMES} times the events", growth, TIMES, "times", at_least=False),
            Check("memory of JVM and Python", memory, MEMORY / 2**30, "GiB", at_least=False),
        ]
    )


if __name__ == "__main__":
    main()
