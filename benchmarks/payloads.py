"""A 100 MB argument and a 100 MB result on every broker: memory, requests, time.

Usage: python benchmarks/payloads.py [--check] [--megabytes 100] [--pairs 400]
           [--parts small,local,storagequeue,servicebus]

One worker with one pool process first runs a small task, then one that gets a large argument and
returns it. Memory is what the kernel notes as the highest resident set of a process (VmHWM in
proc(5)), without that after the small task. Blob requests are counted by a proxy between aztask and
Azurite: those of the argument, then those of the result.

The part ``small`` measures the CPU time of a small message's way (encode, envelope, read, decode,
run, encode the result) with and without a store of payloads, in turns, in one process.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import azurite  # noqa: E402
from common import Check, conclude, family, figure, machine  # noqa: E402
from proxy import Proxy, proxied  # noqa: E402

from aztask import App  # noqa: E402
from aztask.context import TaskLease  # noqa: E402
from aztask.queues.base import QueueOptions  # noqa: E402
from aztask.queues.servicebus.admin import ADMIN_VARIABLE  # noqa: E402
from aztask.task import Invocation  # noqa: E402
from aztask.testing import emulator  # noqa: E402
from aztask.worker.pool.attempt import OpenRun, RunReader  # noqa: E402
from aztask.worker.pool.packets import Answers  # noqa: E402

PARTS = ("small", "local", "storagequeue", "servicebus")
SUPERVISOR_MB = 32.0
POOL_COPIES = 3.0
POOL_MB = 64.0
SLOWER = 1.02
BATCH = 100
PATIENCE = 300.0
REQUEST = re.compile(rb"\A(GET|PUT|POST|DELETE) (?!\S*comp=list)(\S+) HTTP/1\.1\r\n")
"""Without the listing that a worker makes once an hour, and without the parts of a batch."""

MODULE = """
import os
from aztask import App
app = App("bench", broker=os.environ["BENCH_BROKER"], results=os.environ["BENCH_RESULTS"])

@app.task
def back(data):
    return data
"""


def peaks(worker: int) -> dict[str, float]:
    """The highest resident sets of the supervisor and the pool process so far, MB."""
    found = {}
    for pid in family(worker):
        try:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        except OSError:
            continue
        fields = dict(line.split(":", 1) for line in lines if ":" in line)
        name = "supervisor" if pid == worker else fields["Name"].strip()
        found[name] = int(fields["VmHWM"].split()[0]) / 1024
    return {"supervisor": found["supervisor"], "pool process": found["aztask-pool"]}


@contextmanager
def service(part: str, folder: Path) -> Iterator[tuple[str, Proxy | None]]:
    """(the broker's address, the proxy before the blobs), with the environment set."""
    with ExitStack() as stack:
        if part == "local":
            yield f"local://{folder}/queues.db", None
            return
        blobs = stack.enter_context(
            azurite.running(folder / "blobs", service="blob", movable=False)
        )
        proxy = stack.enter_context(proxied(blobs.port, requests=REQUEST))
        os.environ["AZTASK_PAYLOADS"] = f"bench-{part}"
        os.environ["AZTASK_PAYLOADS_ACCOUNT"] = azurite.account_of(blobs, blob=proxy.port)
        if part == "storagequeue":
            queues = stack.enter_context(azurite.running(folder / "queues", movable=False))
            yield queues.connection_string, proxy
        else:
            bus = stack.enter_context(emulator())
            os.environ[ADMIN_VARIABLE] = bus.admin_connection_string
            yield bus.connection_string, proxy
        del os.environ["AZTASK_PAYLOADS"], os.environ["AZTASK_PAYLOADS_ACCOUNT"]


def large(part: str, size: int) -> dict[str, float]:
    """Run a large task on one broker; returns its figures."""
    with tempfile.TemporaryDirectory() as text, service(part, Path(text)) as (broker, proxy):
        folder = Path(text)
        (folder / "bench.py").write_text(MODULE)
        results = f"local://{folder}/results.db"
        app = App("bench", broker=broker, results=results)
        app.broker.declare("default", QueueOptions(lease=60.0))
        if proxy is not None:
            app.put(b"this creates the container")
        worker = subprocess.Popen(
            [sys.executable, "-m", "aztask", "-A", "bench", "worker", "-Q", "default", "-c", "1"],
            cwd=folder,
            env={
                **os.environ,
                "BENCH_BROKER": broker,
                "BENCH_RESULTS": results,
                "PYTHONPATH": os.pathsep.join([text, str(ROOT)]),
            },
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            app.send("bench.back", [b"small"]).get(timeout=PATIENCE)
            before, requests = peaks(worker.pid), proxy.total if proxy else 0
            data = os.urandom(size)
            began = time.perf_counter()
            result = app.send("bench.back", [data])
            sent = time.perf_counter() - began
            while not result.ready():
                time.sleep(0.05)
            ended = time.perf_counter() - began
            after, spent = peaks(worker.pid), (proxy.total if proxy else 0) - requests
            if result.get(timeout=PATIENCE) != data:
                raise RuntimeError("the result is not what was sent")
            figures = {f"{name}, MB": after[name] - before[name] for name in after}
            return {**figures, "sent, s": sent, "ended, s": ended, "requests": float(spent)}
        finally:
            worker.terminate()
            worker.wait()
            app.close()


class SmallWay:
    """The way of small messages of one app, without a queue and a store."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self._app = App("way", broker=f"local://{folder}/queues.db", **options)
        self._task = self._app.task(name="way.add")(lambda left, right: left + right)
        self._attempts = RunReader(self._app, self, Answers(), os.getpid())

    def send(self, packet: Any, /) -> None:
        """Take an answer that goes nowhere."""

    def seconds(self) -> float:
        """The CPU time of `BATCH` messages."""
        app, attempts = self._app, self._attempts
        codec, sender = app.codec, app.sends.sender
        began = time.process_time()
        for number in range(BATCH):
            steps = sender.steps(
                "way.add", self._task, "default", (Invocation((number, 1), {}),), {}, False
            )
            (message,) = next(steps).messages
            steps.close()
            received = app.message_in(codec.to_envelope(message), "default", 1)
            lease = TaskLease(math.inf, ask=lambda seconds: None)
            call = attempts.open(OpenRun(1, received, 1, 0.0, lease, 0.0))
            attempts.value(call.begin())
        return time.process_time() - began


def small(pairs: int) -> tuple[float, float, float]:
    """(ratio with a store beside without one, lower and upper end of its 95 % interval).

    The median of the pairs, and the interval that their order gives (a binomial sign test), because
    other processes disturb single pairs by much.
    """
    with tempfile.TemporaryDirectory() as text:
        ways = {
            "without": SmallWay(Path(text), payloads="off"),
            "with": SmallWay(Path(text)),
        }
        ratios = []
        for number in range(pairs + 10):
            order = list(ways) if number % 2 else list(reversed(ways))
            spent = {name: ways[name].seconds() for name in order}
            if number >= 10:  # the first ones warm up
                ratios.append(spent["with"] / spent["without"])
    ratios.sort()
    half = round(1.96 * math.sqrt(len(ratios)) / 2)
    middle = len(ratios) // 2
    return statistics.median(ratios), ratios[middle - half], ratios[middle + half]


def main() -> None:
    """Measure all parts and print the figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--pairs", type=int, default=400)
    parser.add_argument("--parts", default=",".join(PARTS))
    given = parser.parse_args()
    size = given.megabytes * 1_000_000
    print(f"benchmark: an argument and a result of {given.megabytes} MB")
    print(machine(("azure-storage-blob", "msgpack")))
    print(f"command: python benchmarks/payloads.py --megabytes {given.megabytes}\n")
    checks = []
    for part in given.parts.split(","):
        if part == "small":
            ratio, low, high = small(given.pairs)
            interval = f"{ratio:.4f} ({low:.4f} to {high:.4f})"
            print(f"  small message, CPU time with a store / without: {interval}")
            checks.append(Check("small messages, upper end", high, SLOWER, "", at_least=False))
            continue
        figures = large(part, size)
        line = ", ".join(f"{name.replace(',', '')} {figure(v)}" for name, v in figures.items())
        print(f"  {part}: {line}")
        pool = POOL_COPIES * size / 2**20 + POOL_MB
        for name, value, target, unit in (
            ("supervisor grows by", figures["supervisor, MB"], SUPERVISOR_MB, "MB"),
            ("pool process grows by", figures["pool process, MB"], pool, "MB"),
            ("blob requests, with removal and result", figures["requests"], 4.0, ""),
        ):
            checks.append(Check(f"{part}: {name}", value, target, unit, at_least=False))
    conclude(checks)


if __name__ == "__main__":
    main()
