"""The rate of a worker's portable shell beside that of the fork server.

Usage: python benchmarks/portable.py [--check] [TASKS]

Each round drains a queue file of short tasks with a worker of two slots, with both shells and both
pools in turn, so that what else the machine does falls on all of them. Only the second half of the
tasks counts: before that, new interpreters may still be starting. Figures are medians of the
rounds. With --check the exit code is 1 if the portable shell has less than 0.7 of the other's rate.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from aztask import App

ROUNDS = 5
LEAST = 0.7
POOLS = ("processes", "threads")
SHELLS = ("0", "1")
APP = """
from aztask import App
app = App("rates", broker="local://{file}", results="local://{file}")

@app.task
def add(left, right):
    return left + right
"""


def rate(folder: Path, app: App, pool: str, shell: str, tasks: int) -> float:
    """Tasks a second of one worker that drains the queue."""
    for number in range(tasks):
        app.send("rates.add", [number, number])
    command = [sys.executable, "-m", "aztask", "worker", "-A", "rates", "--pool", pool, "-c", "2"]
    worker = subprocess.Popen(
        [*command, "--burst", "--log-tasks", "off"],
        cwd=folder,
        env={**os.environ, "AZTASK_PORTABLE": shell},
        stderr=subprocess.DEVNULL,
    )
    first: tuple[float, int] | None = None
    found = 0.0
    while worker.poll() is None:
        stats = app.broker.stats("default")
        left, now = (stats.active or 0) + (stats.leased or 0), time.monotonic()
        if first is None and left <= 0.5 * tasks:
            first = now, left
        if first is not None and left <= 0.05 * tasks:
            found = (first[1] - left) / (now - first[0])
            break
        time.sleep(0.005)
    if worker.wait() or not found:
        raise SystemExit(f"the worker ended with {worker.returncode}")
    return found


def main() -> None:
    """Print the rates and their ratio for each pool."""
    given = [each for each in sys.argv[1:] if each.isdigit()]
    tasks = int(given[0]) if given else 8_000
    rates: dict[tuple[str, str], list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "rates.py").write_text(APP.format(file=folder / "queues.db"))
        address = f"local://{folder / 'queues.db'}"
        app = App("rates", broker=address, results=address)
        for _ in range(ROUNDS):
            for pool in POOLS:
                for shell in SHELLS:
                    rates[pool, shell].append(rate(folder, app, pool, shell, tasks))
        app.close()
    ratios = []
    for pool in POOLS:
        forked, portable = (statistics.median(rates[pool, shell]) for shell in SHELLS)
        ratios.append(portable / forked)
        print(f"{pool}: {forked:,.0f} tasks/s forked, {portable:,.0f} portable, {ratios[-1]:.2f}")
    if "--check" in sys.argv and min(ratios) < LEAST:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
