"""Celery on aztask's transport beside Celery on Kombu's own Azure transports: rates and losses.

Usage: python benchmarks/celery_transports.py [--check] [> docs/benchmarks/celery-transports.txt]

Every rate is the median of interleaved rounds (BENCH_ROUNDS): each round measures both transports
in each of the three ways to run Celery, on a new Azurite and on a new emulator. Results and events
are off.

* Workers run and are warm; they are stopped with SIGSTOP while the queue is filled with no-ops. The
  rate counts from SIGCONT until the queue is empty, or for a minute at most.
* Service Bus is also measured through a proxy that delays each answer by 5 ms.
* Azurite keeps its data in memory, as in `storagequeue.py`, which also says why a queue has only
  400 messages there.
* Losses are counted in each transport's fastest way: 20 times (BENCH_KILLS) a worker is killed
  with SIGKILL while it works, and another one takes its place. Both acknowledge late, and a lock
  lasts 10 s. What has not ended 30 s after the last end is lost.
"""

from __future__ import annotations

import os
import random
import statistics
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

import servicebus  # noqa: E402
from celery_workers import WAYS, Way, Workers  # noqa: E402
from common import Check, conclude, machine, spread  # noqa: E402
from storage_ceiling import ceiling  # noqa: E402
from storagequeue import bare_consume, site  # noqa: E402

ROUNDS = int(os.environ.get("BENCH_ROUNDS", "3"))
KILLS = int(os.environ.get("BENCH_KILLS", "20"))
QUEUE = "celery-bench"
LEASE = 10
PATIENCE = 60.0
SETTLED_SECONDS = 3.0 * LEASE
TASKS_OF_A_SLOT = 60
TASK_SECONDS = 0.25
STORAGE_TASKS, STORAGE_WARMINGS = 400, 3
BUS_TASKS, SLOW_BUS_TASKS = 1500, 300
AZTASK, KOMBU = "aztask's transport", "Kombu's transport"

Key = tuple[str, str, str]
"""(service, transport, way)"""


@dataclass(frozen=True)
class Queue:
    """The queue of one running service.

    * `environment`: names the service to the apps in `peers/`.
    * `fresh`: empties the queue.
    * `depth`: the number of its messages.
    """

    environment: Mapping[str, str]
    fresh: Callable[[], None]
    depth: Callable[[], int]


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


def rate(queue: Queue, module: str, way: Way, count: int) -> float:
    """Tasks/s of warm workers, from a full queue to an empty one."""
    queue.fresh()
    with tempfile.TemporaryDirectory(prefix="aztask-celery-") as name:
        workers = Workers(module, way, Path(name), queue.environment)
        try:
            workers.start()
            workers.run(f"m.send({4 * way.slots})")
            emptied(queue)
            with workers.frozen():
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
        environment = {**queue.environment, "BENCH_LEASE": str(LEASE)}
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


def one_round() -> dict[Key, float]:
    """Measure every rate once, in tasks/s."""
    found = {}
    for way in WAYS:
        for transport, module in ((AZTASK, "celery_aztask_app"), (KOMBU, "celery_app")):
            with storage_queue(in_memory=True) as queue:
                key = ("Storage queues", transport, way.name)
                found[key] = rate(queue, module, way, STORAGE_TASKS)
    with bus_queues() as queues:
        for way in WAYS:
            for transport, module in ((AZTASK, "celery_aztask_app"), (KOMBU, "celery_bus_app")):
                for delay, queue in queues.items():
                    key = (f"Service Bus, {delay}", transport, way.name)
                    found[key] = rate(queue, module, way, bus_tasks(delay, transport, way))
    return found


def best_way(middle: Mapping[Key, float], service: str, transport: str) -> Way:
    """The way with the highest rate."""
    return max(WAYS, key=lambda way: middle[service, transport, way.name])


def losses(middle: Mapping[Key, float]) -> dict[Key, int]:
    """Tasks lost, of each transport in its best way."""
    found = {}
    for transport, module in ((AZTASK, "celery_aztask_app"), (KOMBU, "celery_app")):
        way = best_way(middle, "Storage queues", transport)
        with storage_queue(in_memory=False) as queue:
            found["Storage queues", transport, way.name] = lost(queue, module, way)
    for transport, module in ((AZTASK, "celery_aztask_app"), (KOMBU, "celery_bus_app")):
        way = best_way(middle, "Service Bus, 0 ms", transport)
        with bus_queues(LEASE) as queues:
            found["Service Bus", transport, way.name] = lost(queues["0 ms"], module, way)
    return found


def main() -> None:
    """Measure all rounds, print the figures, and check them."""
    print("benchmark: Celery on aztask's transport, and on Kombu's own Azure transports")
    print(machine(("celery", "kombu", "azure-servicebus", "azure-storage-queue")))
    print("command: python benchmarks/celery_transports.py; results and events off\n")
    figures: dict[Key, list[float]] = defaultdict(list)
    for _ in range(ROUNDS):
        for key, value in one_round().items():
            figures[key].append(value)
    for key, values in figures.items():
        print(f"  {', '.join(key) + ': tasks/s':<60} {spread(values)}", flush=True)
    middle = {key: statistics.median(values) for key, values in figures.items()}
    gone = losses(middle)
    for key, value in gone.items():
        print(f"  {', '.join(key) + f': lost in {KILLS} kills':<60} {value}", flush=True)
    conclude([*rate_checks(middle), *loss_checks(gone)])


def rate_checks(middle: Mapping[Key, float]) -> Iterator[Check]:
    """On each service, the best way with our transport beside the best way with Kombu's."""
    for service in dict.fromkeys(service for service, _, _ in middle):
        ours, theirs = (
            middle[service, transport, best_way(middle, service, transport).name]
            for transport in (AZTASK, KOMBU)
        )
        yield Check(f"{service}: times the rate of Kombu's best", ours / theirs, 1, "x")


def loss_checks(gone: Mapping[Key, int]) -> Iterator[Check]:
    """Our transport loses nothing."""
    for (service, transport, _), value in gone.items():
        if transport == AZTASK:
            yield Check(f"{service}: tasks lost in kills", value, 0, "", at_least=False)


if __name__ == "__main__":
    main()
