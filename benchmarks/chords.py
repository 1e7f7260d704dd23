"""A chord of 1,000 on aztask and on Celery: rate, requests, and what a kill does.

Usage: python benchmarks/chords.py [--redis PATH] [--systems celery-redis,aztask-local,...]

aztask-local      one file
aztask-azurite    Storage queues and Tables, on Azurite
celery-redis      Redis as broker and result backend
celery-azure      Kombu's ``azurestoragequeues`` and Celery's backend ``azureblockblob``, on Azurite

Redis and Celery come as they are: no persistence, the default visibility timeout of an hour,
``task_acks_late``. Each system has one worker with four slots. "After a kill" is the time from
SIGKILL of that worker, amid members of 10 ms (100 ms if there are 100), to the body's value with a
second worker that is started at once; a system that does not end within a minute is shown with "-".
A system that cannot send 1,000 members says why, and is measured with 100. Requests on Azurite are
those to queues, and to tables or blobs, counted by proxies; those to Redis are its commands.
"""

from __future__ import annotations

import argparse
import importlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

from common import figure, machine
from workflows import Place, Proxy, azurite, place

HERE = Path(__file__).parent
MEMBERS = 1_000
FEWER = 100
WAIT = 60.0


class System(Protocol):
    """One system under test."""

    def send(self, members: int, seconds: float) -> Callable[[float], int]:
        """Send a chord; returns a function that waits for its value, or raises."""
        ...

    def worker(self) -> AbstractContextManager[subprocess.Popen[bytes]]:
        """A worker with four slots, for the block."""
        ...

    def requests(self) -> int:
        """Requests to the services so far."""
        ...

    def messages(self) -> int:
        """Messages that were sent so far; 0 if they are not counted."""
        ...


class Aztask:
    """aztask in a `Place`."""

    def __init__(self, made: Place, proxies: Sequence[Proxy]) -> None:
        """proxies: those of the queues and the Tables; none on local files."""
        self._made = made
        self._proxies = proxies

    def requests(self) -> int:
        """Requests to queues and Tables."""
        return sum(proxy.total for proxy in self._proxies)

    def messages(self) -> int:
        """Requests that put a message into a queue."""
        return self._proxies[0].counts["POST"] if self._proxies else 0

    def send(self, members: int, seconds: float) -> Callable[[float], int]:
        """Send the chord from this process."""
        result = self._made.graph(members, seconds).delay()
        return lambda timeout: int(result.get(timeout=timeout)[0])

    @contextmanager
    def worker(self) -> Iterator[subprocess.Popen[bytes]]:
        """A worker of `Place`, with a lease of two seconds."""
        options = ("--pool", "processes", "-c", "4", "--lease", "2s", "--max-lease", "60s")
        with self._made.workers(1, *options) as (process,):
            yield process


class Celery:
    """Celery with its services."""

    def __init__(
        self, folder: Path, broker: str, backend: str, proxies: Sequence[Proxy] = ()
    ) -> None:
        """proxies: those of the queues and the blobs; none on Redis."""
        self._folder = folder
        self._log = (folder / "log").open("wb")
        os.environ["BENCH_CELERY_BROKER"] = broker
        os.environ["BENCH_CELERY_BACKEND"] = backend
        sys.path.insert(0, str(HERE / "peers"))
        sys.modules.pop("celery_chord_app", None)  # of another system
        self._module: Any = importlib.import_module("celery_chord_app")  # reads these
        self._proxies = proxies

    def send(self, members: int, seconds: float) -> Callable[[float], int]:
        """Send the chord from this process."""
        from celery import chord  # noqa: PLC0415  # only this system needs it

        page, book = self._module.page, self._module.book
        result = chord([page.s(n, seconds) for n in range(members)])(book.s())
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
        """Requests, or commands that Redis has processed."""
        if self._proxies:
            return sum(proxy.total for proxy in self._proxies)
        return int(self._info("stats")["total_commands_processed"])

    def messages(self) -> int:
        """Requests that put a message into a queue, or ``LPUSH`` commands."""
        if self._proxies:
            return self._proxies[0].counts["POST"]
        return int(self._info("commandstats").get("cmdstat_lpush", {}).get("calls", 0))

    def _info(self, section: str) -> dict[str, Any]:
        found: dict[str, Any] = self._module.app.backend.client.info(section)
        return found

    def close(self) -> None:
        """Close the log."""
        self._log.close()


@contextmanager
def on_redis(folder: Path, redis: str) -> Iterator[Celery]:
    """Celery with a Redis of its own."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [redis, "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    with (folder / "redis.log").open("wb") as log:
        server = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
    try:
        time.sleep(1.0)
        address = f"redis://127.0.0.1:{port}/0"
        celery = Celery(folder, address, address)
        yield celery
        celery.close()
    finally:
        server.terminate()
        server.wait(30)


@contextmanager
def on_azurite(folder: Path) -> Iterator[Celery]:
    """Celery with Storage queues and blobs, through proxies that count."""
    with ExitStack() as stack:
        services = {
            name: stack.enter_context(azurite.running(folder / name, service=name, movable=False))
            for name in ("queue", "blob")
        }
        proxies = {name: Proxy(service.port) for name, service in services.items()}
        for proxy in proxies.values():
            stack.callback(proxy.close)
        ports = {name: proxy.port for name, proxy in proxies.items()}
        account = azurite.account_of(services["blob"], blob=ports["blob"])
        url = f"http://127.0.0.1:{ports['queue']}/{azurite.ACCOUNT}"
        celery = Celery(
            folder,
            f"azurestoragequeues://{azurite.KEY}@{url}",
            f"azureblockblob://{account}",
            [proxies["queue"], proxies["blob"]],
        )
        yield celery
        celery.close()


@contextmanager
def opened(name: str, redis: str) -> Iterator[System]:
    """A system with its services."""
    if name.startswith("celery"):
        with tempfile.TemporaryDirectory(prefix="aztask-chords-") as folder:
            path = Path(folder)
            peer = on_redis(path, redis) if name == "celery-redis" else on_azurite(path)
            with peer as celery:
                yield celery
        return
    queues: list[Proxy] = []
    with place(name.removeprefix("aztask-"), queues) as (made, proxy):
        yield Aztask(made, [] if proxy is None else [*queues, proxy])


def measure(name: str, redis: str, members: int = MEMBERS) -> None:
    """Print one system's rows."""

    def row(what: str, shown: str) -> None:
        title = name if members == MEMBERS else f"{name}, {members} members"
        print(f"  {title + ': ' + what:<58} {shown}", flush=True)

    refused = ""
    with opened(name, redis) as system:
        with system.worker():
            try:
                system.send(members, 0.0)(WAIT * 4)
            except Exception as error:  # noqa: BLE001  # each system has its own
                refused = f"- ({type(error).__name__}: {str(error).splitlines()[0]})"
            else:
                requests, messages = system.requests(), system.messages()
                began = time.perf_counter()
                assert system.send(members, 0.0)(WAIT * 4) == members
                rate = members / (time.perf_counter() - began)
                requests, messages = system.requests() - requests, system.messages() - messages
                row("members/s, from send to value", figure(rate))
                if requests:
                    row("requests for each member", figure(requests / members))
                if messages:
                    row("messages", str(messages))
        if not refused:
            row("after a kill, s", _killed(system, members))
    if refused:
        row("members/s, from send to value", refused)
        if members > FEWER:
            measure(name, redis, FEWER)


def _killed(system: System, members: int) -> str:
    """Seconds from a worker's death amid a chord to the value; "-" if there is none in time."""
    with system.worker() as first:
        value = system.send(members, 10.0 / members)
        time.sleep(1.5)
        first.kill()
        killed = time.perf_counter()
    with system.worker():
        try:
            assert value(WAIT) == members
            return figure(time.perf_counter() - killed)
        except Exception as error:  # noqa: BLE001  # each system has its own
            return f"- ({type(error).__name__} after {WAIT:g} s)"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure each system."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--redis", default="redis-server")
    parser.add_argument(
        "--systems", default="aztask-local,aztask-azurite,celery-redis,celery-azure"
    )
    options = parser.parse_args(arguments)
    print("benchmark: a chord of 1,000 members, one worker with four slots")
    print(machine(("celery", "redis", "kombu")))
    print("command: python benchmarks/chords.py\n")
    for name in options.systems.split(","):
        measure(name, options.redis)


if __name__ == "__main__":
    main()
