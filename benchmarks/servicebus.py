"""Service Bus on one emulator: aztask beside the bare SDK and Celery over Kombu.

Usage: python benchmarks/servicebus.py [--check] [--no-peers] [> docs/benchmarks/servicebus.txt]

Every figure is the median of interleaved rounds: each round measures every system once, directly
and through a proxy that delays each answer by 5 ms. Results and events are off. The figures are
those of the emulator, which shares one machine with its clients. The real service has others.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests"), str(HERE.parent)]

from azure.servicebus import ServiceBusClient, ServiceBusMessage  # noqa: E402
from common import Check, conclude, machine, percentile, spread  # noqa: E402
from proxy import Proxy  # noqa: E402

from aztask import App  # noqa: E402
from aztask.queues.servicebus.admin import administration_client  # noqa: E402

ROUNDS = int(os.environ.get("BENCH_ROUNDS", "3"))
TASKS = int(os.environ.get("BENCH_TASKS", "6000"))
DELAYED_TASKS = 4000
SLOW_TASKS = 300  # for runs with a round trip per message
SOLO_TASKS = 1500
SENDS = 1000
BATCHED = 5000
LATENCIES = 40
DELAY = 0.005
PATIENCE = 60.0  # seconds for one worker and one full queue; most need less than five
QUEUE, PEER_QUEUE = "default", "celery-bench"
SERVER = (
    "from aztask.operate.cli.emulator import command; command(auto_envvar_prefix='AZTASK_EMULATOR')"
)


class Bench:
    """An emulator in its own process, with a proxy in front of it."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER, "--port", "0", "--admin-port", "0", "--json"],
            cwd=HERE.parent,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        ready = json.loads(self.process.stdout.readline())
        # It reports more later, and would stand still when the pipe is full.
        threading.Thread(target=self.process.stdout.read, daemon=True).start()
        self.direct = ready["connection_string"]
        self.admin = ready["admin_connection_string"]
        port = int(self.direct.split(";")[0].rsplit(":", 1)[1])
        self.proxy = Proxy(port)
        self.proxy.delay = DELAY
        self.delayed = self.direct.replace(f":{port}", f":{self.proxy.port}", 1)
        self.manager = administration_client(self.admin)
        os.environ["AZTASK_SERVICEBUS_ADMIN"] = self.admin

    def close(self) -> None:
        self.proxy.close()
        self.process.terminate()
        self.process.wait(10)

    def fresh(self, queue: str = QUEUE, lock: float | None = None) -> None:
        """Delete and create the queue, so that it is empty.

        lock: its lock duration, seconds; None for the service's default.
        """
        if queue in [each.name for each in self.manager.list_queues()]:
            self.manager.delete_queue(queue)
        options = {} if lock is None else {"lock_duration": timedelta(seconds=lock)}
        self.manager.create_queue(queue, **options)

    def depth(self, queue: str = QUEUE) -> int:
        found = self.manager.get_queue_runtime_properties(queue)
        return found.active_message_count or 0

    def drained(self, queue: str, full: int) -> float:
        """Tasks/s, from the first task that has left the queue until it is empty.

        A worker that has not emptied it within `PATIENCE` counts with what it did until then.
        """
        end = time.perf_counter() + PATIENCE
        while (depth := self.depth(queue)) == full and time.perf_counter() < end:
            time.sleep(0.01)
        began, first = time.perf_counter(), depth
        while depth and time.perf_counter() < end:
            time.sleep(0.02)
            depth = self.depth(queue)
        return (first - depth) / (time.perf_counter() - began)


@contextmanager
def app_at(address: str) -> Iterator[Any]:
    """Yield the module of tasks, in this process, on a broker."""
    os.environ["BENCH_BROKER"] = address
    app = App("bench", broker=address)
    task = app.task(name="bench.noop")(lambda: None)
    yield task
    app.close()


@contextmanager
def started(command: list[str], address: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command as a worker process, and stop it at the end."""
    paths = [str(HERE), str(HERE / "peers"), str(HERE.parent)]
    environment = {
        **os.environ,
        "BENCH_BROKER": address,
        "PYTHONPATH": os.pathsep.join(paths),
    }
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def bare(bench: Bench, address: str, count: int) -> float:
    """Messages/s of the SDK's own loop: prefetch, receive, complete each."""
    fill(bench, count)
    with (
        ServiceBusClient.from_connection_string(address) as client,
        client.get_queue_receiver(QUEUE, prefetch_count=300) as receiver,
    ):
        began, done = time.perf_counter(), 0
        while done < count:
            for message in receiver.receive_messages(100, max_wait_time=2):
                receiver.complete_message(message)
                done += 1
        return count / (time.perf_counter() - began)


def fill(bench: Bench, count: int) -> None:
    bench.fresh()
    with app_at(bench.direct) as noop:
        noop.map([()] * count)


def aztask(bench: Bench, address: str, count: int, pool: str) -> float:
    """Tasks/s of one worker at concurrency 8, on a full queue."""
    fill(bench, count)
    command = [sys.executable, "-m", "aztask", "worker", "-A", "bus_tasks", "-Q", QUEUE]
    with started([*command, "-c", "8", "--pool", pool], address):
        return bench.drained(QUEUE, count)


@dataclass(frozen=True)
class Celery:
    """A way to run Celery. workers: how many processes start with these options. tasks: per run."""

    name: str
    options: Sequence[str]
    workers: int
    tasks: int


CELERIES = (
    # Its pool processes and its receiver contend for one lock of the SDK's.
    Celery("Celery, prefork -c 8", ("-c", "8"), 1, SLOW_TASKS),
    Celery("Celery, one -P solo", ("-P", "solo"), 1, SOLO_TASKS),
    Celery("Celery, eight -P solo", ("-P", "solo"), 8, SOLO_TASKS),
)


def celery(bench: Bench, address: str, way: Celery, count: int) -> float:
    """Tasks/s of Celery's workers, on a full queue."""
    bench.fresh(PEER_QUEUE)
    paths = os.pathsep.join([str(HERE / "peers"), str(HERE.parent)])
    subprocess.run(
        [sys.executable, "-c", f"import celery_bus_app; celery_bus_app.send({count})"],
        env={**os.environ, "BENCH_BROKER": bench.direct, "PYTHONPATH": paths},
        check=True,
    )
    command = [sys.executable, "-m", "celery", "-A", "celery_bus_app", "worker", *way.options]
    with ExitStack() as stack:
        for number in range(way.workers):
            own = ["--without-mingle", "--without-gossip", "-n", f"bench{number}@%h"]
            stack.enter_context(started([*command, *own], address))
        return bench.drained(PEER_QUEUE, count)


def timed(count: int, call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return count / (time.perf_counter() - began)


def sends(bench: Bench) -> dict[str, float]:
    """Messages/s of single and batched sends, with the SDK and with aztask."""
    bench.fresh()
    body = b"x" * 20
    figures = {}
    with (
        ServiceBusClient.from_connection_string(bench.direct) as client,
        client.get_queue_sender(QUEUE) as sender,
    ):

        def single() -> None:
            for _ in range(SENDS):
                sender.send_messages(message(body))

        def batched() -> None:
            batch = sender.create_message_batch()
            for _ in range(BATCHED):
                try:
                    batch.add_message(message(body))
                except ValueError:
                    sender.send_messages(batch)
                    batch = sender.create_message_batch()
                    batch.add_message(message(body))
            sender.send_messages(batch)

        sender.send_messages(message(body))
        figures["single sends, bare SDK, /s"] = timed(SENDS, single)
        figures["batched sends, bare SDK, /s"] = timed(BATCHED, batched)
    with app_at(bench.direct) as noop:
        noop.delay()
        figures["single sends, .delay(), /s"] = timed(
            SENDS, lambda: [noop.delay() for _ in range(SENDS)]
        )
        figures["batched sends, .map, /s"] = timed(BATCHED, lambda: noop.map([()] * BATCHED))
    return figures


def message(body: bytes) -> ServiceBusMessage:
    """A message with exactly the properties of a task's message."""
    made = ServiceBusMessage(
        body,
        message_id=f"{time.time_ns()}-00000000-0000-0000-0000:0:0",
        correlation_id="00000000-0000-0000-0000-000000000000",
        content_type="application/x-msgpack",
        subject="bench.noop",
        application_properties={
            "lang": "py",
            "task": "bench.noop",
            "id": "00000000-0000-0000-0000-000000000000",
            "root_id": "00000000-0000-0000-0000-000000000000",
            "retries": 0,
            "aztask-version": 1,
            "aztask-hop": 0,
            "aztask-generation": 0,
            "aztask-resubmit-count": 0,
            "argsrepr": "()",
            "kwargsrepr": "{}",
            "origin": "12345@machine",
        },
    )
    assert made.raw_amqp_message.properties is not None
    made.raw_amqp_message.properties.content_encoding = "binary"
    return made


def latency(bench: Bench) -> float:
    """Milliseconds from .delay() to the start on an idle worker, 95th percentile."""
    bench.fresh()
    command = [sys.executable, "-m", "aztask", "worker", "-A", "bus_tasks", "-Q", QUEUE]
    with tempfile.TemporaryDirectory() as folder, app_at(bench.direct) as noop:
        file = Path(folder) / "starts"
        file.touch()
        with started([*command, "-c", "2", "--pool", "threads"], bench.direct):
            delays = []
            for number in range(LATENCIES + 1):
                sent = time.time()
                noop._sender.send("bench.now", [str(file)])
                while len(lines := file.read_text().splitlines()) <= number:
                    time.sleep(0.001)
                delays.append(float(lines[-1]) - sent)
                time.sleep(0.05)
    return 1000 * percentile(delays[1:], 0.95)


def one_round(bench: Bench, *, peers: bool) -> dict[str, float]:
    """Measure every figure once."""
    figures = sends(bench)
    figures["0 ms: bare SDK loop, /s"] = bare(bench, bench.direct, TASKS)
    for pool in ("threads", "processes"):
        figures[f"0 ms: aztask, {pool}, /s"] = aztask(bench, bench.direct, TASKS, pool)
    figures["5 ms: bare SDK loop, /s"] = bare(bench, bench.delayed, SLOW_TASKS)
    figures["5 ms: aztask, threads, /s"] = aztask(bench, bench.delayed, DELAYED_TASKS, "threads")
    figures["idle .delay() to start, p95, ms"] = latency(bench)
    if peers:
        for way in CELERIES:
            figures[f"0 ms: {way.name}, /s"] = celery(bench, bench.direct, way, way.tasks)
            figures[f"5 ms: {way.name}, /s"] = celery(bench, bench.delayed, way, SLOW_TASKS)
    return figures


def checks(middle: dict[str, float], *, peers: bool) -> list[Check]:
    """Compare the medians with the promised figures."""
    bare0, bare5 = middle["0 ms: bare SDK loop, /s"], middle["5 ms: bare SDK loop, /s"]
    threads, processes = middle["0 ms: aztask, threads, /s"], middle["0 ms: aztask, processes, /s"]
    delayed = middle["5 ms: aztask, threads, /s"]
    single = middle["single sends, .delay(), /s"] / middle["single sends, bare SDK, /s"]
    batched = middle["batched sends, .map, /s"] / middle["batched sends, bare SDK, /s"]
    found = [
        Check("0 ms: threads, of the bare serial loop", threads / bare0, 0.7, "x"),
        Check("0 ms: processes, of the bare serial loop", processes / bare0, 0.5, "x"),
        Check("5 ms: threads", delayed, 3000, "tasks/s"),
        Check("5 ms: threads, of the bare serial loop", delayed / bare5, 15, "x"),
        Check(".delay(), of the bare single send", single, 0.85, "x"),
        Check(".map, of the bare batched send", batched, 0.9, "x"),
        Check(
            "idle .delay() to start, p95",
            middle["idle .delay() to start, p95, ms"],
            15,
            "ms",
            at_least=False,
        ),
    ]
    if peers:
        found += [
            Check("0 ms: threads, of Celery's best", threads / best_of(middle, "0 ms"), 2.5, "x"),
            Check("5 ms: threads, of Celery's best", delayed / best_of(middle, "5 ms"), 8, "x"),
        ]
    return found


def best_of(middle: dict[str, float], delay: str) -> float:
    """Tasks/s of the fastest way to run Celery."""
    return max(middle[f"{delay}: {way.name}, /s"] for way in CELERIES)


def main() -> None:
    """Measure all rounds, print the figures, and check them."""
    peers = "--no-peers" not in sys.argv
    print("benchmark: Service Bus on the emulator, no result store, no events")
    print(machine(("azure-servicebus", "kombu", "celery", "msgpack")))
    print("command: python benchmarks/servicebus.py\n")
    bench = Bench()
    figures: dict[str, list[float]] = defaultdict(list)
    try:
        for _ in range(ROUNDS):
            for name, value in one_round(bench, peers=peers).items():
                figures[name].append(value)
    finally:
        bench.close()
    for name, values in figures.items():
        print(f"  {name:<34} {spread(values)}")
    middle = {name: statistics.median(values) for name, values in figures.items()}
    conclude(checks(middle, peers=peers))


if __name__ == "__main__":
    main()
