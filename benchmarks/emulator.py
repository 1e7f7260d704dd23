"""The emulator's speed with the real SDK: ``python benchmarks/emulator.py [--check]``.

Messages have 200 bytes. One sync client sends and receives unless stated otherwise. The emulator
runs in its own process on this machine. "server CPU" is that process's user and system time; if it
is busy for less than half of the time, the client limits the rates. ``--check`` compares the
figures with the targets and exits 1 if one is missed. Timings of a busy machine are noisy, so each
figure is the best of ``--repeat`` runs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from azure.servicebus import ServiceBusClient, ServiceBusMessage, ServiceBusReceiver
from common import processor_seconds

BODY = b"x" * 200
BATCH = 100
QUEUE = "bench"
ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Process:
    """A running emulator and its connection string."""

    process: subprocess.Popen[str]
    connection_string: str
    ready_seconds: float

    def cpu(self) -> float:
        """CPU seconds that the emulator has used so far."""
        return processor_seconds(self.process.pid)


@contextmanager
def running(*arguments: str) -> Iterator[Process]:
    """Run an emulator in its own process, with these arguments."""
    started = time.perf_counter()
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "aztask", "emulator", "--port", "0", "--admin-port", "0"),
            *("--json", "--queue", QUEUE, *arguments),
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        seconds = time.perf_counter() - started
        drain = threading.Thread(target=process.stdout.read, daemon=True)
        drain.start()
        yield Process(process, ready["connection_string"], seconds)
    finally:
        process.terminate()
        process.wait()


@contextmanager
def connected(emulator: Process) -> Iterator[ServiceBusClient]:
    """Yield a client that is connected to the emulator."""
    with ServiceBusClient.from_connection_string(
        emulator.connection_string, retry_total=0
    ) as client:
        yield client


def timed(action: Callable[[], object]) -> float:
    """Seconds that `action` took."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def send_batches(client: ServiceBusClient, count: int) -> float:
    """Send `count` messages in batches; returns seconds, without opening the link."""
    messages = [ServiceBusMessage(BODY) for _ in range(BATCH)]
    with client.get_queue_sender(QUEUE) as sender:
        sender.send_messages(messages[0])
        return timed(lambda: [sender.send_messages(messages) for _ in range(count // BATCH)])


def receive_and_complete(client: ServiceBusClient, count: int) -> float:
    """Receive 100 at a time, complete each; returns seconds, without opening the link."""
    with client.get_queue_receiver(QUEUE) as receiver:
        _complete(receiver, 1)
        return timed(lambda: _complete(receiver, count))


def _complete(receiver: ServiceBusReceiver, count: int) -> None:
    done = 0
    while done < count:
        for message in receiver.receive_messages(min(BATCH, count - done), max_wait_time=5):
            receiver.complete_message(message)
            done += 1


@dataclass
class Round:
    """One round of send, receive and complete. Rates are messages per second, cpu is microseconds.

    sending, completing: the part of that time in which the server was busy.
    """

    sends: float
    completions: float
    cpu: float
    sending: float
    completing: float


def round_of(count: int, *arguments: str) -> Round:
    """Send `count`, receive and complete them all."""
    with running(*arguments) as emulator, connected(emulator) as client:
        before = emulator.cpu()
        sending = send_batches(client, count)
        between = emulator.cpu()
        receiving = receive_and_complete(client, count)
        after = emulator.cpu()
        return Round(
            sends=count / sending,
            completions=count / receiving,
            cpu=(after - before) / count * 1e6,
            sending=(between - before) / sending,
            completing=(after - between) / receiving,
        )


def connections(count: int) -> tuple[int, float]:
    """(how many of `count` senders at a time could send, seconds it took)."""
    sent = []
    barrier = threading.Barrier(count)

    def one(client: ServiceBusClient) -> None:
        with client.get_queue_sender(QUEUE) as sender:
            barrier.wait(120)
            sender.send_messages(ServiceBusMessage(BODY))
            sent.append(1)
            barrier.wait(120)

    with running() as emulator, connected(emulator) as client:
        threads = [threading.Thread(target=one, args=(client,)) for _ in range(count)]
        seconds = timed(lambda: ([t.start() for t in threads], [t.join() for t in threads]))
    return len(sent), seconds


def depth(total: int, sample: int) -> tuple[float, float]:
    """Server CPU per message on an almost empty queue, and with `total` messages in it."""
    with running() as emulator, connected(emulator) as client:

        def cost() -> float:
            before = emulator.cpu()
            send_batches(client, sample)
            receive_and_complete(client, sample)
            return (emulator.cpu() - before) / sample * 1e6

        shallow = cost()
        messages = [ServiceBusMessage(b"x" * 200) for _ in range(1000)]
        with client.get_queue_sender(QUEUE) as sender:
            for _ in range(total // len(messages)):
                sender.send_messages(messages)
        return shallow, cost()


def best(rounds: list[Round]) -> Round:
    """The best value of each figure over all rounds."""
    return Round(
        max(one.sends for one in rounds),
        max(one.completions for one in rounds),
        min(one.cpu for one in rounds),
        min(one.sending for one in rounds),
        min(one.completing for one in rounds),
    )


def measure(arguments: argparse.Namespace) -> list[tuple[str, float, str, float, bool]]:
    """(name, measured, unit, target, whether more is better) for every figure."""
    count, repeat = arguments.messages, arguments.repeat
    memory = best([round_of(count) for _ in range(repeat)])
    with tempfile.TemporaryDirectory() as directory:
        durable = best(
            [round_of(count, "--data", f"{directory}/{index}.db") for index in range(repeat)]
        )
    ready = []
    for _ in range(3):
        with running() as emulator:
            ready.append(emulator.ready_seconds)
    sent, _ = connections(200)
    shallow, deep = depth(arguments.depth, count // 2)
    return [
        ("batched sends, in memory", memory.sends, "messages/s", 0, True),
        ("receive(100) + complete each, in memory", memory.completions, "messages/s", 0, True),
        ("server CPU per message, in memory", memory.cpu, "us", 80, False),
        ("server busy while one client sends", memory.sending, "of the time", 0.5, False),
        ("server busy while it completes", memory.completing, "of the time", 0.5, False),
        ("batched sends, --data", durable.sends, "messages/s", 0, True),
        ("receive(100) + complete each, --data", durable.completions, "messages/s", 0, True),
        ("server CPU per message, --data", durable.cpu, "us", 95, False),
        ("start to ready", min(ready), "s", 0.25, False),
        ("connections that sent, of 200 at once", sent, "", 200, True),
        ("server CPU per message, empty queue", shallow, "us", 0, True),
        (f"server CPU per message, {arguments.depth:,} deep", deep, "us", shallow * 1.5, False),
    ]


def main() -> int:
    """Measure, print the figures, and return 1 with ``--check`` if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit 1 if a target is missed")
    parser.add_argument("--messages", type=int, default=20_000)
    parser.add_argument("--depth", type=int, default=1_000_000)
    parser.add_argument("--repeat", type=int, default=3)
    arguments = parser.parse_args()
    print(f"Python {platform.python_version()}, {os.cpu_count()} cores, {arguments.messages:,}")
    print(f"messages of {len(BODY)} bytes a round, best of {arguments.repeat}")
    print()
    missed = 0
    for what, value, unit, target, more in measure(arguments):
        good = not target or (value >= target if more else value <= target)
        missed += not good
        limit = f"target {'>=' if more else '<='} {target:,.4g}" if target else ""
        verdict = "" if not target else "ok" if good else "MISSED"
        print(f"{what:44} {value:>12,.4g} {unit:11} {limit:18} {verdict}".rstrip())
    return 1 if arguments.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
