"""Runs one worker on the emulator for very many tasks; memory and connections must stay flat.

Usage: python benchmarks/soak.py [--check] [--tasks 200000] [> docs/benchmarks/soak.txt]

The worker records results and writes events, as in production. Twenty samples are taken on the
way. The checks compare the second fifth of the way, when everything is warm, with the last fifth:
memory, connections and open files of the supervisor and of its pool processes.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests"), str(HERE.parent)]

from common import Check, conclude, family, machine  # noqa: E402
from servicebus import Bench  # noqa: E402

from aztask import App  # noqa: E402

LOOKS = 20
DEPTH = 2_000
"""Waiting messages at most, so that the emulator's own memory does not matter."""

BATCH = 500
CONCURRENCY = 4
PAUSE = 0.05
GROWTH_MIB = 8.0
GROWTH_SHARE = 0.05
MIB = 1024 * 1024


@dataclass(frozen=True)
class Look:
    """A worker after so many tasks. rate: tasks/s since the last sample. Memory is in MiB."""

    tasks: int
    rate: float
    supervisor: float
    pool: float
    processes: int
    connections: int
    files: int
    threads: int

    def line(self) -> str:
        return (
            f"{self.tasks:>9,} {self.rate:>8,.0f} {self.supervisor:>11.1f} "
            f"{self.pool:>9.1f} {self.processes:>10} {self.connections:>12} {self.files:>6} "
            f"{self.threads:>8}"
        )


HEAD = (
    f"{'tasks':>9} {'tasks/s':>8} {'supervisor':>11} {'pool MiB':>9} {'processes':>10} "
    f"{'connections':>12} {'files':>6} {'threads':>8}"
)


def status_of(pid: int, name: str) -> int:
    """A number in /proc/PID/status; 0 after the process has ended."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1])
    except OSError:
        pass
    return 0


def files_of(pid: int) -> list[str]:
    found = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found.append(str(entry.readlink()))
        except OSError:
            continue  # closed since the folder was read
    return found


def connections_of(pid: int, port: int) -> int:
    """The number of TCP connections of a process to the emulator."""
    own = {name[8:-1] for name in files_of(pid) if name.startswith("socket:")}
    remote = f"{port:04X}"
    lines = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
    fields = [line.split() for line in lines]
    return sum(each[2].endswith(f":{remote}") and each[9] in own for each in fields)


def look(pid: int, port: int, tasks: int, rate: float) -> Look:
    pool = family(pid)[1:]  # includes the fork server
    return Look(
        tasks,
        rate,
        status_of(pid, "VmRSS") * 1024 / MIB,
        sum(status_of(child, "VmRSS") for child in pool) * 1024 / MIB,
        len(pool),
        connections_of(pid, port),
        len(files_of(pid)),
        status_of(pid, "Threads"),
    )


@contextmanager
def worker_in(folder: Path, address: str) -> Iterator[subprocess.Popen[bytes]]:
    environment = {
        **os.environ,
        "SOAK_BROKER": address,
        "SOAK_RESULTS": f"local://{folder}/results.db",
        "AZTASK_EVENTS": str(folder / "events"),
        "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent)]),
    }
    command = ["-m", "aztask", "worker", "-A", "soak_tasks", "-Q", "default"]
    with (folder / "worker.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, *command, "-c", str(CONCURRENCY)],
            env=environment,
            cwd=folder,
            stdout=log,
            stderr=log,
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def soak(tasks: int) -> Iterator[Look]:
    """Send the tasks, and yield samples of the worker on the way."""
    bench = Bench()
    assert bench.process.stdout is not None
    # The emulator prints its counts every second; a full pipe would stop it.
    threading.Thread(target=bench.process.stdout.read, daemon=True).start()
    try:
        with (
            tempfile.TemporaryDirectory() as name,
            closing(App("soak", broker=bench.direct)) as app,
        ):
            bench.fresh()
            port = int(bench.direct.split(";")[0].rsplit(":", 1)[1])
            task = app.task(name="soak.noop")(lambda: None)
            with worker_in(Path(name), bench.direct) as worker:
                yield from _looks(bench, task, worker.pid, port, tasks)
                log = (Path(name) / "worker.log").read_text(errors="replace")
            if worker.returncode or "Traceback" in log:
                sys.exit(f"the worker failed:\n{log[-3000:]}")
    finally:
        bench.close()


def _looks(bench: Bench, task: object, pid: int, port: int, tasks: int) -> Iterator[Look]:
    sent, step = 0, tasks // LOOKS
    done, since = 0, time.monotonic()
    for number in range(1, LOOKS + 1):
        while sent - bench.depth() < number * step or (number == LOOKS and bench.depth()):
            room = min(tasks - sent, DEPTH - bench.depth())
            if room >= min(BATCH, tasks - sent) > 0:
                task.map([()] * min(BATCH, room))  # type: ignore[attr-defined]
                sent += min(BATCH, room)
            else:
                time.sleep(PAUSE)
        now, before, done = time.monotonic(), done, sent - bench.depth()
        yield look(pid, port, done, (done - before) / (now - since))
        since = now


def checks(looks: Sequence[Look]) -> list[Check]:
    """Compare the second fifth of the way with the last."""
    fifth = len(looks) // 5
    early, late = looks[fifth : 2 * fifth], looks[-fifth:]

    def change(name: str) -> tuple[float, float]:
        before = statistics.median(getattr(each, name) for each in early)
        return statistics.median(getattr(each, name) for each in late) - before, before

    found = []
    for name, what in (("supervisor", "supervisor's memory"), ("pool", "pool's memory")):
        grown, before = change(name)
        limit = max(GROWTH_MIB, GROWTH_SHARE * before)
        found.append(Check(f"growth of the {what}", grown, limit, "MiB", at_least=False))
    for name in ("connections", "files", "threads"):
        limit = max(getattr(each, name) for each in looks[: 2 * fifth])
        most = max(getattr(each, name) for each in late)
        found.append(Check(f"{name} at the end, at most as before", most, limit, "", False))
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--tasks", type=int, default=int(os.environ.get("SOAK_TASKS", "200000")))
    options = parser.parse_args()
    if options.tasks < 100 * LOOKS:
        parser.error(f"--tasks takes at least {100 * LOOKS}")
    print(machine(("azure-servicebus", "kombu")))
    print(f"{options.tasks:,} no-op tasks, {CONCURRENCY} pool processes, results and events on\n")
    print(HEAD, flush=True)
    looks = []
    for each in soak(options.tasks):
        looks.append(each)
        print(each.line(), flush=True)
    conclude(checks(looks))


if __name__ == "__main__":
    main()
