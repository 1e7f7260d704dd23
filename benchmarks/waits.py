"""What tasks that wait cost: a slot, a lease, memory; and waking them all.

Usage: python benchmarks/waits.py [--check] [--tasks 10000] [> docs/benchmarks/waits.txt]

park   so many tasks wait for a signal, in one file with queue and results. While they
       wait: messages under a lease, slots that plain tasks get, processor time, and the memory of
       the worker and all its processes after the first half of the tasks and after all of them.
wake   `app.signal_all` for all tasks. A signal is its row, a look at the rows of its task, the send
       of the wake-up, and the cancellation of the timer; 100 tasks are one transaction. Beside it,
       in turns of 500: as many bare sends of a task, one by one, and twice as many bare requests
       for a row (one is written, and read). "one by one": a tenth of the tasks get their
       signals with `result.signal`, each in a transaction of its own.
end    until all of them have gone on and ended. The worker runs during both sides of `wake`, and is
       busy with those that are awake already.

--check fails if waking takes more than 1.5 times the bare requests, together or one by one, if a
task that waits holds a lease or a slot, or if memory grows with their number.
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

from common import Check, conclude, family, figure, machine, megabytes, processor_seconds

from aztask import App
from aztask.stores.records.base import State
from aztask.stores.rows import Change, Place

PATIENCE = 1200.0
MOST = 1.5
MOST_GROWTH = 12.0
"""MB by which the memory of all processes may grow from the first half of the tasks to all."""
SETTLED_SECONDS = 3.0
QUIET_SECONDS = 10.0
"""So long leases and processor time are looked at."""
MOST_CPU = 5.0
"""Per cent of a core that the worker may take meanwhile, as an idle one does."""
TURN = 500
SLOTS = 2
NAP = 0.5
ROOT = Path(__file__).parents[1]
APP = """
import os
import time
from aztask import App

app = App("bench", broker=os.environ["BENCH"], results=os.environ["BENCH"])


@app.task_with_context
def order(context, number):
    return context.wait_for("approved", timeout=86_400)


@app.task
def nap(seconds):
    time.sleep(seconds)
    return time.time()
"""


def taken(what: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    began = time.perf_counter()
    what()
    return time.perf_counter() - began


def until(condition: Callable[[], bool]) -> float:
    """Seconds until the condition is true."""
    began = time.perf_counter()
    while not condition():
        if time.perf_counter() - began > PATIENCE:
            raise SystemExit("it took too long")
        time.sleep(0.1)
    return time.perf_counter() - began


class Bench:
    """A worker that runs, and the app that sends to it."""

    def __init__(self, app: App, worker: int) -> None:
        self.app = app
        self.worker = worker
        store = app.sends.signals.store
        assert store is not None
        self._rows, self._owner = store._rows, store.owner

    def park(self, first: int, last: int) -> float:
        """Send so many tasks; seconds until all of them wait."""
        began = time.perf_counter()
        for number in range(first, last):
            self.app.send("bench.order", [number], task_id=f"t{number}")
        until(self.idle)
        assert self.app.result(f"t{last - 1}").state == "waiting"
        return time.perf_counter() - began

    def idle(self) -> bool:
        """True if no message is due or under a lease."""
        stats = self.app.broker.stats("default")
        return not stats.active and not stats.leased

    def memory(self) -> float:
        """MB of the worker and all its processes."""
        time.sleep(SETTLED_SECONDS)
        return sum(map(megabytes, family(self.worker)))

    def look(self) -> tuple[int, float]:
        """Most messages under a lease at a time, and the per cent of a core that is used."""
        before = sum(map(processor_seconds, family(self.worker)))
        began, most = time.perf_counter(), 0
        while (passed := time.perf_counter() - began) < QUIET_SECONDS:
            most = max(most, self.app.broker.stats("default").leased)
            time.sleep(0.05)
        used = sum(map(processor_seconds, family(self.worker))) - before
        return most, 100 * used / passed

    def free_slots(self) -> int:
        """How many plain tasks the worker runs side by side while others wait."""
        naps = [self.app.send("bench.nap", [NAP]) for _ in range(2 * SLOTS)]
        ends = sorted(each.get(timeout=PATIENCE) for each in naps)
        return sum(end < ends[0] + NAP / 2 for end in ends)

    def wake(self, first: int, last: int) -> float:
        """Seconds for a signal to each of these tasks."""

        def work() -> None:
            for number in range(first, last):
                self.app.result(f"t{number}").signal("approved", number)

        return taken(work)

    def wake_all(self, first: int, last: int) -> float:
        """Seconds for one call that signals all of these tasks."""
        tasks = [f"t{number}" for number in range(first, last)]
        return taken(lambda: self.app.signal_all(tasks, "approved", first))

    def bare(self, first: int, last: int) -> float:
        """Seconds for as many bare sends, and twice as many bare requests for a row."""

        def work() -> None:
            for number in range(first, last):
                self.app.send("bench.nothing", [number], queue="bare")
                place = Place(self._owner, f"bare-{number}", f"bare-{number}:x")
                made = self._rows.write(Change(place, {"due": 1e11, "data": b"x" * 100}))
                assert made is not None
                self._rows.get([place])

        return taken(work)


def measure(bench: Bench, count: int) -> list[Check]:
    """Park so many tasks, wake them, and print what it took."""
    half = count // 2
    parked = bench.park(0, half)
    before = bench.memory()
    parked += bench.park(half, count)
    after = bench.memory()
    leased, used = bench.look()
    slots = bench.free_slots()
    alone = woken = 0.0
    for first in range(0, count, TURN):
        last = min(first + TURN, count)
        alone += bench.bare(first, last)
        woken += bench.wake_all(first, last)
    ended = until(lambda: bench.app.result(f"t{count - 1}").ready() and bench.idle())
    more = count + count // 10
    bench.park(count, more)
    single_alone = single = 0.0
    for first in range(count, more, TURN // 10):
        last = min(first + TURN // 10, more)
        single_alone += bench.bare(first, last)
        single += bench.wake(first, last)
    until(lambda: bench.app.result(f"t{more - 1}").ready() and bench.idle())
    for number in range(more):
        if bench.app.result(f"t{number}").state != State.SUCCEEDED.value:
            raise SystemExit(f"task {number} is {bench.app.result(f't{number}').state}")
    left = bench.app.broker.stats("default").scheduled
    print(f"{count:,} tasks parked in {figure(parked)} s")
    print(
        f"memory of all processes: {before:.1f} MB with {half:,} of them, {after:.1f} MB with all"
    )
    print(f"while they wait: {leased} messages under a lease, {figure(used)} % of a core")
    print(f"plain tasks beside them: {slots} at a time, with -c {SLOTS}")
    print(f"{count:,} bare sends and {2 * count:,} bare requests for a row: {figure(alone)} s")
    print(f"{count:,} signals: {figure(woken)} s; all have ended {figure(ended)} s later")
    print(f"{more - count:,} signals one by one: {figure(single / single_alone)} times the same")
    print(f"timers left: {left}")
    return [
        Check("waking, times the bare requests", woken / alone, MOST, "times", at_least=False),
        Check("one by one, times the same", single / single_alone, MOST, "times", at_least=False),
        Check("growth of memory, half to all", after - before, MOST_GROWTH, "MB", at_least=False),
        Check("messages under a lease while they wait", leased, 0, "", at_least=False),
        Check("processor while they wait", used, MOST_CPU, "% core", at_least=False),
        Check("plain tasks at a time", slots, SLOTS, "tasks"),
        Check("timers that are left", left, 0, "", at_least=False),
    ]


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--tasks", type=int, default=10_000)
    count = parser.parse_args().tasks
    print(machine())
    with tempfile.TemporaryDirectory() as folder:
        address = f"local://{folder}/bench.db"
        (Path(folder) / "waits_app.py").write_text(APP)
        environment = {
            **os.environ,
            "BENCH": address,
            "PYTHONPATH": os.pathsep.join([str(ROOT), folder]),
        }
        command = [sys.executable, "-m", "aztask", "worker", "-A", "waits_app:app"]
        with (Path(folder) / "log").open("wb") as log:
            worker = subprocess.Popen(
                [*command, "-c", str(SLOTS), "--log-tasks", "off"],
                env=environment,
                stdout=log,
                stderr=log,
            )
        try:
            checks = measure(
                Bench(App("bench", broker=address, results=address), worker.pid), count
            )
        finally:
            worker.terminate()
            worker.wait(30)
    conclude(checks)


if __name__ == "__main__":
    main()
