"""What limits with many keys cost, and how far a noisy tenant delays a quiet one.

Usage: python benchmarks/limits.py [--check] [--parts keys,rate,sessions]
           [--keys 100000] [--tasks 50000]

keys      100,000 keys of one limit in one worker: requests to the result store for each, the memory
          of the worker's process, and the bytes in the store.
rate      50,000 tasks of one tenant with a rate, all put off; then ten tasks of another tenant. How
          many put-offs a second, and how long the ten wait for their start.
sessions  the same with a session for each tenant, without limits.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common import Check, conclude, figure, machine

from aztask import App
from aztask.limits.claiming import Claims, Wanted
from aztask.limits.declaration import limit_of
from aztask.limits.permits import IDLE_SECONDS, Permits
from aztask.limits.storeclock import StoreClock
from aztask.queues.base import QueueOptions
from aztask.queues.engine import Database
from aztask.stores.records.controls import Entry, EntryChange, StoreTime
from aztask.stores.records.local.store import LocalResults
from aztask.support.clock import SYSTEM_CLOCK

QUIET = 10
ROUNDS = 5
PATIENCE = 900.0
ROOT = Path(__file__).parents[1]

APP = """
import os, time
from aztask import App

app = App("bench", broker=os.environ["BENCH"], results=os.environ["BENCH"])
app.queue("tenants", sessions=True)
app.limit("rate", rate="10/s", burst=10, key=lambda tenant, *_: tenant)


def note(tenant, sent):
    if tenant != "noisy":
        with open(os.environ["BENCH_LEDGER"], "a") as ledger:
            ledger.write(f"{time.time() - sent}\\n")


@app.task(limits=["rate"])
def rate(tenant, sent):
    note(tenant, sent)


@app.task
def sessions(tenant, sent):
    note(tenant, sent)
"""


class Counting:
    """A result store's control entries; counts the requests that Azure Tables would get."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.requests = 0

    def read(self, names: Sequence[str]) -> list[Entry | None]:
        self.requests += len(names)
        found: list[Entry | None] = self._inner.read(names)
        return found

    def write(self, changes: Sequence[EntryChange]) -> list[str | None]:
        self.requests += len(changes)
        tags: list[str | None] = self._inner.write(changes)
        return tags

    def time(self) -> StoreTime:
        found: StoreTime = self._inner.time()
        return found

    def purge(self, prefix: str, before: float) -> int:
        found: int = self._inner.purge(prefix, before)
        return found


def memory() -> float:
    """The memory of this process, in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


# -- many keys -------------------------------------------------------------------------------


def many_keys(count: int) -> Iterator[Check]:
    """A worker that meets `count` keys of one limit, each for the first time."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.db"
        store = Counting(LocalResults(Database(str(path))).controls)
        clock = StoreClock(store, SYSTEM_CLOCK)
        clock.refresh()
        yield from _rates(store, clock, count, path)
        yield from _permits(store, clock, count)


def _rates(store: Counting, clock: StoreClock, count: int, path: Path) -> Iterator[Check]:
    limit = limit_of("tenant", rate="10/s", burst=10, key=len)
    assert limit.rate is not None
    claims = Claims(store, clock)
    before, began = memory(), time.monotonic()
    for number in range(count):
        claims.claim(Wanted(limit.entry(f"tenant-{number}"), limit.rate), 0.0)
    spent, cold = time.monotonic() - began, store.requests / count
    grown = memory() - before
    print(f"\na rate with {count:,} keys, one worker, results in a local file")
    print(f"  a cold key: {cold:.2f} requests, {1e6 * spent / count:.0f} microseconds")
    print(f"  memory of the worker: {grown:+.1f} MiB; it remembers the last 10,000 keys")
    size = sum(each.stat().st_size for each in path.parent.iterdir())
    print(f"  in the store: {count:,} entries, {size / count:.0f} bytes each")
    store.requests, warm = 0, min(count, 5_000)
    for number in range(count - warm, count):
        claims.claim(Wanted(limit.entry(f"tenant-{number}"), limit.rate), 0.0)
    print(f"  a key that the worker remembers: {store.requests / warm:.2f} requests")
    yield Check("a rate: requests for a cold key", cold, 2.5, "requests", at_least=False)
    yield Check("a rate: memory for 100,000 keys", grown, 64.0, "MiB", at_least=False)
    store.requests = 0


def _permits(store: Counting, clock: StoreClock, count: int) -> Iterator[Check]:
    limit = limit_of("tenant", concurrency=5, key=len)
    permits = Permits(store, clock, "worker", SYSTEM_CLOCK)
    before, taken = memory(), 0
    for number in range(count):
        entry = limit.permits_entry(f"tenant-{number}")
        known = store.requests
        assert permits.take(entry, 5, clock.now())
        taken += store.requests - known
        permits.free(entry)
        if number % 1_000 == 999:  # as a worker does each half second
            permits.maintain()
    cold, grown = taken / count, memory() - before
    time.sleep(IDLE_SECONDS)
    permits.maintain()
    permits.maintain()
    kept = len(permits._stocks)
    print(f"a concurrency with {count:,} keys")
    print(f"  a cold key: {cold:.2f} requests, {store.requests / count:.2f} with the give-back")
    print(f"  memory of the worker: {grown:+.1f} MiB; keys kept after a second: {kept}")
    yield Check("a concurrency: requests for a cold key", cold, 2.5, "requests", at_least=False)
    yield Check("a concurrency: memory for 100,000 keys", grown, 256.0, "MiB", at_least=False)
    yield Check("a concurrency: keys kept after the give-back", kept, 0, "keys", at_least=False)


# -- a noisy tenant --------------------------------------------------------------------------


@contextmanager
def worker(folder: Path, queue: str) -> Iterator[None]:
    """A worker of the app in `folder`."""
    command = [sys.executable, "-m", "aztask", "-A", "bench_limits:app", "worker"]
    with (folder / "worker.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "-Q", queue, "-c", "4", "--pool", "threads", "--lease", "60s"],
            cwd=folder,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            yield
        finally:
            process.terminate()
            process.wait(60)


def noisy(kind: str, count: int) -> Iterator[Check]:
    """`count` tasks of one tenant, then ten of another; without the first ones, too."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "bench_limits.py").write_text(APP)
        os.environ["BENCH"] = f"local://{folder}/queues.db"
        os.environ["BENCH_LEDGER"] = str(folder / "ledger")
        os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), str(ROOT)])
        queue = "tenants" if kind == "sessions" else "default"
        app = App("bench", broker=os.environ["BENCH"], results=os.environ["BENCH"])
        app.queue("tenants", sessions=True)
        app.broker.declare(queue, QueueOptions(sessions=kind == "sessions"))
        with worker(folder, queue):
            _send(app, kind, "warm", queue, QUIET)  # until the worker has started
            _waited(folder, QUIET)
            time.sleep(1.0)
            _send(app, kind, "idle", queue, QUIET)
            idle = max(_waited(folder, 2 * QUIET)[QUIET:])
            began = time.monotonic()
            _send(app, kind, "noisy", queue, count)
            sent = time.monotonic() - began
            if kind == "rate":
                _wait_for_put_offs(app, queue)
            spent = time.monotonic() - began
            time.sleep(3.0)  # until the last of them are settled
            for number in range(ROUNDS):  # each of them another tenant, at another moment
                _send(app, kind, f"quiet-{number}", queue, QUIET)
                time.sleep(1.3)
            busy = max(_waited(folder, (2 + ROUNDS) * QUIET)[2 * QUIET :])
            left = app.broker.stats(queue)
        app.close()
    what = "put off" if kind != "sessions" else "left in the session"
    print(f"\n{count:,} tasks of a noisy tenant, then {QUIET} each of {ROUNDS} others ({kind})")
    print(f"  sent in {sent:.0f} s; {what}: {(left.scheduled or 0) + (left.active or 0):,}")
    if kind == "rate":
        print(f"  put off in {spent:.0f} s: {count / spent:,.0f} a second, the sends included")
    print(f"  the last of them starts {figure(busy)} s after its send, {figure(idle)} s if idle")
    delay = max(0.0, busy - idle)
    yield Check(f"delay by a noisy tenant ({kind})", delay, 1.0, "s", at_least=False)


def _send(app: App, kind: str, tenant: str, queue: str, count: int) -> None:
    options: dict[str, Any] = {"queue": queue}
    if kind == "sessions":
        options["session"] = tenant
    task = app.tasks.get(f"bench.{kind}") or app.task(name=f"bench.{kind}")(_declared)
    bound = task.with_options(**options)
    for first in range(0, count, 5_000):
        bound.map([(tenant, time.time())] * min(5_000, count - first))


def _declared(tenant: str, sent: float) -> None:
    """Stands for the task of the app in the file; only sent here."""


def _waited(folder: Path, count: int) -> list[float]:
    """The waits of the quiet tenant's tasks, once there are so many."""
    ledger, give_up_at = folder / "ledger", time.monotonic() + PATIENCE
    while time.monotonic() < give_up_at:
        lines = ledger.read_text().split() if ledger.exists() else []
        if len(lines) >= count:
            return [float(line) for line in lines]
        time.sleep(0.05)
    raise SystemExit((folder / "worker.log").read_text()[-3000:])


def _wait_for_put_offs(app: App, queue: str) -> None:
    """Wait until the backlog waits for its slots."""
    give_up_at = time.monotonic() + PATIENCE
    while (app.broker.stats(queue).active or 0) > 0:
        if time.monotonic() > give_up_at:
            raise SystemExit("the backlog is not put off")
        time.sleep(0.2)


def main() -> None:
    """Measure, print and check."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--parts", default="keys,rate,sessions")
    parser.add_argument("--keys", type=int, default=100_000)
    parser.add_argument("--tasks", type=int, default=50_000)
    options = parser.parse_args()
    print(machine())
    checks: list[Check] = []
    for part in options.parts.split(","):
        if part == "keys":
            checks += many_keys(options.keys)
        else:
            checks += noisy(part, options.tasks)
    conclude(checks)


if __name__ == "__main__":
    main()
