"""The highest rate that Azurite accepts: requests composed before, and no other work beside them.

Usage: python benchmarks/storage_ceiling.py

Compare the rate of `.map` with it: on two cores, the sender and Azurite share one machine. As a
command it compares two Azurites in turns, after their code is compiled: one with its data in
temporary files, one with its data in memory.
"""

from __future__ import annotations

import select
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests"), str(HERE.parent)]

import azurite  # noqa: E402
from common import machine, spread  # noqa: E402
from storage_systems import Bench  # noqa: E402

from aztask.azure.transport import LeanTransport  # noqa: E402
from aztask.queues.storagequeue.messages import MessagePipeline, RequestSpec  # noqa: E402

CONNECTIONS = 8
WARMINGS = 8
ROUNDS = 15
TEXT = "x" * 620  # as long as a no-op's message


def ceiling(bench: Bench, count: int) -> float:
    """Sends per second, of `count` over eight connections; more connections are not faster."""
    url = bench.service.get_queue_client("default").url
    pipeline = MessagePipeline(bench.service, LeanTransport())
    asked = RequestSpec("POST", f"{url}/messages?messagettl=-1", TEXT)
    composed = [pipeline.signed(asked).data for _ in range(count)]
    address = urlsplit(url)
    open_ones = [
        socket.create_connection((address.hostname or "", address.port or 80))
        for _ in range(CONNECTIONS)
    ]
    try:
        began = time.perf_counter()
        answered(open_ones, iter(composed), count)
        return count / (time.perf_counter() - began)
    finally:
        for connection in open_ones:
            connection.close()


def answered(open_ones: list[socket.socket], requests: Iterator[bytes], left: int) -> None:
    """Send each request after the answer to the one before it on its connection."""
    waiting = select.epoll()
    by_number = {connection.fileno(): connection for connection in open_ones}
    for number, connection in by_number.items():
        waiting.register(number, select.EPOLLIN)
        connection.sendall(next(requests))
    while left:
        for number, _ in waiting.poll():
            answer = by_number[number].recv(65536)
            if not answer.startswith(b"HTTP/1.1 201 "):
                raise RuntimeError(f"Azurite answered {answer[:100]!r}")
            left -= 1
            if (request := next(requests, None)) is not None:
                by_number[number].sendall(request)


def main() -> None:
    """Measure both Azurites and print their rates."""
    print(machine(("azure-storage-queue", "azure-core")))
    found: dict[str, list[float]] = {"files": [], "memory": []}
    with tempfile.TemporaryDirectory(prefix="aztask-bench-") as name, ExitStack() as stack:
        benches = {}
        for place in found:
            folder = Path(name) / place
            server = stack.enter_context(
                azurite.running(folder, movable=False, in_memory=place == "memory")
            )
            benches[place] = Bench(
                folder / "near",
                server.endpoint,
                server.connection_string,
                azurite.ACCOUNT,
                azurite.KEY,
            )
        for number in range(WARMINGS + ROUNDS):
            for place, bench in benches.items():
                bench.fresh("default")
                rate = ceiling(bench, 400)
                if number >= WARMINGS:
                    found[place].append(rate)
    for place, rates in found.items():
        print(f"  composed sends/s, Azurite's data in {place:<8} {spread(rates)}")


if __name__ == "__main__":
    main()
