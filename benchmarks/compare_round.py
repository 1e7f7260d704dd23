"""One round of `compare.py`: the rates and the CPU time per task of the tree on ``PYTHONPATH``.

Usage: python benchmarks/compare_round.py PART

Prints one JSON object {figure: value}. It uses only what every version of aztask has: an app,
`.delay()`, `.map`, the worker's command, the emulator. Rates are per second. ``(CPU)`` is CPU time
per task in microseconds, of all processes that take part.
"""

from __future__ import annotations

import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from azure.servicebus import ServiceBusClient, ServiceBusMessage

sys.path.append(str(Path(__file__).parent))

from common import processor_seconds

from aztask import App
from aztask.brokers.base import QueueOptions

SENDS, BATCHED = 2_000, 30_000
BUS_SENDS, BUS_BATCHED = 1_000, 5_000
STORAGE_BATCHED = 1_000
RAW = 2_000
SLICES = 5

APP = """
import os
from aztask import App

broker, results = os.environ["COMPARE_APP_BROKER"], os.environ["COMPARE_RESULTS"] or None
app = App("compare", broker=broker, results=results)


@app.task
def noop() -> None:
    return None
"""


def cpu(pid: int | None = None) -> float:
    """CPU seconds of this process, of its ended children, and of process `pid`."""
    sides = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    own = sum(sum(resource.getrusage(side)[:2]) for side in sides)
    return own if pid is None else own + processor_seconds(pid)


def timed(
    figures: dict[str, float],
    name: str,
    count: int,
    work: Callable[[], object],
    pid: int | None = None,
) -> None:
    """Record the rate and the CPU time of `work`, which handles `count` messages.

    The CPU time is that of this process, of its ended children and, if given, of process `pid`. Of
    several calls the best of each counts: other work on the machine can only worsen a figure.
    """
    used, began = -cpu(pid), time.perf_counter()
    work()
    rate = count / (time.perf_counter() - began)
    spent = 1e6 * (used + cpu(pid)) / count
    figures[f"{name}/s"] = max(rate, figures.get(f"{name}/s", 0.0))
    figures[f"{name}/s (CPU)"] = min(spent, figures.get(f"{name}/s (CPU)", math.inf))


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
        app.task(name="compare.noop")(lambda: None)
        yield app, drain
        app.close()


def tasks(
    figures: dict[str, float], app: App, drain: Callable[[], None], *, single: int, batched: int
) -> None:
    """Measure single sends, a batch of sends, and a worker that runs them all."""
    noop = app.tasks["compare.noop"]
    noop.delay()
    few, many = single // SLICES, batched // SLICES
    for _ in range(SLICES):
        if single:
            timed(figures, "single sends", few, lambda: [noop.delay() for _ in range(few)])
        timed(figures, "batched sends", many, lambda: noop.map([()] * many))
    timed(figures, "tasks run, with the worker's start", single + batched + 1, drain)


def local() -> dict[str, float]:
    """Measure the embedded queue, with results."""
    figures: dict[str, float] = {}
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
        app.broker.declare("default", QueueOptions())
        app.close()
        yield address, process.pid
    finally:
        process.terminate()
        process.wait(10)


def servicebus() -> dict[str, float]:
    """Measure Service Bus on the emulator, without results."""
    figures: dict[str, float] = {}
    with emulator() as address, apps(address, "") as (app, drain):
        tasks(figures, app, drain, single=BUS_SENDS, batched=BUS_BATCHED)
    return figures


def storagequeue() -> dict[str, float]:
    """Measure a Storage queue on the Azurite that both trees share."""
    figures: dict[str, float] = {}
    with apps(os.environ["COMPARE_BROKER"], "") as (app, drain):
        if "default" in app.broker.queues():
            app.broker.purge("default")
        else:
            app.broker.declare("default")
        tasks(figures, app, drain, single=0, batched=STORAGE_BATCHED)
    return figures


def bare() -> dict[str, float]:
    """Measure the emulator with the bare SDK; CPU time is of both, without their start."""
    figures: dict[str, float] = {}
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

        for _ in range(SLICES):
            timed(figures, "messages sent", RAW, send, pid)
            timed(figures, "messages received and completed", RAW, receive, pid)
    return figures


PARTS = {
    "local": local,
    "servicebus": servicebus,
    "storagequeue": storagequeue,
    "emulator": bare,
}

if __name__ == "__main__":
    print(json.dumps(PARTS[sys.argv[1]]()))
