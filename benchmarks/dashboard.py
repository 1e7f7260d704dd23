"""The dashboard over a large store: what each page takes, and what its viewers cost.

Usage: python benchmarks/dashboard.py [--check] [--tables] [--tasks N] [--letters N] [--workers N]
           [--workflows N] [> docs/benchmarks/dashboard.txt]

The store is filled as workers fill it, through the same functions, and `aztask dashboard` is
started as a person starts it: nine times for the first page, whose median counts. "First" is how
long the first person waits for all of a page: what takes long comes by itself when it is ready, and
the page before it says so. Then each page is asked for five times, with pauses in which its answer
goes stale; "older" is how many of these said that they show what was counted before.

The viewers are connections that hold the stream of notes and ask for the overview, the runs or the
workers at each note, as the page's own script does. The clock that Linux keeps for each process
says what the dashboard uses. Beside it, one worker runs tasks that wait 10 ms, eight at a time, on
the same file: in turn without viewers and with all of them. The median of the pairs' ratios, with
its 95 % interval, is what viewers cost it; where that interval is wider than the bound, the CPU
time that the worker takes for a task decides.

With ``--tables``, the store is Azure Tables on one Azurite that keeps everything in memory and has
been given an index of partitions, as the service has one: without it, each question is tried on
each row of the table, which takes 10 s for a million tasks (`tests/azurite/fill.js`). Its own CPU
time is shown beside the dashboard's, and "first" ends after a minute. No worker runs beside the
viewers: it would have the pace of Azurite.
"""

from __future__ import annotations

import argparse
import base64
import http.client
import json
import math
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import azurite
from common import Check, conclude, machine, megabytes, processor_seconds
from compare import Ratio

from aztask import App, chain
from aztask.settlement import Complete, DeadLetter
from aztask.stores.records.base import (
    Finish,
    Outcome,
    Provisioned,
    RunKey,
    RunningTask,
    Start,
    State,
    WorkerRecord,
)
from aztask.stores.records.history import history_of
from aztask.stores.records.rowsigning import pack_body
from aztask.stores.records.tables.index import entity_of as index_entity
from aztask.stores.records.tables.rows import entity_of as run_entity
from aztask.stores.records.tables.rows import new_run
from aztask.stores.records.tables.store import TABLE
from aztask.stores.records.tallies import HOUR, SLOT, Author, Hour, Tally, bucket_of

TASKS_A_QUEUE = 10
QUEUES = ("orders", "mail", "images", "reports")
STARTS = 9
ROUNDS = 5
STALE_SECONDS = 2.2
"""A page's last answer is given again for two seconds."""
VIEWERS = 50
VIEWING_SECONDS = 30.0
PAGE_SECONDS = 1.0
PATIENCE_SECONDS = 60.0
FIRST_SECONDS = 0.5
PAIRS = 100
SLOWED = 0.02
"""By how much viewers may slow a worker."""
SLICE_SECONDS = 5.0
"""As long as the pause between two heartbeats: each slice has one."""
SETTLING_SECONDS = 1.0
"""What comes before a slice is not counted: viewers come or go."""

SHOP = """
import os
import time
from aztask import App, chain

app = App("shop", broker=os.environ["BENCH_BROKER"], results=os.environ["BENCH_RESULTS"])
for queue in {queues}:
    for number in range({count}):
        app.task(lambda value=0: value, name=f"shop.{{queue}}{{number}}", queue=queue)
app.task(lambda: time.sleep(0.01), name="shop.beside", queue="beside")
app.schedule("nightly", app.tasks["shop.orders0"].s(1), every=3600)
app.limit("api", rate="10/s", concurrency=3)
"""


def names() -> Iterator[tuple[str, str]]:
    """Queue and task of run after run."""
    while True:
        for number in range(TASKS_A_QUEUE):
            for queue in QUEUES:
                yield queue, f"shop.{queue}{number}"


def runs(app: App, count: int, now: float) -> Iterator[tuple[Start, Finish]]:
    """Runs that ended in the last day: of 100, one failed and two wait for a retry."""
    value = app.codec.encode_value({"order": 4711, "charged": True})
    for number, (queue, task) in zip(range(count), names(), strict=False):
        key, at = RunKey(f"run-{number:09}"), now - (count - number) / count * 86400
        state = {0: State.FAILED, 1: State.RETRYING, 2: State.RETRYING}.get(
            number % 100, State.SUCCEEDED
        )
        worker = f"worker-{number % 500}"
        start = Start(key, task, queue, number, key.task_id, worker, at - 0.2)
        error = ("", "") if number % 100 > 2 else ("PaymentError", f"no answer for {number}")
        outcome = Outcome(state, Complete(), value, *error, "", at, 0.2)
        yield start, Finish(key, key.task_id, outcome)


def fill_runs(app: App, count: int, now: float) -> None:
    """Record these runs in a file."""
    assert app.results is not None
    all_runs = runs(app, count, now)
    while some := list(islice(all_runs, 1000)):
        app.results.start([start for start, _ in some])
        app.results.record([finish for _, finish in some])


def fill_rows(app: App, count: int, now: float, store: azurite.Azurite, folder: Path) -> None:
    """Record these runs in Azure Tables: the rows that are there afterwards, each written once."""
    owner = app.owner.broker
    file = folder / "rows"
    with file.open("wb") as lines:
        for start, finish in runs(app, count, now):
            row = replace(new_run(start), broker=owner)
            row = row.finished(finish.outcome, pack_body(finish.outcome), "")
            lines.write(as_json(run_entity(row)) + b"\n")
            lines.write(as_json(index_entity(row)) + b"\n")
    if (filled := store.fill(TABLE, file)) != 2 * count:
        sys.exit(f"Azurite took {filled} rows")
    file.unlink()
    found = app.results and app.results.get(f"run-{count // 2:09}")
    if not found or found.outcome is None or found.outcome.state is not State.FAILED:
        sys.exit(f"a run that was filled in is read as {found}")


def as_json(entity: Mapping[str, object]) -> bytes:
    """A row as the table service takes it: bytes and floats say what they are."""
    found: dict[str, object] = {}
    for name, value in entity.items():
        found[name] = base64.b64encode(value).decode() if isinstance(value, bytes) else value
        kind = {bytes: "Edm.Binary", float: "Edm.Double"}.get(type(value))
        if kind is not None:
            found[f"{name}@odata.type"] = kind
    return json.dumps(found).encode()


def fill_letters(app: App, count: int) -> None:
    """Dead letters of 20 errors in one queue."""
    task = app.tasks["shop.orders0"]
    for begin in range(0, count, 500):
        task.map([(each,) for each in range(begin, min(begin + 500, count))])
    receiver = app.broker.receiver("orders", lease=300.0)
    number = 0
    while found := receiver.receive(256, 0.2):
        letters = []
        for each in found:
            letters.append(
                (each, DeadLetter("retries-exhausted", f"Error{number % 20}: order {number}"))
            )
            number += 1
        receiver.settle(letters)
    receiver.close()
    assert number == count, f"{number} of {count} messages were dead-lettered"


def fill_workers(app: App, count: int, now: float) -> None:
    """Workers that run four tasks each, with their history of this hour and of the one before."""
    assert app.results is not None
    history = history_of(app.results)
    assert history is not None
    named = names()
    for number in range(count):
        tasks = tuple(
            RunningTask(f"busy-{number}-{each}", task, queue, now - each)
            for each, (queue, task) in zip(range(4), named, strict=False)
        )
        name = f"worker-{number}"
        app.results.heartbeat(WorkerRecord(name, now - 7200, now, QUEUES, 4, 4180, tasks=tasks))
        for begins in (int(now / HOUR) * HOUR - HOUR, int(now / HOUR) * HOUR):
            hour = Hour(Author(name, int(now - 7200), "1.0"))
            for _ in range(TASKS_A_QUEUE):
                series = hour.series.setdefault(next(named), {})
                for at in range(begins, min(begins + HOUR, int(now)), SLOT):
                    runs = {bucket_of(0.2): 4}
                    series[at] = Tally(4, waits={bucket_of(0.1): 4}, runs=runs)
            history.write(name, begins, hour, now)


def fill_workflows(app: App, count: int) -> None:
    """Open chains of two tasks."""
    first, second = app.tasks["shop.mail0"], app.tasks["shop.mail1"]
    for number in range(count):
        chain(first.s(number), second.s()).delay(workflow_id=f"flow-{number:06}")


def listening(port: int) -> bool:
    """Whether something answers at this port."""
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


def printed_port(log: Path) -> int:
    """The port in the address that the dashboard has printed; 0 until then."""
    found = re.search(r"http://127\.0\.0\.1:(\d+)/", log.read_text())
    return int(found[1]) if found else 0


@contextmanager
def dashboard(folder: Path, environment: dict[str, str]) -> Iterator[tuple[int, int, str]]:
    """`aztask dashboard`: its process id, its port and the address of its link."""
    with (folder / "dashboard.log").open("w+") as log:
        command = [sys.executable, "-m", "aztask", "-A", "bigshop:app", "dashboard"]
        command += ["--http", "127.0.0.1:0"]
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + 30
            while not (port := printed_port(folder / "dashboard.log")) or not listening(port):
                if process.poll() is not None or time.monotonic() > deadline:
                    sys.exit(
                        f"the dashboard did not start:\n{(folder / 'dashboard.log').read_text()}"
                    )
                time.sleep(0.05)
            text = (folder / "dashboard.log").read_text()
            link = next(word for word in text.split() if word.startswith("http://"))
            yield process.pid, port, "/" + link.removeprefix("http://").partition("/")[2]
        finally:
            process.terminate()
            process.wait()


MAKING = b"This page is still being made"
LATE = (b"It is still being counted", b"As of <time")


class Browser:
    """A visitor who has followed the link."""

    def __init__(self, port: int, link: str) -> None:
        self._port = port
        answer = self.open(link)
        answer.read()
        self.cookie = (answer.getheader("set-cookie") or "").partition(";")[0]
        if not self.cookie:
            sys.exit(f"the link {link} does not log in: it answered {answer.status}")

    def open(self, path: str) -> http.client.HTTPResponse:
        """Ask for a page; the body is unread."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=120)
        connection.request("GET", path, headers={"cookie": self.cookie})
        return connection.getresponse()

    cookie = ""

    def asked(self, path: str) -> tuple[float, bytes]:
        """What a page takes, in seconds, and its text."""
        begun = time.perf_counter()
        answer = self.open(path)
        body = answer.read()
        if answer.status != 200:
            sys.exit(f"{path} answered {answer.status}: {body[:500]!r}")
        return time.perf_counter() - begun, body

    def until_made(self, path: str) -> float:
        """Seconds until a page shows what was asked, for one who asks again and again; inf if it
        takes longer than `PATIENCE_SECONDS`."""
        begun = time.perf_counter()
        while MAKING in (body := self.asked(path)[1]) or LATE[0] in body:
            if time.perf_counter() - begun > PATIENCE_SECONDS:
                return math.inf
            time.sleep(0.05)
        return time.perf_counter() - begun


def watch(browser: Browser, path: str, until: float, asked: list[float]) -> None:
    """One viewer: at each note, its page again. What viewers do themselves is other machines' work:
    these give way to the worker."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
    stream = browser.open("/live")
    while time.monotonic() < until and (line := stream.readline()):
        if line.startswith(b"data:"):
            asked.append(browser.asked(path)[0])


def view(browser: Browser, pid: int) -> tuple[float, list[float]]:
    """Fifty viewers for half a minute: the share of a core they cost, and what they waited."""
    begun, asked = processor_seconds(pid), list[float]()
    with viewers(browser, VIEWING_SECONDS, asked, VIEWING_SECONDS / 6):
        pass
    return (processor_seconds(pid) - begun) / VIEWING_SECONDS, asked


@contextmanager
def viewers(browser: Browser, seconds: float, asked: list[float], coming: float) -> Iterator[None]:
    """All viewers for so many seconds, who come within the first `coming` of them."""
    until = time.monotonic() + seconds
    paths = ("/", "/runs", "/workers")
    threads = [
        threading.Thread(target=watch, args=(browser, paths[each % 3], until, asked))
        for each in range(VIEWERS)
    ]
    for each in threads:
        each.start()
        time.sleep(coming / VIEWERS)  # people do not come all at once
    yield
    for each in threads:
        each.join()


@contextmanager
def worker(folder: Path, environment: dict[str, str]) -> Iterator[int]:
    """`aztask worker` of the queue beside; yields its process id."""
    with (folder / "worker.log").open("w") as log:
        command = [sys.executable, "-m", "aztask", "-A", "bigshop:app", "worker"]
        command += ["-Q", "beside", "-c", "8"]
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
        try:
            yield process.pid
        finally:
            process.terminate()
            process.wait()


def with_interval(ratio: Ratio) -> str:
    """A ratio with its 95 % interval."""
    return f"{ratio.middle:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"


@dataclass(frozen=True, slots=True)
class Pace:
    """A worker's tasks a second, and its CPU time for a task in seconds."""

    rate: float
    cpu: float


def beside(app: App, browser: Browser, folder: Path, environment: dict[str, str]) -> Check:
    """A worker's rate and CPU time for a task with viewers: prints them, and checks the bound."""
    app.broker.declare("beside")
    # Connecting the viewers takes time, too.
    most = int(1.2 * 8 / 0.01 * 2 * PAIRS * (SLICE_SECONDS + 2 * SETTLING_SECONDS))
    for begin in range(0, most, 5000):
        app.tasks["shop.beside"].map([()] * min(5000, most - begin))

    def pace(pid: int) -> Pace:
        time.sleep(SETTLING_SECONDS)
        before, begun = app.broker.stats("beside").living, time.perf_counter()
        used = -processor_seconds(pid)
        time.sleep(SLICE_SECONDS)
        after, seconds = app.broker.stats("beside").living, time.perf_counter() - begun
        used += processor_seconds(pid)
        assert after > 0, "the tasks came to an end"
        return Pace((before - after) / seconds, used / (before - after))

    def watched(pid: int) -> Pace:
        length = 2 * SETTLING_SECONDS + SLICE_SECONDS
        with viewers(browser, length, [], SETTLING_SECONDS / 2):
            return pace(pid)

    alone: list[Pace] = []
    seen: list[Pace] = []
    with worker(folder, environment) as pid:
        time.sleep(SETTLING_SECONDS)
        for number in range(PAIRS):
            if number % 2:
                seen.append(watched(pid))
                alone.append(pace(pid))
            else:
                alone.append(pace(pid))
                seen.append(watched(pid))
    rate = Ratio.of([[each.rate] for each in seen], [[each.rate] for each in alone])
    cpu = Ratio.of([[each.cpu] for each in seen], [[each.cpu] for each in alone])
    print(
        f"a worker beside {VIEWERS} viewers: {with_interval(rate)} of its rate without"
        f" ({statistics.median(each.rate for each in alone):,.0f} tasks a second),"
        f" {with_interval(cpu)} of its CPU time for a task"
        f" ({statistics.median(each.cpu for each in alone) * 1e6:,.0f} µs)"
    )
    if rate.low < 1 - SLOWED and rate.high - rate.low > SLOWED:
        name = "its CPU time for a task beside them, upper end of 95 %"
        return Check(name, cpu.high, 1 + SLOWED, "of alone", at_least=False)
    return Check("a worker's rate beside them, lower end of 95 %", rate.low, 1 - SLOWED, "of alone")


def paths(tasks: int) -> list[str]:
    """Every page, and the filters that people use most."""
    middle = f"run-{tasks // 2:09}"
    return [
        *("/", "/?window=day", "/?window=30d&by=task", "/?by=worker"),
        *("/queues", "/queue?name=orders", "/tasks", "/running", "/workers", "/leases"),
        *("/runs", "/runs?state=failed", "/runs?task=shop.mail3", "/runs?text=PaymentError"),
        *("/runs?worker=worker-77", f"/task?id={middle}"),
        *("/workflows", "/workflow?id=flow-000001", "/schedules", "/limits"),
        *("/dead", "/letters?queue=orders", "/letters?queue=orders&reason=retries-exhausted"),
        *("/jobs", "/audit", f"/search?q={middle}", "/search?q=worker-77"),
    ]


def main() -> None:
    """Fill, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="fail if a figure does not hold")
    parser.add_argument("--tables", action="store_true", help="the store is Azure Tables")
    parser.add_argument("--tasks", type=int, default=1_000_000)
    parser.add_argument("--letters", type=int, default=100_000)
    parser.add_argument("--workers", type=int, default=500)
    parser.add_argument("--workflows", type=int, default=5_000)
    given = parser.parse_args()
    print(machine(("starlette", "uvicorn", "jinja2")))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        place = f"local://{folder}/queues.db"
        environment = {**os.environ, "BENCH_BROKER": place, "BENCH_RESULTS": place}
        if given.tables:
            os.environ["NODE_OPTIONS"] = "--max-old-space-size=12000"
            stores: Sequence[azurite.Azurite] = stack.enter_context(
                azurite.storing(folder / "azurite", movable=False, in_memory=True, fillable=True)
            )
            environment["BENCH_RESULTS"] = azurite.account_of(*stores)
        os.environ.update(environment)
        (folder / "bigshop.py").write_text(SHOP.format(queues=QUEUES, count=TASKS_A_QUEUE))
        sys.path.insert(0, str(folder))
        app: App = __import__("bigshop").app
        for queue in QUEUES:
            app.broker.declare(queue)
        if isinstance(app.results, Provisioned):
            app.results.create()
        begun, now = time.perf_counter(), time.time()
        if given.tables:
            fill_rows(app, given.tasks, now, stores[0], folder)
        else:
            fill_runs(app, given.tasks, now)
        fill_letters(app, given.letters)
        fill_workflows(app, given.workflows)
        filled = time.perf_counter() - begun
        amounts = f"{given.tasks:,} recorded tasks, {given.letters:,} dead letters"
        amounts += f", {given.workers} workers, {given.workflows:,} open workflows"
        print(f"store: {amounts}; filled in {filled:.0f} s")
        services = [each.pid for each in stores] if given.tables else []
        measure(app, given, folder, environment, services)
        app.close()


def first_page(folder: Path, environment: dict[str, str], services: Sequence[int]) -> float:
    """The median, of several starts, of the seconds that the first page takes."""
    took, theirs = [], []
    for _ in range(STARTS):
        with dashboard(folder, environment) as (_, port, link):
            before = sum(map(processor_seconds, services))
            took.append(Browser(port, link).asked("/")[0] * 1000)
            theirs.append((sum(map(processor_seconds, services)) - before) * 1000)
    median = statistics.median(took)
    print(
        f"\nthe first page after a start: {median:.0f} ms ({min(took):.0f} to {max(took):.0f} ms)"
    )
    if services:
        print(f"of which the store took {statistics.median(theirs):.0f} ms of CPU")
    print()
    return median / 1000


def measure(
    app: App,
    given: argparse.Namespace,
    folder: Path,
    environment: dict[str, str],
    services: Sequence[int],
) -> None:
    """Ask for each page, then with all viewers. services: process ids of the store."""
    fill_workers(app, given.workers, time.time())
    first = first_page(folder, environment, services)
    with dashboard(folder, environment) as (pid, port, link):
        browser = Browser(port, link)
        shown: dict[str, list[float]] = {}
        cpu: dict[str, list[float]] = {}
        late: dict[str, int] = {}
        made: dict[str, float] = {}
        theirs: dict[str, float] = {}
        for path in paths(given.tasks):
            before = sum(map(processor_seconds, services))
            made[path] = browser.until_made(path)
            theirs[path] = sum(map(processor_seconds, services)) - before
        for _ in range(ROUNDS):
            for path in paths(given.tasks):
                before = processor_seconds(pid)
                seconds, body = browser.asked(path)
                cpu.setdefault(path, []).append(processor_seconds(pid) - before)
                shown.setdefault(path, []).append(seconds)
                late[path] = late.get(path, 0) + any(each in body for each in LATE)
            time.sleep(STALE_SECONDS)
        store = f"{'store CPU':>10}" if services else ""
        print(f"{'page':<46} {'median':>8} {'most':>8} {'CPU':>8} {'first':>9}{store}   older")
        for path, took in shown.items():
            middle, most = statistics.median(took) * 1000, max(took) * 1000
            own, whole = statistics.median(cpu[path]) * 1000, made[path] * 1000
            print(
                f"{path:<46} {middle:>5.0f} ms {most:>5.0f} ms {own:>5.0f} ms {whole:>6,.0f} ms"
                + (f"{theirs[path]:>8.1f} s" if services else "")
                + f"   {late[path] or ''}"
            )
        share, asked = view(browser, pid)
        print(
            f"\n{VIEWERS} viewers: {share:.2f} of a core, {len(asked)} pages, median"
            f" {statistics.median(asked) * 1000:.0f} ms, most {max(asked) * 1000:.0f} ms;"
            f" {megabytes(pid):.0f} MB"
        )
        # On Tables, a worker has the pace of Azurite, which has one core.
        slowed = [] if services else [beside(app, browser, folder, environment)]
    slowest = max(max(took) for took in shown.values())
    conclude(
        [
            Check("the first page after a start", first, FIRST_SECONDS, "s", at_least=False),
            Check("the slowest page", slowest, PAGE_SECONDS, "s", at_least=False),
            Check(f"{VIEWERS} viewers", share, 0.5, "cores", at_least=False),
            *slowed,
        ]
    )


if __name__ == "__main__":
    main()
