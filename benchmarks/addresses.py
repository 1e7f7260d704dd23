"""What several addresses bring: four Azurites against one, each behind a proxy that admits so many.

Usage: python benchmarks/addresses.py [--check] [--tasks 24000] [--rate 150] [--workers 2]
           [--seconds 20] [--warm 10] [--rounds 3]

The same queue with eight shards, filled before, is emptied by as many workers from one account and
from four. Each proxy admits 150 requests a second and answers the others with 503, as an account
does; the tasks do nothing. What counts is how many have ended after so many seconds, and how many
requests, also refused ones, were made for each.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests"), str(HERE.parent)]

import azurite  # noqa: E402
from common import Check, conclude, machine, spread  # noqa: E402
from throttle import throttling  # noqa: E402

from aztask import App  # noqa: E402
from aztask.queues.base import QueueOptions  # noqa: E402

SHARDS = 8
ADDRESSES = 4
LEAST_RATE = 3.2
"""How many times the tasks four addresses have to bring."""
WORKER = ("--pool", "threads", "-c", "16", "--prefetch", "64")

APP = f"""
import os
from aztask import App

app = App(
    "bench",
    broker=os.environ["BENCH"].split(" "),
    results=os.environ["BENCH_RESULTS"],
    owner="bench",
)
app.queue("default", shards={SHARDS})


@app.task
def noop() -> None: ...
"""


@dataclass(frozen=True)
class Found:
    """One run. rate: tasks a second. requests: of the workers, for each task."""

    rate: float
    requests: float


def run(folder: Path, count: int, given: argparse.Namespace) -> Found:
    """Empty a queue over so many addresses for some seconds."""
    folder.mkdir(parents=True)
    (folder / "bench_app.py").write_text(APP)
    with ExitStack() as stack:
        proxies = []
        texts = []
        for number in range(count):
            server = stack.enter_context(
                azurite.running(folder / f"azurite{number}", movable=False, in_memory=True)
            )
            proxies.append(stack.enter_context(throttling(server.port, None)))
            texts.append(server.connection_string_at(proxies[-1].port))
        results = f"local://{folder}/results.db"
        app = App("bench", broker=texts, results=results, owner="bench")
        app.queue("default", shards=SHARDS)
        noop = app.task(name="bench.noop")(lambda: None)
        app.broker.declare("default", QueueOptions())
        noop.map([()] * given.tasks)
        for proxy in proxies:
            proxy.rate, proxy.admitted, proxy.refused = given.rate, 0, 0
        environment = {
            **os.environ,
            "BENCH": " ".join(texts),
            "BENCH_RESULTS": results,
            "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(folder)]),
        }
        with (folder / "worker.log").open("wb") as log:
            command = [sys.executable, "-m", "aztask", "worker", "-A", "bench_app:app", *WORKER]
            workers = [
                subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
                for _ in range(given.workers)
            ]
        try:
            found = measured(app, proxies, given)
        finally:
            for worker in workers:
                worker.terminate()
            for worker in workers:
                worker.wait(60)
            app.close()
    return found


def measured(app: App, proxies: Sequence[object], given: argparse.Namespace) -> Found:
    """Count from some time behind the first end on."""

    def requests() -> int:
        return sum(each.admitted + each.refused for each in proxies)  # type: ignore[attr-defined]

    until = time.monotonic() + 60
    while ended(app) == 0:
        if time.monotonic() > until:
            raise RuntimeError("the workers do not work")
        time.sleep(0.05)
    time.sleep(given.warm)  # until each worker has learned how much each account takes
    began, first, asked = time.monotonic(), ended(app), requests()
    time.sleep(given.seconds)
    took, last, answered = time.monotonic() - began, ended(app), requests()
    if last >= given.tasks:
        raise RuntimeError("the queue ran empty: give more --tasks")
    return Found((last - first) / took, (answered - asked) / max(1, last - first))


def ended(app: App) -> int:
    """How many tasks have ended: the workers write their outcomes into the results file."""
    results = app.results
    assert results is not None
    return int(sum(1 for _ in results.recent(limit=10**6)))


def main() -> None:
    """Measure both in turns, and check what is promised."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--tasks", type=int, default=24_000)
    parser.add_argument("--rate", type=float, default=150.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--warm", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    print(machine(("azure-storage-queue", "azure-core")))
    found: dict[int, list[Found]] = {1: [], ADDRESSES: []}
    with tempfile.TemporaryDirectory(prefix="aztask-bench-") as name:
        for number in range(given.rounds):
            for count, runs in found.items():
                runs.append(run(Path(name) / f"{number}-{count}", count, given))
    for count, runs in found.items():
        print(f"  {count} address(es), tasks/s        {spread([each.rate for each in runs])}")
        print(f"  {count} address(es), requests/task  {spread([each.requests for each in runs])}")
    one, four = (
        Found(
            statistics.median(each.rate for each in runs),
            statistics.median(each.requests for each in runs),
        )
        for runs in found.values()
    )
    conclude(
        [
            Check("tasks of four addresses to those of one", four.rate / one.rate, LEAST_RATE, "x"),
            Check(
                "requests per task of four addresses to those of one",
                four.requests / one.requests,
                1.0,
                "x",
                at_least=False,
            ),
        ]
    )


if __name__ == "__main__":
    main()
