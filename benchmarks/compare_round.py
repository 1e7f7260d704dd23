"""One round of `compare.py`: the rates and the CPU time per task of the tree on ``PYTHONPATH``.

Usage: python benchmarks/compare_round.py PART

Prints one JSON object {figure: values}, with a value of each slice of the round. Before each slice
it waits for its turn, so that the slices of two trees alternate. It uses only what every version of
aztask has: an app, `.delay()`, `.map`, the worker's command, the emulator. Rates are per second.
``(CPU)`` is CPU time per task in microseconds, of all processes that take part. ``(requests)`` is
requests to Azure Tables per task, counted by a proxy before an Azurite of the round's own, until
the worker's end.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from azure.servicebus import ServiceBusClient, ServiceBusMessage

sys.path.append(str(Path(__file__).parent))

from celery_round import celery_local, celery_servicebus, celery_storagequeue
from common import processor_seconds, take_turn

from aztask import App, chord

SENDS, BATCHED = 3_600, 27_000
BUS_SENDS, BUS_BATCHED = 900, 4_500
STORAGE_BATCHED = 900
RAW, RAW_SLICES = 1_000, 10
SLICES, DRAINS = 3, 6
QUEUE = os.environ.get("COMPARE_QUEUE", "default")
"""Of each tree its own, where both use one service."""
Figures = dict[str, list[float]]

LIMITED, UNIQUE, MEMBERS, OCCURRENCES = 5_000, 2_500, 5_000, 250
REMOTE = 200
"""Tasks of each part whose requests to Tables are counted."""

APP = """
import os
from aztask import App

broker, results = os.environ["COMPARE_APP_BROKER"], os.environ["COMPARE_RESULTS"] or None
app = App("compare", broker=broker, results=results)


@app.task(queue=os.environ["COMPARE_QUEUE"])
def noop() -> None:
    return None


if results is not None:  # limits and unique tasks need a store
    app.limit("rate", rate="1000000/s", burst=1000)
    app.limit("permits", concurrency=1000)


    @app.task(limits=["rate", "permits"])
    def limited(number: int) -> None:
        return None


    @app.task(unique="arguments")
    def unique(number: int) -> None:
        return None


@app.task
def member(number: int) -> int:
    return number


@app.task
def body(numbers: list) -> int:
    return len(numbers)
"""


def cpu(pid: int | None = None) -> float:
    """CPU seconds of this process, of its ended children, and of process `pid`."""
    sides = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    own = sum(sum(resource.getrusage(side)[:2]) for side in sides)
    return own if pid is None else own + processor_seconds(pid)


def timed(
    figures: Figures,
    name: str,
    count: int,
    work: Callable[[], object],
    pid: int | None = None,
) -> None:
    """Record the rate and the CPU time of `work`, which handles `count` messages.

    The CPU time is that of this process, of its ended children and, if given, of process `pid`.
    """
    take_turn()
    used, began = -cpu(pid), time.perf_counter()
    work()
    rate = count / (time.perf_counter() - began)
    spent = 1e6 * (used + cpu(pid)) / count
    figures.setdefault(f"{name}/s", []).append(rate)
    figures.setdefault(f"{name}/s (CPU)", []).append(spent)


@contextmanager
def apps(broker: str, results: str) -> Iterator[tuple[App, Callable[[], None]]]:
    """Yield an app of this process, and a function that lets a worker empty its queue."""
    with tempfile.TemporaryDirectory(prefix="aztask-compare-") as folder:
        (Path(folder) / "compare_app.py").write_text(APP)
        broker = broker.format(folder=folder)
        results = results.format(folder=folder)
        environment = {
            **os.environ,
            "COMPARE_APP_BROKER": broker,
            "COMPARE_QUEUE": QUEUE,
            "COMPARE_RESULTS": results,
            "PYTHONPATH": os.pathsep.join([folder, os.environ["PYTHONPATH"]]),
        }
        command = ["worker", "-A", "compare_app:app", "-c", "4", "--pool", "threads", "--burst"]

        def drain() -> None:
            subprocess.run(
                [sys.executable, "-m", "aztask", *command],
                env=environment,
                stderr=subprocess.DEVNULL,
                check=True,
            )

        app = App("compare", broker=broker, results=results or None)
        app.task(name="compare.noop", queue=QUEUE)(lambda: None)
        if results:
            app.limit("rate", rate="1000000/s", burst=1000)
            app.limit("permits", concurrency=1000)
            limits = ["rate", "permits"]
            app.task(name="compare.limited", limits=limits)(lambda number: None)
            app.task(name="compare.unique", unique="arguments")(lambda number: None)
        app.task(name="compare.member")(lambda number: number)
        app.task(name="compare.body")(len)
        yield app, drain
        app.close()


def tasks(
    figures: Figures, app: App, drain: Callable[[], None], *, single: int, batched: int
) -> None:
    """Measure single sends, a batch of sends, and a worker that runs them all."""
    noop = app.tasks["compare.noop"]
    few, many = single // SLICES // DRAINS, batched // SLICES // DRAINS
    for _ in range(DRAINS):
        noop.delay()
        for _ in range(SLICES):
            if single:
                timed(figures, "single sends", few, lambda: [noop.delay() for _ in range(few)])
            timed(figures, "batched sends", many, lambda: noop.map([()] * many))
        count = SLICES * (few + many) + 1
        timed(figures, "tasks run, with the worker's start", count, drain)


def local() -> Figures:
    """Measure the embedded queue, with results."""
    figures: Figures = {}
    address = "local://{folder}/queues.db"
    with apps(address, address) as (app, drain):
        tasks(figures, app, drain, single=SENDS, batched=BATCHED)
    return figures


@contextmanager
def emulator() -> Iterator[str]:
    """Run a local Service Bus in its own process; yields its connection string."""
    with emulator_process() as (address, _):
        yield address


@contextmanager
def emulator_process() -> Iterator[tuple[str, int]]:
    """The same; yields its connection string and its process id."""
    command = ["emulator", "--port", "0", "--admin-port", "0", "--json"]
    process = subprocess.Popen(
        [sys.executable, "-m", "aztask", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        os.environ["AZTASK_SERVICEBUS_ADMIN"] = ready["admin_connection_string"]
        address: str = ready["connection_string"]
        app = App("compare", broker=address)
        app.broker.declare("default")
        app.close()
        yield address, process.pid
    finally:
        process.terminate()
        process.wait(10)


def servicebus() -> Figures:
    """Measure Service Bus on the emulator, without results."""
    figures: Figures = {}
    with emulator() as address, apps(address, "") as (app, drain):
        tasks(figures, app, drain, single=BUS_SENDS, batched=BUS_BATCHED)
    return figures


def storagequeue() -> Figures:
    """Measure a Storage queue on the Azurite that both trees share."""
    figures: Figures = {}
    with apps(os.environ["COMPARE_BROKER"], "") as (app, drain):
        if QUEUE in app.broker.queues():
            app.broker.purge(QUEUE)
        else:
            app.broker.declare(QUEUE)
        tasks(figures, app, drain, single=0, batched=STORAGE_BATCHED)
    return figures


def bare() -> Figures:
    """Measure the emulator with the bare SDK; CPU time is of both, without their start."""
    figures: Figures = {}
    body = b"x" * 200
    with (
        emulator_process() as (address, pid),
        ServiceBusClient.from_connection_string(address) as sdk,
        sdk.get_queue_sender("default") as sender,
        sdk.get_queue_receiver("default") as receiver,
    ):

        def send() -> None:
            for _ in range(RAW // 100):
                sender.send_messages([ServiceBusMessage(body) for _ in range(100)])

        def receive() -> None:
            left = RAW
            while left:
                for message in receiver.receive_messages(100, max_wait_time=5):
                    receiver.complete_message(message)
                    left -= 1

        for _ in range(RAW_SLICES):
            timed(figures, "messages sent", RAW, send, pid)
            timed(figures, "messages received and completed", RAW, receive, pid)
    return figures


# -- limits, workflows, unique tasks, schedules --------------------------------------------------


def limited(app: App, count: int) -> int:
    """Send tasks of a rate and of a concurrency, neither of which holds any of them up."""
    app.tasks["compare.limited"].map([(number,) for number in range(count)])
    return count


def unique(app: App, count: int) -> int:
    """Send tasks with a key each, half of them a second time."""
    for number in range(count):
        app.tasks["compare.unique"].delay(number)
        if number % 2:
            app.tasks["compare.unique"].delay(number)
    return count


def workflow(app: App, count: int) -> int:
    """Send one chord."""
    member, body = app.tasks["compare.member"], app.tasks["compare.body"]
    chord([member.s(number) for number in range(count)], body.s()).delay()
    return count + 1


def schedule(app: App, count: int) -> int:
    """Make schedules that are not due, and send an occurrence of each."""
    for _ in range(count):
        name = f"compare.{uuid4().hex}"
        app.schedules.create(name, app.tasks["compare.noop"].s(), every=86400)
        app.schedules.trigger(name)
    return count


def stored(send: Callable[[App, int], int], what: str, count: int) -> Figures:
    """Measure the sends and the worker on local files, and count the requests to Tables."""
    figures: Figures = {}
    address = "local://{folder}/queues.db"
    with apps(address, address) as (app, drain):
        app.tasks["compare.noop"].delay()
        few = count // SLICES // DRAINS
        for _ in range(DRAINS):
            for _ in range(SLICES):
                timed(figures, f"{what} sent", few, lambda: send(app, few))
            timed(figures, f"{what} run, with the worker's start", few * SLICES, drain)
    take_turn()
    with tables() as (results, total), apps(address, results) as (app, drain):
        app.results.create()  # type: ignore[union-attr]
        before = total()
        sent = send(app, REMOTE)
        figures[f"{what} sent (requests)"] = [(total() - before) / sent]
        before = total()
        drain()
        figures[f"{what} run (requests)"] = [(total() - before) / sent]
    return figures


@contextmanager
def tables() -> Iterator[tuple[str, Callable[[], int]]]:
    """Azure Tables on an Azurite behind a proxy; yields its address, and how to count requests."""
    tests = Path(__file__).parents[1] / "tests"
    sys.path[:0] = [str(tests), str(tests / "integration")]
    import azurite  # noqa: PLC0415  # only these parts need it
    from proxy import Proxy  # noqa: PLC0415

    with (
        tempfile.TemporaryDirectory(prefix="aztask-compare-") as folder,
        azurite.storing(Path(folder), movable=False) as services,
    ):
        proxy = Proxy(services[0].port)
        try:
            yield azurite.account_of(*services, table=proxy.port), lambda: proxy.total
        finally:
            proxy.close()


PARTS = {
    "limits": lambda: stored(limited, "limited tasks", LIMITED),
    "unique": lambda: stored(unique, "unique tasks", UNIQUE),
    "workflows": lambda: stored(workflow, "members of a chord", MEMBERS),
    "schedules": lambda: stored(schedule, "occurrences", OCCURRENCES),
    "local": local,
    "servicebus": servicebus,
    "storagequeue": storagequeue,
    "emulator": bare,
    "celery-local": celery_local,
    "celery-servicebus": celery_servicebus,
    "celery-storagequeue": celery_storagequeue,
}

if __name__ == "__main__":
    take_turn()
    print(json.dumps(PARTS[sys.argv[1]]()))
