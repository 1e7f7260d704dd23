"""How many `async def` tasks one process runs, how soon they start, and what they cost.

Usage: python benchmarks/coroutines.py [--check] [> docs/benchmarks/coroutines.txt]

Workers run on the embedded broker, started as a user starts them. Calls through a shared client are
due 30 seconds later, when all processes of the pool `processes` have imported the app. The HTTP
server is a process of its own on this machine; it keeps connections alive and answers after one
second.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from common import Check, conclude, family, machine, megabytes

from aztask.stores.events.event import Event
from aztask.stores.events.sink import read_events

HERE = Path(__file__).parent
TASKS = 1000
CALLS = 400
SLOTS = 200
BLOCK = 60.0
STARTING = 30.0
LEASE = 2.0


class Run:
    """One worker that runs a batch of tasks, and what its events say."""

    def __init__(
        self,
        pool: str,
        slots: int,
        calls: dict[str, Sequence[tuple[Any, ...]]],
        delay: float = 0.0,
        weigh: bool = False,
    ) -> None:
        """delay: seconds until the tasks are due. weigh: measure the memory of pool processes,
        which with hundreds of them would take a processor of its own."""
        with tempfile.TemporaryDirectory() as folder:
            os.environ["BENCH_BROKER"] = f"local://{folder}/queues.db"
            os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), str(HERE.parent)])
            sys.modules.pop("coroutine_tasks", None)
            tasks = importlib.import_module("coroutine_tasks")
            results = [
                result
                for name, args in calls.items()
                for result in getattr(tasks, name).with_options(delay=delay).map(args)
            ]
            command = [sys.executable, "-m", "aztask", "worker", "-A", "coroutine_tasks"]
            command += ["--pool", pool, "-c", str(slots), "--max-tasks", str(len(results))]
            command += ["--lease", f"{LEASE}s", "--log-tasks", "off"]
            self.worker = subprocess.Popen(
                command, env={**os.environ, "AZTASK_EVENTS": f"{folder}/events"}, stderr=-3
            )
            self.memory: dict[int, float] = {}
            while self.worker.poll() is None:
                if weigh:
                    self._measure()
                time.sleep(0.5)
            self.succeeded = sum(result.successful() for result in results)
            self.events: list[Event] = list(read_events(Path(folder) / "events"))
            tasks.app.close()

    def _measure(self) -> None:
        for pid in family(self.worker.pid):
            try:
                name = Path(f"/proc/{pid}/comm").read_text().strip()
                if name == "aztask-pool":
                    self.memory[pid] = max(self.memory.get(pid, 0.0), megabytes(pid))
            except (OSError, ValueError):
                continue  # it has ended

    def times(self, kind: str) -> list[float]:
        """The times of the events of this kind, sorted."""
        return sorted(event.ts for event in self.events if event.event == kind)

    def count(self, kind: str) -> int:
        """How many events of this kind there are."""
        return len(self.times(kind))


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer requests after a second, on a connection that stays open."""
    try:
        while await reader.readuntil(b"\r\n\r\n"):
            await asyncio.sleep(1.0)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


async def serve() -> None:
    """Be the HTTP server; the first line of output is its address."""
    server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=1000)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/", flush=True)
    await server.serve_forever()


def many() -> list[Check]:
    """A thousand tasks that sleep, in one process."""
    run = Run("asyncio", TASKS, {"nap": [(8.0,)] * TASKS}, weigh=True)
    started, received = run.times("started"), run.times("received")
    seconds, memory = started[-1] - received[0], max(run.memory.values())
    print(
        f"{TASKS:,} sleeping tasks in one process: all started {seconds:.2f} s after the first was"
    )
    print(f"received, {run.count('renewed'):,} renewals, {memory:.0f} MB for the pool process")
    return [
        Check("sleeping tasks that succeeded", run.succeeded, TASKS, "tasks"),
        Check("from the first receive to the last start", seconds, 2.0, "s", at_least=False),
        Check("leases lost", run.count("lease_lost"), 0, "leases", at_least=False),
        Check("memory of the pool process", memory, 100.0, "MB", at_least=False),
    ]


def calls(pool: str, url: str) -> list[Check]:
    """Calls of one second through one shared client."""
    run = Run(pool, SLOTS, {"get": [(url,)] * CALLS}, STARTING)
    seconds = run.times("succeeded")[-1] - run.times("started")[0]
    print(f"{CALLS} calls of one second, --pool {pool} -c {SLOTS}: {seconds:.2f} s")
    return [
        Check(f"calls that succeeded, {pool}", run.succeeded, CALLS, "calls"),
        Check(f"from the first start to the last end, {pool}", seconds, 4.0, "s", at_least=False),
    ]


def blocked() -> list[Check]:
    """One task blocks the loop for a minute, beside 99 others."""
    run = Run("asyncio", 100, {"nap": [(1.0,)] * 99, "block": [(BLOCK,)]})
    lost, started = run.count("lease_lost"), run.count("started")
    print(f"the loop blocked for {BLOCK:.0f} s under leases of {LEASE:.0f} s, 100 tasks held:")
    print(f"{run.count('renewed'):,} renewals, {lost} leases lost")
    return [
        Check("tasks beside the block that succeeded", run.succeeded, 100, "tasks"),
        Check("starts of tasks", started, 100, "starts", at_least=False),
        Check("leases lost while the loop is blocked", lost, 0, "leases", at_least=False),
    ]


def main() -> None:
    """Measure everything, once."""
    if "--serve" in sys.argv:
        asyncio.run(serve())
        return
    print(machine(("httpx", "httpcore")), "\n")
    command = [sys.executable, __file__, "--serve"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        checks = many()
        for pool in ("asyncio", "threads", "processes"):
            checks += calls(pool, url)
        server.kill()
    checks += blocked()
    conclude(checks)


if __name__ == "__main__":
    main()
