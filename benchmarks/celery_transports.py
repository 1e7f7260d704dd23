"""Celery on aztask's transport, on Kombu's own Azure transports, and on Redis: rates and losses.

Usage: python benchmarks/celery_transports.py [--check] [> docs/benchmarks/celery-transports.txt]

Every rate is the median of interleaved rounds (BENCH_ROUNDS): each round measures all transports in
each of the three ways to run Celery, with late acknowledgement, on a new service. Then it measures
each once more with early acknowledgement, in its fastest way. Results and events are off.

* Workers run and are warm; they are stopped with SIGSTOP while the queue is filled with no-ops. The
  rate counts from SIGCONT until the queue is empty, or for a minute at most.
* Service Bus is also measured through a proxy that delays each answer by 5 ms.
* Azurite keeps its data in memory, as in `storagequeue.py`, which also says why a queue has only
  400 messages there. Redis keeps its data in memory too, and loses them with its process; the local
  file survives the death of every process.
* Losses are counted in each transport's fastest way: 20 times (BENCH_KILLS) a worker is killed
  with SIGKILL while it works, and another one takes its place. Both acknowledge late, and a lock
  lasts 10 s. What has not ended 30 s after the last end is lost.
"""

from __future__ import annotations

import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests"), str(HERE.parent)]

import azurite  # noqa: E402
import servicebus  # noqa: E402
from celery_workers import WAYS, Way, Workers  # noqa: E402
from common import Check, conclude, machine, spread  # noqa: E402
from storage_ceiling import ceiling  # noqa: E402
from storagequeue import bare_consume, site  # noqa: E402

from aztask import App  # noqa: E402

ROUNDS = int(os.environ.get("BENCH_ROUNDS", "3"))
KILLS = int(os.environ.get("BENCH_KILLS", "20"))
QUEUE = "celery-bench"
LEASE = 10
PATIENCE = 60.0
SETTLED_SECONDS = 3.0 * LEASE
TASKS_OF_A_SLOT = 60
TASK_SECONDS = 0.25
STORAGE_TASKS, STORAGE_WARMINGS = 400, 3
BUS_TASKS, SLOW_BUS_TASKS, FAST_TASKS = 1500, 300, 4000
AZTASK, KOMBU = "aztask's transport", "Kombu's transport"
LATE, EARLY = "late", "early"
STORAGE, BUS, REDIS, LOCAL = "Storage queues", "Service Bus", "Redis", "a local file"
MODULES = {
    STORAGE: {AZTASK: "celery_aztask_app", KOMBU: "celery_app"},
    BUS: {AZTASK: "celery_aztask_app", KOMBU: "celery_bus_app"},
    REDIS: {KOMBU: "celery_redis_app"},
    LOCAL: {AZTASK: "celery_aztask_app"},
}
"""The module in `peers/` of each transport that a service has."""

Key = tuple[str, str, str, str]
"""(service, transport, way, when it acknowledges)"""


@dataclass(frozen=True)
class Queue:
    """The queue of one running service.

    * `environment`: names the service to the apps in `peers/`.
    * `fresh`: empties the queue.
    * `depth`: the number of its messages, those that workers hold included.
    * `file`: the queue file that workers share.
    """

    environment: Mapping[str, str]
    fresh: Callable[[], None]
    depth: Callable[[], int]
    file: Path | None = None


@contextmanager
def storage_queue(*, in_memory: bool) -> Iterator[Queue]:
    """A queue of a new Azurite; one with its data in memory is warm, for the rates."""
    with site(in_memory=in_memory) as place:
        bench = place.bench
        for _ in range(STORAGE_WARMINGS if in_memory else 0):
            ceiling(bench, STORAGE_TASKS)
            bare_consume(bench)
        names = {**bench.environment, "AZTASK_BROKER": bench.environment["BENCH_CONNECTION"]}
        yield Queue(names, lambda: bench.fresh(QUEUE), lambda: bench.depth(QUEUE))


@contextmanager
def bus_queues(lock: float | None = None) -> Iterator[dict[str, Queue]]:
    """The queue of a new emulator: directly ("0 ms"), and through its proxy ("5 ms").

    lock: its lock duration, seconds; None for the usual one.
    """
    bench = servicebus.Bench()
    try:
        yield {
            name: Queue(
                {"BENCH_BROKER": address, "AZTASK_BROKER": address},
                lambda: bench.fresh(QUEUE, lock),
                lambda: bench.depth(QUEUE),
            )
            for name, address in (("0 ms", bench.direct), ("5 ms", bench.delayed))
        }
    finally:
        bench.close()


@contextmanager
def redis_queue() -> Iterator[Queue]:
    """A queue of a new Redis."""
    import redis  # noqa: PLC0415  # of the peers alone

    server, port = shutil.which("redis-server"), azurite.free_port()
    if server is None:
        sys.exit("this needs redis-server: apt-get install redis-server")
    command = [server, "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        time.sleep(1.0)
        client = redis.Redis(port=port)
        address = f"redis://127.0.0.1:{port}/0"
        yield Queue(
            {"BENCH_REDIS": address},
            client.flushall,
            lambda: client.llen(QUEUE) + client.hlen("unacked"),
        )
    finally:
        process.terminate()
        process.wait(30)


@contextmanager
def local_queue() -> Iterator[Queue]:
    """A queue in a new file."""
    with tempfile.TemporaryDirectory(prefix="aztask-celery-") as folder:
        file = Path(folder) / "queues.db"
        address = f"local://{file}"
        app = App("bench", broker=address)
        app.broker.declare(QUEUE)
        yield Queue(
            {"AZTASK_BROKER": address},
            lambda: None,
            lambda: (stats := app.broker.stats(QUEUE)).active + stats.leased,
            file,
        )
        app.close()


def rate(queue: Queue, module: str, way: Way, count: int, acks: str) -> float:
    """Tasks/s of warm workers, from a full queue to an empty one."""
    queue.fresh()
    with tempfile.TemporaryDirectory(prefix="aztask-celery-") as name:
        environment = {**queue.environment, "BENCH_ACKS": acks}
        workers = Workers(module, way, Path(name), environment)
        try:
            workers.start()
            workers.run(f"m.send({4 * way.slots})")
            emptied(queue)
            with workers.frozen(queue.file):
                workers.run(f"m.send({count})")
                full = queue.depth()
                began = time.perf_counter()
            left = emptied(queue)
            return (full - left) / (time.perf_counter() - began)
        finally:
            workers.close()


def emptied(queue: Queue) -> int:
    """Wait until the queue is empty; returns what is left after `PATIENCE` seconds."""
    give_up_at = time.monotonic() + PATIENCE
    while (left := queue.depth()) and time.monotonic() < give_up_at:
        time.sleep(min(0.05, 0.01 + left / 4000))
    return left


def lost(queue: Queue, module: str, way: Way) -> int:
    """Tasks that never ended, after kills of workers that were replaced each time."""
    queue.fresh()
    draw = random.Random(24)
    count = way.slots * TASKS_OF_A_SLOT
    with tempfile.TemporaryDirectory(prefix="aztask-celery-") as name:
        environment = {**queue.environment, "BENCH_LEASE": str(LEASE), "BENCH_ACKS": LATE}
        workers = Workers(module, way, Path(name), environment)
        try:
            workers.run(f"m.marks('k', {count}, {TASK_SECONDS})")
            workers.start()
            for _ in range(KILLS):
                workers.kill_one(draw)
            known, since = -1, time.monotonic()
            while known < count and time.monotonic() - since < SETTLED_SECONDS:
                now = len(workers.marks("k"))
                if now != known:
                    known, since = now, time.monotonic()
                time.sleep(0.2)
            return count - known
        finally:
            workers.close()


def bus_tasks(delay: str, transport: str, way: Way) -> int:
    """How many no-ops are timed: few where each costs a round trip or more."""
    slow = delay != "0 ms" or (transport == KOMBU and "prefork" in way.name)
    return SLOW_BUS_TASKS if slow else BUS_TASKS


def measured(service: str, transport: str, way: Way, acks: str) -> Iterator[tuple[Key, float]]:
    """Measure a rate once, in tasks/s; on Service Bus with each delay of its answers."""
    module, name = MODULES[service][transport], way.name
    if service == STORAGE:
        with storage_queue(in_memory=True) as queue:
            yield (service, transport, name, acks), rate(queue, module, way, STORAGE_TASKS, acks)
    elif service == BUS:
        with bus_queues() as queues:
            for delay, queue in queues.items():
                count = bus_tasks(delay, transport, way)
                key = (f"{service}, {delay}", transport, name, acks)
                yield key, rate(queue, module, way, count, acks)
    else:
        with redis_queue() if service == REDIS else local_queue() as queue:
            yield (service, transport, name, acks), rate(queue, module, way, FAST_TASKS, acks)


def one_round(figures: dict[Key, list[float]]) -> None:
    """Measure every rate once: all ways with late acknowledgement, the best ones with early."""
    for way in WAYS:
        for service, modules in MODULES.items():
            for transport in modules:
                for key, value in measured(service, transport, way, LATE):
                    figures[key].append(value)
    middle = {key: statistics.median(values) for key, values in figures.items()}
    for service, modules in MODULES.items():
        for transport in modules:
            way = best_way(middle, f"{BUS}, 5 ms" if service == BUS else service, transport)
            for key, value in measured(service, transport, way, EARLY):
                figures[key].append(value)


def best_way(middle: Mapping[Key, float], service: str, transport: str, acks: str = LATE) -> Way:
    """The way with the highest rate."""
    return max(WAYS, key=lambda way: middle.get((service, transport, way.name, acks), 0.0))


def losses(middle: Mapping[Key, float]) -> dict[tuple[str, str, str], int]:
    """Tasks lost, of each transport on Azure's services, in its best way."""
    found = {}
    for transport, module in MODULES[STORAGE].items():
        way = best_way(middle, STORAGE, transport)
        with storage_queue(in_memory=False) as queue:
            found[STORAGE, transport, way.name] = lost(queue, module, way)
    for transport, module in MODULES[BUS].items():
        way = best_way(middle, f"{BUS}, 0 ms", transport)
        with bus_queues(LEASE) as queues:
            found[BUS, transport, way.name] = lost(queues["0 ms"], module, way)
    return found


def main() -> None:
    """Measure all rounds, print the figures, and check them."""
    print("benchmark: Celery on aztask's transport, on Kombu's own for Azure, and on Redis")
    print(machine(("celery", "kombu", "redis", "azure-servicebus", "azure-storage-queue")))
    print("command: python benchmarks/celery_transports.py; results and events off\n")
    figures: dict[Key, list[float]] = defaultdict(list)
    for _ in range(ROUNDS):
        one_round(figures)
    for (service, transport, way, acks), values in sorted(figures.items()):
        name = f"{service}, {transport}, {way}, {acks} acknowledgement"
        print(f"  {name:<78} {spread(values)} tasks/s", flush=True)
    middle = {key: statistics.median(values) for key, values in figures.items()}
    gone = losses(middle)
    for key, value in gone.items():
        print(f"  {', '.join(key) + f': lost in {KILLS} kills':<78} {value}", flush=True)
    conclude([*rate_checks(middle), *loss_checks(gone)])


def best(middle: Mapping[Key, float], service: str, transport: str) -> float:
    """The highest rate of a transport on a service, in any way."""
    return max(value for key, value in middle.items() if key[:2] == (service, transport))


def rate_checks(middle: Mapping[Key, float]) -> Iterator[Check]:
    """On each service of Azure, our transport at its best beside Kombu's at its best."""
    for service in (STORAGE, f"{BUS}, 0 ms", f"{BUS}, 5 ms"):
        ratio = best(middle, service, AZTASK) / best(middle, service, KOMBU)
        yield Check(f"{service}: times the rate of Kombu's best", ratio, 1, "x")


def loss_checks(gone: Mapping[tuple[str, str, str], int]) -> Iterator[Check]:
    """Our transport loses nothing."""
    for (service, transport, _), value in gone.items():
        if transport == AZTASK:
            yield Check(f"{service}: tasks lost in kills", value, 0, "", at_least=False)


if __name__ == "__main__":
    main()
