"""What a workflow costs beside the same tasks sent by ``.map``.

Usage: python benchmarks/workflows.py [--check] [--parts requests,local,latency,large]

requests   requests to Azure Tables for each member of a group of 480, counted by a proxy before
           Azurite's table service, less those of the same tasks sent by .map. Workers have 1 slot
           (one by one), 32 (many end together), and 24 slots in 4 workers (contended). Then all
           requests of 24 processes of one slot that do nothing but end members, as threads.
local      CPU time of sender and worker for 5,000 tasks with results in one file, as a group and
           by .map.
latency    from the end of a group's last member to the first line of its body.
large      the same for a group of 10,000 on local files.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

from common import Check, conclude, figure, machine, percentile
from compare_round import emulator

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "integration")]

import azurite  # noqa: E402
from proxy import Proxy  # noqa: E402

from aztask import App, chord  # noqa: E402
from aztask.stores.records.base import Provisioned, State  # noqa: E402
from aztask.workflows.engine import engine_for  # noqa: E402
from aztask.workflows.graphs import Graph  # noqa: E402
from aztask.workflows.joins import TaskEnd  # noqa: E402
from aztask.workflows.place import NodePlace as Position  # noqa: E402

MEMBERS = 480
WRITERS = 24
LOCAL_TASKS = 5_000
LARGE = 10_000
CHORDS = 40
SMALL = 5
PATIENCE = 240.0
ROUNDS = 15
STUDENT = 2.145
"""Student's t for 95 % and 15 pairs; more pairs need less."""

APP = """
import os, time
from aztask import App

app = App("bench", broker=os.environ["BENCH_BROKER"], results=os.environ["BENCH_RESULTS"])


@app.task
def page(number: int, seconds: float = 0.0) -> float:
    if seconds:
        time.sleep(seconds)
    return time.time()


@app.task
def book(ends: list) -> list:
    now = time.time()
    return [len(ends), now - max(ends)]
"""

SEND = """
import json, resource, sys, time
from bench_app import app, book, page
from aztask import chord

kind, count, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
if kind == "map":
    page.map([(number, seconds) for number in range(count)])
else:
    chord([page.s(number, seconds) for number in range(count)], book.s()).delay(workflow_id="w")
print(json.dumps(sum(resource.getrusage(resource.RUSAGE_SELF)[:2])))
app.close()
"""


class Place:
    """A folder with the app, its queues and results, and processes that use them."""

    def __init__(self, folder: Path, broker: str, results: str) -> None:
        for name, text in (("bench_app", APP), ("bench_send", SEND)):
            (folder / f"{name}.py").write_text(text)
        self.folder = folder
        path = os.pathsep.join([str(folder), str(ROOT)])
        names = {"BENCH_BROKER": broker, "BENCH_RESULTS": results, "PYTHONPATH": path}
        self.environment = {**os.environ, **names}
        self.app = App("bench", broker=broker, results=results)
        self.page = self.app.task(name="bench.page")(lambda number, seconds=0.0: 0.0)
        self.book = self.app.task(name="bench.book")(lambda ends: 0.0)
        if isinstance(self.app.results, Provisioned):
            self.app.results.create()
        self.app.broker.declare("default")

    def send(self, kind: str, count: int, seconds: float = 0.0) -> float:
        """Send from a process of its own; its CPU seconds."""
        command = [sys.executable, "-m", "bench_send", kind, str(count), str(seconds)]
        shown = subprocess.run(
            command, env=self.environment, cwd=self.folder, check=True, capture_output=True
        ).stdout
        return float(json.loads(shown))

    @contextmanager
    def workers(self, count: int, *options: str) -> Iterator[list[subprocess.Popen[bytes]]]:
        """Workers, which are ended after the block."""
        command = [sys.executable, "-m", "aztask", "worker", "-A", "bench_app:app", *options]
        with (self.folder / "workers.log").open("ab") as log:
            found = [
                subprocess.Popen(
                    command, env=self.environment, cwd=self.folder, stdout=log, stderr=log
                )
                for _ in range(count)
            ]
        try:
            yield found
        finally:
            for each in found:
                each.terminate()
            for each in found:
                each.wait(60)

    def drained(self) -> None:
        """Wait until all messages are settled."""
        give_up_at = time.monotonic() + PATIENCE
        while time.monotonic() < give_up_at:
            stats = self.app.broker.stats("default")
            known = (stats.active, stats.leased, stats.scheduled, stats.total)
            if not any(known):
                return
            time.sleep(0.2)
        raise RuntimeError(f"the queue is not empty after {PATIENCE} s: {self.folder}")

    def graph(self, count: int, seconds: float = 0.0) -> Graph:
        """A chord of so many members."""
        return chord([self.page.s(n, seconds) for n in range(count)], self.book.s())


@contextmanager
def place(kind: str, queues: list[Proxy] | None = None) -> Iterator[tuple[Place, Proxy | None]]:
    """A place on local files, on Azurite, or on the emulator with Tables; the Tables' proxy.

    * `queues`: gets the proxy of the queues, if they are to have one.
    """
    with tempfile.TemporaryDirectory(prefix="aztask-workflows-") as name, ExitStack() as stack:
        folder = Path(name)
        if kind == "local":
            address = f"local://{folder}/queues.db"
            made, proxy = Place(folder, address, address), None
        else:
            services = stack.enter_context(azurite.storing(folder / "azurite", movable=False))
            proxy = Proxy(services[0].port)
            stack.callback(proxy.close)
            if kind == "azurite":
                queue = azurite.running(folder / "queue", movable=False)
                services = (stack.enter_context(queue), *services)
            ports = {"table": proxy.port}
            if kind == "azurite" and queues is not None:
                queues.append(Proxy(services[0].port))
                stack.callback(queues[0].close)
                ports["queue"] = queues[0].port
            results = azurite.account_of(*services, **ports)
            broker = results if kind == "azurite" else stack.enter_context(emulator())
            made = Place(folder, broker, results)
        stack.callback(made.app.close)
        yield made, proxy


def requests(shape: str, workers: int, *options: str) -> float:
    """Extra requests to the table service for each member."""
    counted = {}
    for kind in ("map", "chord"):
        with place("azurite") as (made, proxy):
            assert proxy is not None
            made.send(kind, MEMBERS, 0.01)
            before = proxy.total
            with made.workers(workers, "--pool", "threads", *options):
                made.drained()
                counted[kind] = proxy.total - before
    extra = (counted["chord"] - counted["map"]) / MEMBERS
    print(
        f"  {shape + ': requests to Tables for each task':<58} "
        f"{figure(counted['map'] / MEMBERS)} by .map, {figure(counted['chord'] / MEMBERS)} "
        f"as a group, {extra:+.2f}",
        flush=True,
    )
    return extra


def writers() -> float:
    """Requests to the table service for each member, of writers that only end members."""
    with place("azurite") as (made, proxy):
        assert proxy is not None
        results, shop = made.app.results, made.app
        assert results is not None
        made.graph(MEMBERS).delay(workflow_id="w")
        plan = shop.workflows.engine.graphs.plan("w")
        assert plan is not None
        members = iter([node for node in plan.nodes if node.task == "bench.page"])

        def work(number: int) -> None:
            own = engine_for(results, lambda: shop.broker, shop.codec)
            assert own is not None
            while (node := next(members, None)) is not None:
                place_of = Position.of(plan, node)
                own.joins.ended([TaskEnd("w", place_of, 0, State.SUCCEEDED, b"\x01")])

        before = proxy.total
        with ThreadPoolExecutor(WRITERS) as pool:
            list(pool.map(work, range(WRITERS)))
        each = (proxy.total - before) / MEMBERS
    text = f"{WRITERS} workers of one slot that only end members: requests"
    print(f"  {text:<58} {figure(each)} for each member", flush=True)
    return each


def local_cpu(rounds: int = ROUNDS) -> float:
    """How much more CPU time the tasks take as a group, as a share: the end of a 95 % interval.

    Each round is a pair, whose order changes from one to the next.
    """
    ratios = []
    for number in range(rounds):
        spent = {}
        for kind in ("map", "chord") if number % 2 else ("chord", "map"):
            with place("local") as (made, _):
                used = made.send(kind, LOCAL_TASKS)
                before = os.times()
                with made.workers(1, "--burst", "--pool", "threads", "-c", "4") as (worker,):
                    worker.wait(PATIENCE)
                after = os.times()
                spent[kind] = used + after[2] + after[3] - before[2] - before[3]
        ratios.append(spent["chord"] / spent["map"] - 1.0)
    mean = statistics.mean(ratios)
    half = STUDENT * statistics.stdev(ratios) / math.sqrt(len(ratios))
    print(
        f"  {'local: CPU time of a group beside .map, share more':<58} {figure(mean)} "
        f"(95 % interval {figure(mean - half)} to {figure(mean + half)}, {rounds} pairs)",
        flush=True,
    )
    return mean + half


def latency(kind: str, chords: int = CHORDS) -> float:
    """Milliseconds from the last member's end to the body's first line, p95."""
    found = []
    with place(kind) as (made, _), made.workers(1, "--pool", "threads", "-c", "4"):
        made.graph(SMALL).delay().get(timeout=PATIENCE)
        for _ in range(chords):
            count, seconds = made.graph(SMALL).delay().get(timeout=PATIENCE)
            assert count == SMALL
            found.append(1000 * seconds)
    shown = f"p50 {figure(percentile(found, 0.5))}, p95 {figure(percentile(found, 0.95))}"
    print(f"  {kind + ': last member to body, ms':<58} {shown}", flush=True)
    return percentile(found, 0.95)


def large() -> float:
    """Seconds from the last member's end to the first line of the body of `LARGE` values."""
    with place("local") as (made, _), made.workers(1, "--pool", "threads", "-c", "4"):
        count, seconds = made.graph(LARGE).delay().get(timeout=PATIENCE)
        assert count == LARGE
    print(f"  {'local: last of 10,000 members to body, s':<58} {figure(seconds)}", flush=True)
    return float(seconds)


def checks_of(parts: Sequence[str]) -> Iterator[Check]:
    """Measure these parts."""
    if "requests" in parts:
        together = requests("32 slots of one worker", 1, "-c", "32", "--prefetch", "32")
        yield Check("extra requests, many end together", together, 0.15, "each", False)
        single = requests("one slot", 1, "-c", "1")
        yield Check("extra requests, one by one", single, 1.2, "each", False)
        contended = requests("24 slots of 4 workers", 4, "-c", "6")
        yield Check("extra requests, 24 slots of 4 workers", contended, 2.5, "each", False)
        yield Check("requests, 24 writers that only end members", writers(), 2.5, "each", False)
    if "local" in parts:
        yield Check("local: more CPU time, end of the interval", local_cpu(), 0.15, "share", False)
    if "latency" in parts:
        yield Check("local: last member to body, p95", latency("local"), 50, "ms", False)
        yield Check("Azurite: last member to body, p95", latency("azurite"), 300, "ms", False)
        bus = latency("servicebus")
        yield Check("emulator and Tables: last member to body, p95", bus, 300, "ms", False)
    if "large" in parts:
        yield Check("10,000 members: last member to body", large(), 3.0, "s", False)


def main() -> None:
    """Measure, print, check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--parts", default="requests,local,latency,large")
    parts = parser.parse_args().parts.split(",")
    print("benchmark: workflows beside the same tasks sent by .map")
    print(machine())
    print("command: python benchmarks/workflows.py\n")
    conclude(list(checks_of(parts)))


if __name__ == "__main__":
    main()
