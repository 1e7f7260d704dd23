"""The rate of a worker's portable shell beside that of the fork server.

Usage: python benchmarks/portable.py [--check] [--pairs 15] [--tasks 6000]
           [> docs/benchmarks/portable.txt]

Each pair drains a queue file of short tasks with a worker of two slots and each shell, in turn, so
that what else the machine does falls on both. The tasks are sent when the pool is ready, and count
from then on until a twentieth is left. CPU time is that of the worker and all its processes in that
time. A ratio is the median of the pairs' ratios, with its 95 % interval (`compare.py`).

With --check the exit code is 1 if the portable shell has less than 0.7 of the other's rate. Where
the interval of the rate leaves that open, because the machine is busy, the CPU time per task
decides.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from common import family, figure, machine, processor_seconds
from compare import Ratio

from aztask import App

LEAST = 0.7
PROCESSES = {"processes": 2, "threads": 1}
"""The pools, and how many processes each has."""
SHELLS = ("0", "1")
APP = """
from aztask import App
app = App("rates", broker="local://{file}", results="local://{file}")

@app.task
def add(left, right):
    return left + right
"""


@dataclass(frozen=True)
class Drained:
    """What one worker did. used: CPU seconds."""

    tasks: int
    seconds: float
    used: float

    @property
    def rate(self) -> float:
        """Tasks a second."""
        return self.tasks / self.seconds

    @property
    def cost(self) -> float:
        """CPU time of a task, microseconds."""
        return 1e6 * self.used / self.tasks


def ready(pid: int) -> bool:
    """Whether a pool process serves: from then on it has a second thread."""
    try:
        name = Path(f"/proc/{pid}/comm").read_text().rstrip()
        return name == "aztask-pool" and len(list(Path(f"/proc/{pid}/task").iterdir())) > 1
    except OSError:
        return False


def drain(folder: Path, app: App, pool: str, shell: str, tasks: int) -> Drained:
    """Have one worker whose pool is ready drain the queue."""
    command = [sys.executable, "-m", "aztask", "worker", "-A", "rates", "--pool", pool, "-c", "2"]
    worker = subprocess.Popen(
        [*command, "--log-tasks", "off"],
        cwd=folder,
        env={**os.environ, "AZTASK_PORTABLE": shell},
        stderr=subprocess.DEVNULL,
    )
    try:
        while sum(map(ready, found := family(worker.pid))) < PROCESSES[pool]:
            time.sleep(0.02)
        app.tasks["rates.add"].map([(number, number) for number in range(tasks)])
        first = left_of(app), time.monotonic(), sum(map(processor_seconds, found))
        while (left := left_of(app)) > 0.05 * tasks:
            time.sleep(0.005)
        used = sum(map(processor_seconds, found)) - first[2]
        return Drained(first[0] - left, time.monotonic() - first[1], used)
    finally:
        worker.terminate()
        if worker.wait():
            raise SystemExit(f"the worker ended with {worker.returncode}")


def left_of(app: App) -> int:
    """How many tasks have not ended."""
    stats = app.broker.stats("default")
    return (stats.active or 0) + (stats.leased or 0)


def report(pool: str, forked: list[Drained], portable: list[Drained]) -> bool:
    """Print a pool's figures; whether they are good enough."""
    rate = Ratio.of([[each.rate] for each in portable], [[each.rate] for each in forked])
    cost = Ratio.of([[each.cost] for each in portable], [[each.cost] for each in forked])
    for name, ratio in (("rate", rate), ("cost", cost)):
        values = [statistics.median(getattr(x, name) for x in side) for side in (forked, portable)]
        title = {"rate": "tasks/s", "cost": "CPU time per task, µs"}[name]
        print(
            f"  {pool + ': ' + title:<36} {figure(values[0]):>9} {figure(values[1]):>9}   "
            f"{ratio.middle:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"
        )
    if rate.low < LEAST <= rate.high:
        return cost.middle <= 1 / LEAST
    return rate.low >= LEAST


def main() -> None:
    """Print the figures of each pool; exit 1 with ``--check`` if one is too low."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--tasks", type=int, default=8_000)
    parser.add_argument("--check", action="store_true", help="exit 1 unless all figures hold")
    options = parser.parse_args()
    print("benchmark: a worker of two slots with the fork server and with the portable shell")
    print(machine())
    sizes = f"--pairs {options.pairs} --tasks {options.tasks}"
    print(f"command: python benchmarks/portable.py {sizes}\n", flush=True)
    found: dict[tuple[str, str], list[Drained]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "rates.py").write_text(APP.format(file=folder / "queues.db"))
        address = f"local://{folder / 'queues.db'}"
        app = App("rates", broker=address, results=address)
        app.task(name="rates.add")(int.__add__)
        for number in range(options.pairs):
            for pool in PROCESSES:
                for shell in SHELLS if number % 2 else reversed(SHELLS):
                    found[pool, shell].append(drain(folder, app, pool, shell, options.tasks))
        app.close()
    print(f"  {'':<36} {'forked':>9} {'portable':>9}   portable/forked (95 % interval)")
    fine = [report(pool, found[pool, "0"], found[pool, "1"]) for pool in PROCESSES]
    print(
        f"\n  the portable shell has at least {LEAST} of the rate: {'yes' if all(fine) else 'no'}"
    )
    if options.check and not all(fine):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
