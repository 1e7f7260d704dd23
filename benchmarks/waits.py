"""What tasks that wait cost: memory, and waking them all.

Usage: python benchmarks/waits.py [--check] [--tasks 10000]

park   so many tasks wait for a signal; the memory of their worker before and afterwards.
wake   a signal to each of them, beside as many bare sends and twice as many requests for a row.
end    until all of them have ended.

--check fails if waking takes more than 1.5 times the bare requests, or if memory grows with the
number of tasks.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from common import Check, conclude, figure, machine

from aztask import App
from aztask.stores.records.base import State
from aztask.stores.rows import Change, Place

PATIENCE = 600.0
MOST = 1.5
MOST_GROWTH = 24 * 1024
"""KiB of memory that a worker may grow by, however many tasks wait: buffers and caches."""
ROOT = Path(__file__).parents[1]
APP = """
import os
from aztask import App

app = App("bench", broker=os.environ["BENCH"], results=os.environ["BENCH"])


@app.task_with_context
def order(context, number):
    return context.wait_for("approved", timeout=86_400)
"""


def taken(what: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    began = time.perf_counter()
    what()
    return time.perf_counter() - began


def resident(pid: int) -> int:
    """The resident memory of a process, in KiB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1])
    return 0


def until(condition: Callable[[], bool]) -> float:
    """Seconds until the condition is true."""
    began = time.perf_counter()
    while not condition():
        if time.perf_counter() - began > PATIENCE:
            raise SystemExit("it took too long")
        time.sleep(0.1)
    return time.perf_counter() - began


def bare(app: App, count: int) -> float:
    """Seconds for so many bare sends and twice as many requests for a row."""
    store = app.sends.signals.store
    assert store is not None
    rows, owner = store._rows, store.owner

    def work() -> None:
        for number in range(count):
            app.send("bench.nothing", [number], queue="bare")
            place = Place(owner, f"bare-{number}", f"bare-{number}:x")
            made = rows.write(Change(place, {"due": 1e11, "data": b"x" * 100}))
            assert made is not None
            rows.get([place])

    return taken(work)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--tasks", type=int, default=10_000)
    options = parser.parse_args()
    count = options.tasks
    print(machine())
    with tempfile.TemporaryDirectory() as folder:
        address = f"local://{folder}/bench.db"
        (Path(folder) / "waits_app.py").write_text(APP)
        environment = {
            **os.environ,
            "BENCH": address,
            "PYTHONPATH": os.pathsep.join([str(ROOT), folder]),
        }
        command = [sys.executable, "-m", "aztask", "worker", "-A", "waits_app:app", "-c", "2"]
        with (Path(folder) / "log").open("wb") as log:
            worker = subprocess.Popen(
                [*command, "--log-tasks", "off"], env=environment, stdout=log, stderr=log
            )
        app = App("bench", broker=address, results=address)
        try:
            app.send("bench.order", [-1], task_id="first")
            until(lambda: _waits(app, "first"))
            before = resident(worker.pid)
            for number in range(count):
                app.send("bench.order", [number], task_id=f"t{number}")
            parked = until(lambda: app.broker.stats("default").active == 0 and _idle(app))
            after = resident(worker.pid)
            alone = bare(app, count)

            def wake() -> None:
                for number in range(count):
                    app.result(f"t{number}").signal("approved", number)

            woken = taken(wake)
            ended = until(lambda: app.result(f"t{count - 1}").ready() and _idle(app))
            states = {app.result(f"t{number}").state for number in range(0, count, 97)}
            if states != {State.SUCCEEDED.value}:
                raise SystemExit(f"some tasks are {states}")
        finally:
            worker.terminate()
            worker.wait(30)
    print(f"{count:,} tasks parked in {figure(parked)} s")
    print(f"memory of the worker: {before:,} KiB before, {after:,} KiB while they wait")
    print(f"{count:,} bare sends and {2 * count:,} bare requests for a row: {figure(alone)} s")
    print(f"{count:,} signals: {figure(woken)} s; all have ended {figure(ended)} s later")
    conclude(
        [
            Check("waking, times the bare requests", woken / alone, MOST, "times", at_least=False),
            Check("growth of memory", after - before, MOST_GROWTH, "KiB", at_least=False),
        ]
    )


def _waits(app: App, task_id: str) -> bool:
    return app.result(task_id).state == "waiting"


def _idle(app: App) -> bool:
    stats = app.broker.stats("default")
    return not stats.active and not stats.leased


if __name__ == "__main__":
    main()
