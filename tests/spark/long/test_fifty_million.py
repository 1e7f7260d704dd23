"""Statistics of 50 million events: within 4 GB, and no worse than linear from 5 million.

AZTASK_LONG_EVENTS sets another number; a tenth of it is the smaller run.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "spark_stats.py"
MANY = int(os.environ.get("AZTASK_LONG_EVENTS", "50000000"))
MEMORY = 4 << 30


def stats_of(number, folder):
    """Seconds, bytes on disk and the most memory, of one run in a process of its own."""
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), "--once", str(number)],
        env={**os.environ, "BENCH_EVENTS_DIR": str(folder)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    told = json.loads(done.stdout.splitlines()[-1])
    print(told)
    return told


def test_ten_times_the_events_take_ten_times_the_time_at_most(tmp_path):
    few = stats_of(MANY // 10, tmp_path)
    many = stats_of(MANY, tmp_path)
    assert many["seconds"] <= 10 * few["seconds"]
    assert many["memory_bytes"] <= MEMORY
    assert many["rows"] == few["rows"]
