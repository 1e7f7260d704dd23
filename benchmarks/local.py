"""The speed of sends and workers on the embedded broker.

Usage: python benchmarks/local.py [--check] [--idle] [--supervisors]

--idle: measure only the cost of an idle worker, and how soon it starts a task
[> docs/benchmarks/idle.txt].
--supervisors: measure only one, two and four supervisors of one worker on one file
[> docs/benchmarks/supervisors.txt].

Every figure is the median of interleaved runs: each round measures everything once. Broker, results
and events are on. The worker runs in its own processes, started as a user starts it.
"""

from __future__ import annotations

import importlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common import (
    Check,
    conclude,
    family,
    machine,
    megabytes,
    percentile,
    processor_seconds,
    spread,
)

HERE = Path(__file__).parent
ROUNDS = int(os.environ.get("BENCH_ROUNDS", "5"))
SINGLE = 5_000
BATCHED = 50_000
SIZES = (2_000, 20_000)
SUPERVISORS = (1, 2, 4)
LATENCIES = 60
START = "worker start to first task, s"
IDLE = "idle worker, % of a core"
P50, P95 = (f"idle .delay() to start, {each}, ms" for each in ("p50", "p95"))


class Site:
    """A new folder with a broker, and an app that uses it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.address = f"local://{folder}/queues.db"
        os.environ["BENCH_BROKER"] = self.address
        os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), str(HERE.parent)])
        sys.path[:0] = [str(HERE), str(HERE.parent)]
        sys.modules.pop("bench_tasks", None)
        self.tasks = importlib.import_module("bench_tasks")
        self.app = self.tasks.app

    @contextmanager
    def worker(self, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
        """Run a worker with events, and stop it at the end."""
        environment = {**os.environ, "AZTASK_EVENTS": str(self.folder / "events")}
        process = subprocess.Popen(
            [sys.executable, "-m", "aztask", "worker", "-A", "bench_tasks", *arguments],
            env=environment,
            stderr=subprocess.DEVNULL,
        )
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


@contextmanager
def fresh() -> Iterator[Site]:
    """Yield a site in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="aztask-bench-") as folder:
        site = Site(Path(folder))
        yield site
        site.app.close()


def batched_sends() -> float:
    """Tasks/s of one `.map` with many calls."""
    with fresh() as site:
        calls = [()] * BATCHED
        began = time.perf_counter()
        site.tasks.noop.map(calls)
        return BATCHED / (time.perf_counter() - began)


def single_sends() -> float:
    """Tasks/s of `.delay()` in a loop."""
    with fresh() as site:
        site.tasks.noop.delay()
        began = time.perf_counter()
        for _ in range(SINGLE):
            site.tasks.noop.delay()
        return SINGLE / (time.perf_counter() - began)


def ended(site: Site) -> int:
    """The number of runs with an outcome."""
    with site.app.results._database.read() as connection:
        return connection.execute("SELECT COUNT(*) FROM runs WHERE ended_at > 0").fetchone()[0]


def wait_for(site: Site, count: int) -> None:
    """Wait for `count` outcomes; polls rarely, so as not to disturb the worker."""
    while ended(site) < count:
        time.sleep(0.05)


def throughput(pool: str, count: int, supervisors: int = 1) -> tuple[float, float]:
    """No-op tasks/s of one warm worker at concurrency 8, from first send to last record; and its
    processor time for each, in microseconds, which other programs of the machine change less.
    """
    given = ("-c", "8", "--pool", pool, "--supervisors", str(supervisors))
    with fresh() as site, site.worker(*given) as worker:
        site.tasks.noop.map([()] * 400)
        wait_for(site, 400)
        time.sleep(2.0 * supervisors)  # until all pool processes run and are idle
        everyone = family(worker.pid)
        used = -sum(map(processor_seconds, everyone))
        began = time.time()
        site.tasks.noop.map([()] * count)
        wait_for(site, 400 + count)
        used += sum(map(processor_seconds, everyone))
        with site.app.results._database.read() as connection:
            last = connection.execute("SELECT MAX(ended_at) FROM runs").fetchone()[0]
        return count / (last - began), 1e6 * used / count


def idle() -> dict[str, float]:
    """Measure the latency and the cost of an idle worker."""
    with fresh() as site:
        began = time.time()
        first = site.tasks.now.delay()
        with site.worker("-c", "8", "--pool", "processes") as worker:
            start_seconds = first.get(timeout=30) - began
            time.sleep(3.0)
            everyone = family(worker.pid)
            used = -sum(map(processor_seconds, everyone))
            time.sleep(5.0)
            used += sum(map(processor_seconds, everyone))
            memory = sum(map(megabytes, everyone))
            delays = []
            for _ in range(LATENCIES):
                time.sleep(0.05)
                sent = time.time()
                delays.append(site.tasks.now.delay().get(timeout=30) - sent)
    return {
        START: start_seconds,
        IDLE: 100 * used / 5.0,
        P50: 1000 * percentile(delays, 0.5),
        P95: 1000 * percentile(delays, 0.95),
        "memory of its processes, MB": memory,
    }


def help_seconds() -> float:
    """Seconds that the process `aztask --help` takes."""
    began = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "aztask", "--help"], check=True, stdout=subprocess.DEVNULL
    )
    return time.perf_counter() - began


def compare_supervisors(figures: dict[str, list[float]]) -> None:
    """Measure each number of supervisors once."""
    for pool in ("threads", "processes"):
        for number in SUPERVISORS:
            rate, cost = throughput(pool, SIZES[-1], number)
            name = f"{pool}, {number} supervisor{'s' * (number > 1)}"
            figures[f"{name}, tasks/s"].append(rate)
            figures[f"{name}, CPU, µs"].append(cost)


def one_round(figures: dict[str, list[float]], *, busy: bool) -> None:
    """Measure every figure once."""
    if busy:
        figures["batched sends/s"].append(batched_sends())
        figures["single .delay()/s"].append(single_sends())
        for count in SIZES:
            for pool in ("threads", "processes"):
                figures[f"{count} no-ops, {pool}, tasks/s"].append(throughput(pool, count)[0])
        figures["aztask --help, s"].append(help_seconds())
    for name, value in idle().items():
        figures[name].append(value)


def busy_checks(middle: dict[str, float]) -> Iterator[Check]:
    """Check the figures measured under load."""
    yield Check("batched sends", middle["batched sends/s"], 60_000, "/s")
    yield Check("single .delay()", middle["single .delay()/s"], 12_000, "/s")
    for count in SIZES:
        for pool, target in (("threads", 7_000), ("processes", 4_000)):
            rate = middle[f"{count} no-ops, {pool}, tasks/s"]
            yield Check(f"{count} no-ops, one worker, 8 {pool}", rate, target, "tasks/s")
    yield Check("aztask --help", middle["aztask --help, s"], 0.3, "s", at_least=False)


def main() -> None:
    """Measure all rounds, print the figures, and check them."""
    busy, several = "--idle" not in sys.argv, "--supervisors" in sys.argv
    command = "python benchmarks/local.py"
    command += " --supervisors" if several else "" if busy else " --idle"
    print("benchmark: the embedded broker, results recorded and events written")
    print(machine())
    print(f"durability: process (WAL, synchronous=NORMAL); command: {command}\n")
    figures: dict[str, list[float]] = defaultdict(list)
    for _ in range(ROUNDS):
        if several:
            compare_supervisors(figures)
        else:
            one_round(figures, busy=busy)
    for name, values in figures.items():
        print(f"  {name:<34} {spread(values)}")
    middle = {name: statistics.median(values) for name, values in figures.items()}
    if several:
        return
    conclude(
        [
            *(busy_checks(middle) if busy else ()),
            Check("idle .delay() to start, p95", middle[P95], 30, "ms", at_least=False),
            Check("idle worker", middle[IDLE], 1.0, "% core", at_least=False),
            Check("worker start to first task", middle[START], 1.5, "s", at_least=False),
        ]
    )


if __name__ == "__main__":
    main()
