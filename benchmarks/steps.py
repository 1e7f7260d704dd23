"""What a recorded step costs.

Usage: python benchmarks/steps.py [--check] [> docs/benchmarks/steps.txt]

A worker runs tasks of 100 steps, each of which returns a number. The task itself measures, in its
pool process: from before its first step, which reads the history, to behind its last one.

file     the rate, and the rows that the process has changed in the file: in the first run, and in
         the run after a failure, which gets all steps from their records.
tables   the requests to Azure Tables (Azurite) of both runs.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "tests"), str(HERE.parent)]

import azurite  # noqa: E402
from common import Check, conclude, machine, spread  # noqa: E402

from aztask import App  # noqa: E402
from aztask.stores.records.base import Provisioned  # noqa: E402

STEPS = 100
TASKS = 30
WARM = 3
RATE = 3_000
PATIENCE = 120.0
APP = """
import os
import time
from aztask import App, RetryPolicy
from aztask.stores.local.rows import SqliteStore
from aztask.stores.tables.client import TimeBudget

once = RetryPolicy(1, delay=0.0, jitter=False)
app = App("bench", broker=os.environ["BENCH"], results=os.environ["BENCH_RESULTS"], retry=once)
requests = [0]
request = TimeBudget.request


def counted(self, *args, **options):
    requests[0] += 1
    return request(self, *args, **options)


TimeBudget.request = counted


def cost():
    if not isinstance(app.results.rows, SqliteStore):
        return requests[0]
    with app.results.rows.database.read() as connection:
        return connection.total_changes


@app.task_with_context
def many(context, steps, notes):
    before, began = cost(), time.perf_counter()
    for number in range(steps):
        context.step("count", abs, number)
    seconds = time.perf_counter() - began
    with open(notes, "a") as file:
        file.write(f"{seconds} {cost() - before}\\n")
    if context.resubmit_count == 0:
        raise OSError("it runs again")
"""


def runs(folder: Path, results: str, tasks: int) -> tuple[list[float], list[int], list[int]]:
    """Seconds of first runs, and the cost of first runs and of repeated ones."""
    address = f"local://{folder}/queue.db"
    (folder / "steps_app.py").write_text(APP)
    environment = {
        **os.environ,
        "BENCH": address,
        "BENCH_RESULTS": results,
        "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(folder)]),
    }
    app = App("bench", broker=address, results=results)
    if isinstance(app.results, Provisioned):
        app.results.create()
    command = [sys.executable, "-m", "aztask", "worker", "-A", "steps_app:app", "-c", "1"]
    worker = subprocess.Popen(
        [*command, "--log-tasks", "off"], env=environment, stderr=subprocess.DEVNULL
    )
    seconds, first, again = [], [], []
    try:
        for number in range(tasks):
            notes = folder / f"notes-{number}"
            app.send("bench.many", [STEPS, str(notes)]).get(timeout=PATIENCE)
            one, two = (line.split() for line in notes.read_text().splitlines())
            seconds.append(float(one[0]))
            first.append(int(one[1]))
            again.append(int(two[1]))
            time.sleep(0.05)  # the settlement of this task is not measured with the next one
    finally:
        worker.terminate()
        worker.wait(30)
        app.close()
    return seconds[WARM:], first[WARM:], again[WARM:]


def main() -> None:
    """Run the benchmark."""
    print(machine())
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "file").mkdir()
        (place / "tables").mkdir()
        results = f"local://{folder}/file/queue.db"
        seconds, first, again = runs(place / "file", results, TASKS + WARM)
        with azurite.storing(place / "azurite") as stores:
            _, asked, repeated = runs(place / "tables", azurite.account_of(*stores), 2 * WARM)
    rates = [STEPS / each for each in seconds]
    print(f"steps per second, in tasks of {STEPS}: {spread(rates)}")
    print(f"rows changed in the file: {max(first)} by a first run, {max(again)} by a repeated one")
    print(f"requests to Tables: {max(asked)} by a first run, {max(repeated)} by a repeated one")
    conclude(
        [
            Check("steps per second", statistics.median(rates), RATE, "a second"),
            Check("writes for each step", max(first) / STEPS, 1, "", at_least=False),
            Check("writes for each recorded step", max(again), 0, "", at_least=False),
            # One more request reads the history.
            Check("requests to Tables for each step", (max(asked) - 1) / STEPS, 1, "",
                  at_least=False),
            Check("requests to Tables of a repeated run", max(repeated), 1, "", at_least=False),
        ]
    )  # fmt: skip


if __name__ == "__main__":
    main()
