"""A chord of 1,000 on aztask and on Celery with Redis: rate, requests, and what a kill does.

Usage: python benchmarks/chords.py [--redis PATH] [--systems celery-redis,aztask-local,...]

Redis and Celery come as they are: no persistence, the default visibility timeout of an hour,
``task_acks_late``. Each system has one worker with four slots. "After a kill" is the time from
SIGKILL of that worker, amid members of 10 ms, to the body's value with a second worker that is
started at once; a system that does not end within a minute is shown with "-".
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

from common import figure, machine
from workflows import Place, place

HERE = Path(__file__).parent
MEMBERS = 1_000
WAIT = 60.0


class System(Protocol):
    """One system under test."""

    def send(self, seconds: float) -> Callable[[float], int]:
        """Send the chord; returns a function that waits for its value, or raises."""
        ...

    def worker(self) -> AbstractContextManager[subprocess.Popen[bytes]]:
        """A worker with four slots, for the block."""
        ...

    def requests(self) -> int:
        """Requests to the services so far."""
        ...


class Aztask:
    """aztask in a `Place`."""

    def __init__(self, made: Place, count: Callable[[], int]) -> None:
        self._made = made
        self.requests = count

    def send(self, seconds: float) -> Callable[[float], int]:
        """Send the chord from this process."""
        result = self._made.graph(MEMBERS, seconds).delay()
        return lambda timeout: int(result.get(timeout=timeout)[0])

    @contextmanager
    def worker(self) -> Iterator[subprocess.Popen[bytes]]:
        """A worker of `Place`, with a lease of two seconds."""
        options = ("--pool", "processes", "-c", "4", "--lease", "2s", "--max-lease", "60s")
        with self._made.workers(1, *options) as (process,):
            yield process


class Celery:
    """Celery with Redis."""

    def __init__(self, folder: Path, redis: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        command = [redis, "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
        self._folder = folder
        self._log = (folder / "log").open("wb")
        self.server = subprocess.Popen(command, cwd=folder, stdout=self._log, stderr=self._log)
        os.environ["BENCH_REDIS"] = f"redis://127.0.0.1:{port}/0"
        sys.path.insert(0, str(HERE / "peers"))
        import celery_chord_app  # type: ignore[import-not-found] # noqa: PLC0415  # reads BENCH_REDIS

        self._module: Any = celery_chord_app
        time.sleep(1.0)

    def send(self, seconds: float) -> Callable[[float], int]:
        """Send the chord from this process."""
        from celery import chord  # noqa: PLC0415  # only this system needs it

        page, book = self._module.page, self._module.book
        result = chord([page.s(n, seconds) for n in range(MEMBERS)])(book.s())
        return lambda timeout: int(result.get(timeout=timeout))

    @contextmanager
    def worker(self) -> Iterator[subprocess.Popen[bytes]]:
        """A worker with prefork, Celery's default pool."""
        command = [sys.executable, "-m", "celery", "-A", "celery_chord_app", "worker", "-c", "4"]
        environment = {**os.environ, "PYTHONPATH": str(HERE / "peers")}
        process = subprocess.Popen(
            command, env=environment, cwd=self._folder, stdout=self._log, stderr=self._log
        )
        try:
            yield process
        finally:
            process.terminate()
            process.wait(60)

    def requests(self) -> int:
        """Commands that Redis has processed."""
        stats: dict[str, Any] = self._module.app.backend.client.info("stats")
        return int(stats["total_commands_processed"])

    def close(self) -> None:
        """End Redis."""
        self.server.terminate()
        self.server.wait(30)
        self._log.close()


@contextmanager
def opened(name: str, redis: str) -> Iterator[System]:
    """A system with its services."""
    if name == "celery-redis":
        with tempfile.TemporaryDirectory(prefix="aztask-chords-") as folder:
            celery = Celery(Path(folder), redis)
            try:
                yield celery
            finally:
                celery.close()
        return
    with place(name.removeprefix("aztask-")) as (made, proxy):
        yield Aztask(made, lambda: 0 if proxy is None else proxy.total)


def measure(name: str, redis: str) -> None:
    """Print one system's rows."""
    with opened(name, redis) as system:
        with system.worker():
            system.send(0.0)(WAIT * 4)
            before, began = system.requests(), time.perf_counter()
            assert system.send(0.0)(WAIT * 4) == MEMBERS
            rate = MEMBERS / (time.perf_counter() - began)
            used = (system.requests() - before) / MEMBERS
        print(f"  {name + ': members/s, from send to value':<58} {figure(rate)}")
        if used:
            print(f"  {name + ': requests for each member':<58} {figure(used)}", flush=True)
        with system.worker() as first:
            value = system.send(0.01)
            time.sleep(1.5)
            first.kill()
            killed = time.perf_counter()
        with system.worker():
            try:
                assert value(WAIT) == MEMBERS
                shown = figure(time.perf_counter() - killed)
            except Exception as error:  # noqa: BLE001  # each system has its own
                shown = f"- ({type(error).__name__} after {WAIT:g} s)"
    print(f"  {name + ': after a kill, s':<58} {shown}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure each system."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--redis", default="redis-server")
    parser.add_argument("--systems", default="aztask-local,aztask-azurite,celery-redis")
    options = parser.parse_args(arguments)
    print("benchmark: a chord of 1,000 members, one worker with four slots")
    print(machine(("celery", "redis", "kombu")))
    print("command: python benchmarks/chords.py\n")
    for name in options.systems.split(","):
        measure(name, options.redis)


if __name__ == "__main__":
    main()
