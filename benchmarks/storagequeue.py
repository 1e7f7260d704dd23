"""Storage queues on one Azurite: aztask beside the bare SDK, Celery and dramatiq.

Usage: python benchmarks/storagequeue.py [--check] [--no-peers] [> docs/benchmarks/storagequeue.txt]

Every figure is the median of several rounds. Each round measures every system once, one after
another, on one Azurite.

* A worker, or the bare SDK's loop, is timed when it is warm: the first 100 tasks are not counted,
  the 300 after them are.
* A worker's rate is measured between two samples of the queue's depth: the first when it is warm,
  the last while all of its threads still have work. Waiting for an empty queue would add the time
  between two samples to a run of a third of a second. Messages that a worker has received before
  the first sample are an advantage: for ours up to two receives, 64 messages.
* Azurite keeps its data in memory (`--inMemoryPersistence`). With files it accepts little more
  than half as many sends (`storage_ceiling.py`), which would hide the differences. In memory it
  cleans up after a minute and answers no request during that time. So each round starts a new
  Azurite and warms it up, and a round that takes longer is repeated. Latency, requests and kills
  are measured with files.
* The queue is never deeper than 500 (900 where workers are killed), because Azurite's own cost
  grows with the depth. Results and events are off.
* "Composed sends" are the highest rate that Azurite accepts: the requests of `.map`, composed
  before and sent by a loop that does nothing else.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "peers"), str(HERE.parent / "tests"), str(HERE.parent)]

import azurite  # noqa: E402
from common import (  # noqa: E402
    Check,
    conclude,
    family,
    machine,
    percentile,
    processor_seconds,
    spread,
)
from proxy import Proxy  # noqa: E402
from storage_ceiling import ceiling  # noqa: E402
from storage_systems import Bench, System, kill_group, systems  # noqa: E402

ROUNDS = int(os.environ.get("BENCH_ROUNDS", "7"))
KILLS = int(os.environ.get("BENCH_KILLS", "20"))
WARM = 100
TASKS = 300
SENDS = 400
LATENCIES = 25
SLOTS = 8
CONNECTIONS = 27
"""As many as our worker has: 24 for batches, two that receive, one more."""

WARMINGS = 8
"""Rounds of 400 sends and receives, after which Azurite's code is compiled."""


def bare_consume(bench: Bench) -> float:
    """Messages/s of an SDK loop with as many connections as our worker: receive 32, delete each.

    Counts the last TASKS messages, without the very last ones, when fewer connections have work.
    """
    client = bench.service.get_queue_client("default")
    found: list[object] = []
    deleted: list[float] = []
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                if not found:
                    found.extend(next(client.receive_messages(messages_per_page=32).by_page(), ()))
                if not found:
                    return
                message = found.pop()
            client.delete_message(message)
            deleted.append(time.perf_counter())

    threads = [threading.Thread(target=work) for _ in range(CONNECTIONS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    timed = deleted[WARM - 1 : -CONNECTIONS]
    return (len(timed) - 1) / (timed[-1] - timed[0])


def bare_send(bench: Bench) -> float:
    """Messages/s of single sends with the SDK, one after the other."""
    client = bench.service.get_queue_client("default")
    client.send_message("x" * 400)
    began = time.perf_counter()
    for _ in range(SENDS):
        client.send_message("x" * 400)
    return SENDS / (time.perf_counter() - began)


@dataclass(frozen=True)
class Look:
    """A sample: a queue's depth, and the CPU seconds of its worker and of Azurite so far."""

    at: float
    left: int
    worker: float
    server: float


def consume(bench: Bench, system: System, server_pid: int) -> dict[str, float]:
    """A worker's rate, and the CPU time of worker and Azurite at that rate."""
    fill(bench, system)
    with bench.worker(system) as process:
        first, last = looks(bench, system, process.pid, server_pid)
    seconds = last.at - first.at
    return {
        "tasks/s": (first.left - last.left) / seconds,
        "worker CPU, % of a core": 100 * (last.worker - first.worker) / seconds,
        "Azurite CPU, % of a core": 100 * (last.server - first.server) / seconds,
    }


def looks(bench: Bench, system: System, worker: int, server: int) -> tuple[Look, Look]:
    """The first sample of a warm worker, and the last while all its threads had work."""
    give_up_at = time.monotonic() + 120
    found: list[Look] = []
    while (now := look(bench, system, worker, server)).left >= SLOTS:
        if now.left <= TASKS:
            found.append(now)
        pause(now.left - (TASKS if now.left > TASKS else SLOTS))
        if time.monotonic() > give_up_at:
            raise TimeoutError(f"{system.name} did not empty the queue")
    return found[0], found[-1]


def look(bench: Bench, system: System, worker: int, server: int) -> Look:
    """Take a sample. The depth is that of the middle of the request for it."""
    began = time.perf_counter()
    left = bench.depth(system.queue)
    at = (began + time.perf_counter()) / 2
    return Look(at, left, cpu_of(worker), processor_seconds(server))


def cpu_of(worker: int) -> float:
    """CPU seconds of a worker and its children so far."""
    return sum(map(processor_seconds, family(worker)))


def fill(bench: Bench, system: System) -> None:
    """Fill an empty queue with the no-ops that warm a worker and those that are timed."""
    bench.fresh(system.queue)
    count = WARM + TASKS - 3  # `call` sends three messages first, to warm up
    bench.call(
        system, f"m.noop.map([()] * {count})" if system.name == "aztask" else f"m.send({count})"
    )


def pause(left: int) -> None:
    """Wait before the next sample, because each costs Azurite as much as a task."""
    time.sleep(min(max(left / 4000, 0.01), 0.05))


def latencies(bench: Bench, system: System) -> list[float]:
    """Seconds from send to start on an idle worker, within a second of the last message."""
    bench.fresh(system.queue)
    code = (
        f"import time, sys, {system.module} as m\n"
        "m.marks('warm', 1, 0.0)\n"
        "time.sleep(3)\n"
        f"for n in range({LATENCIES}):\n"
        "    time.sleep(0.3 + 0.7 * (n % 10) / 10)\n"
        "    at = time.time()\n"
        "    m.marks(f'l{n}-', 1, 0.0)\n"
        "    print(n, at)\n"
    )
    with bench.worker(system):
        done = subprocess.run(
            [system.python, "-c", code],
            env=bench.environment,
            stdout=subprocess.PIPE,
            check=True,
            timeout=180,
        )
        sent = [line.split() for line in done.stdout.decode().splitlines()]
        return [1000 * (bench.wait_mark(f"l{n}-0") - float(at)) for n, at in sent]


def requests(bench: Bench, proxy: Proxy, system: System) -> float:
    """Requests to the queue per no-op, of 300: sending, receiving and deleting."""
    bench.fresh(system.queue)
    proxy.counts.clear()
    bench.call(system, "m.send(300)")
    while bench.depth(system.queue) < 303:
        time.sleep(0.1)
    sent = proxy.counts["POST"]
    proxy.counts.clear()
    looks = 0
    with bench.worker(system):
        while bench.depth(system.queue) > 0:
            looks += 1
            time.sleep(0.2)
        used = proxy.total - looks
    return (sent + used) / 303


def lost(bench: Bench, system: System) -> int:
    """Tasks that never ended, after several kills of the worker and a last, unkilled one."""
    bench.fresh(system.queue)
    count = 40 * KILLS
    bench.call(system, f"m.marks('k', {min(count, 900)}, 0.15)")
    for _ in range(KILLS):
        process = bench.start(system, *system.kill_arguments)
        time.sleep(2.0)
        kill_group(process)
    with bench.worker(system, *system.kill_arguments):
        known, since = -1, time.monotonic()
        while time.monotonic() - since < 12.0:
            now = len(bench.times("k"))
            if now != known:
                known, since = now, time.monotonic()
            if now == min(count, 900):
                break
            time.sleep(0.2)
    return min(count, 900) - len(bench.times("k"))


@dataclass(frozen=True)
class Site:
    """An Azurite, reachable directly and through a proxy."""

    server: azurite.Azurite
    bench: Bench
    far: Bench
    proxy: Proxy


@contextmanager
def site(*, in_memory: bool) -> Iterator[Site]:
    """Run a new Azurite, and stop it at the end."""
    with (
        tempfile.TemporaryDirectory(prefix="aztask-bench-") as name,
        azurite.running(Path(name), movable=False, in_memory=in_memory) as server,
    ):
        folder, account = Path(name), (azurite.ACCOUNT, azurite.KEY)
        bench = Bench(folder / "near", server.endpoint, server.connection_string, *account)
        proxy = Proxy(server.port)
        there = server.endpoint.replace(str(server.port), str(proxy.port))
        far = Bench(folder / "far", there, server.connection_string_at(proxy.port), *account)
        bench.fresh("default", "default-poison")
        yield Site(server, bench, far, proxy)
        proxy.close()


def main() -> None:
    """Measure all rounds, print the figures, and check them."""
    print("benchmark: Storage queues on one Azurite 3.35.0, queue depth 500 and less")
    print(machine(("azure-storage-queue", "azure-core", "kombu", "msgpack")))
    print("command: python benchmarks/storagequeue.py; results and events off")
    print("Azurite's data: in memory for the rates, otherwise in files\n")
    ours, *peers = systems()
    if "--no-peers" in sys.argv:
        peers = []
    figures: dict[str, list[float]] = defaultdict(list)
    for _ in range(ROUNDS):
        for name, value in quiet_round([ours, *peers]).items():
            figures[name].append(value)
    with site(in_memory=False) as place:
        for system in [ours, *peers]:
            waits = latencies(place.bench, system)
            figures[f"{system.name}: idle latency p50, ms"].append(percentile(waits, 0.5))
            figures[f"{system.name}: idle latency p95, ms"].append(percentile(waits, 0.95))
            asked = requests(place.far, place.proxy, system)
            figures[f"{system.name}: requests per task"].append(asked)
            figures[f"{system.name}: tasks lost in {KILLS} kills"].append(lost(place.bench, system))
    for name, values in figures.items():
        print(f"  {name:<44} {spread(values)}")
    judge({name: statistics.median(values) for name, values in figures.items()}, peers)


def quiet_round(all_systems: list[System]) -> dict[str, float]:
    """The rates of one round in which Azurite did not clean up."""
    for _ in range(3):
        with site(in_memory=True) as place:
            began = time.monotonic()

            def cleaned_up(began: float = began) -> bool:
                return time.monotonic() - began > azurite.QUIET_SECONDS - 1

            try:
                for _ in range(WARMINGS):
                    ceiling(place.bench, SENDS)
                    bare_consume(place.bench)
                figures = one_round(place, all_systems)
            except Exception:  # Azurite answers no request while it cleans up
                if not cleaned_up():
                    raise
            else:
                if not cleaned_up():
                    return figures
    raise TimeoutError(f"a round takes longer than {azurite.QUIET_SECONDS:g} s on this machine")


def one_round(place: Site, all_systems: list[System]) -> dict[str, float]:
    """Measure every rate once."""
    bench, far, server_pid = place.bench, place.far, place.server.pid
    ours = all_systems[0]
    figures: dict[str, float] = {}
    fill(bench, ours)
    figures["bare SDK: receive 32 and delete, messages/s"] = bare_consume(bench)
    for system in all_systems:
        for name, value in consume(bench, system, server_pid).items():
            figures[f"{system.name}: {name}"] = value
        bench.fresh(system.queue)
        figures[f"{system.name}: single sends/s"] = SENDS / bench.call(system, f"m.send({SENDS})")
        bench.fresh(system.queue)  # messages in one queue slow Azurite down for all
    bench.fresh("default")
    figures["bare SDK: single sends/s"] = bare_send(bench)
    bench.fresh("default")
    mapped = bench.call(ours, f"m.noop.map([()] * {SENDS})", warm="m.noop.map([()] * 100)")
    figures["aztask: .map, sends/s"] = SENDS / mapped
    bench.fresh("default")
    figures["Azurite: composed sends/s"] = ceiling(bench, SENDS)
    for delay in (0.0, 0.005):
        place.proxy.delay = 0.0
        fill(far, ours)
        place.proxy.delay = delay
        rate = consume_far(bench, far, ours, server_pid)
        bench.fresh("default")
        figures[f"aztask: tasks/s, {1000 * delay:.0f} ms added to each reply"] = rate
    return figures


def consume_far(bench: Bench, far: Bench, system: System, server_pid: int) -> float:
    """The worker's rate through the proxy; the depth is read directly."""
    with far.worker(system) as process:
        first, last = looks(bench, system, process.pid, server_pid)
    return (first.left - last.left) / (last.at - first.at)


def judge(middle: dict[str, float], peers: list[System]) -> None:
    """Print the table of checks of the medians."""
    rate = middle["aztask: tasks/s"]
    bare = middle["bare SDK: receive 32 and delete, messages/s"]
    checks = [
        Check("worker, no-ops", rate, 750, "tasks/s"),
        Check("worker, share of the bare SDK", rate / bare, 0.9, ""),
        Check(
            "single sends, share of the bare SDK",
            middle["aztask: single sends/s"] / middle["bare SDK: single sends/s"],
            0.9,
            "",
        ),
        Check(".map", middle["aztask: .map, sends/s"], 1400, "/s"),
        Check("idle latency p50", middle["aztask: idle latency p50, ms"], 100, "ms", False),
        Check("requests per task", middle["aztask: requests per task"], 2.1, "", False),
        Check(
            "rate with 5 ms added, share of that without",
            middle["aztask: tasks/s, 5 ms added to each reply"]
            / middle["aztask: tasks/s, 0 ms added to each reply"],
            0.7,
            "",
        ),
        Check("tasks lost in kills", middle[f"aztask: tasks lost in {KILLS} kills"], 0, "", False),
    ]
    checks += [
        Check(f"times the rate of {peer.name}", rate / middle[f"{peer.name}: tasks/s"], 5, "x")
        for peer in peers
    ]
    conclude(checks)


if __name__ == "__main__":
    main()
