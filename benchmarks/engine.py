"""The cost of the embedded engine per message. Usage: python benchmarks/engine.py [full]

It sends, receives and completes 200-byte messages: one at a time and in batches of 100, with 1 and
with 100,000 waiting messages, on the engine alone and through the local broker with its envelopes.
Figures are medians of interleaved rounds, in microseconds per message. With ``full`` every commit
is synced.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from common import machine, percentile, spread

from aztask.message.envelope import Envelope
from aztask.queues.engine import Database, Durability, Engine, NewMessage
from aztask.queues.local.broker import LocalBroker
from aztask.settlement import Complete

ROUNDS = 5
SINGLE = 1_000
BATCHES = 40
BATCH = 100
DEPTHS = (1, 100_000)
QUEUE = "bench"
PAYLOAD = b"x" * 200


def microseconds(
    steps: Callable[[], Iterator[Callable[[], object]]], times: int, size: int
) -> list[float]:
    """The median cost of each step per message, in the order of the steps."""
    costs: list[list[float]] = []
    for _ in range(times):
        for index, step in enumerate(steps()):
            begun = time.perf_counter()
            step()
            spent = time.perf_counter() - begun
            if index == len(costs):
                costs.append([])
            costs[index].append(spent / size * 1e6)
    return [percentile(cost, 0.5) for cost in costs]


def engine_steps(engine: Engine, size: int) -> Iterator[Callable[[], object]]:
    """Send, receive and complete `size` messages with the engine alone."""
    messages = [NewMessage(PAYLOAD, f"{number}") for number in range(size)]
    received = []
    yield lambda: engine.send(QUEUE, messages)
    yield lambda: received.extend(engine.receive(QUEUE, size, 60.0))
    leases = [(message.seq, message.token) for message in received]
    yield lambda: engine.complete(QUEUE, leases)


def broker_steps(broker: LocalBroker, size: int) -> Iterator[Callable[[], object]]:
    """As `engine_steps`, with envelopes through the local broker."""
    headers = {"task": "shop.resize", "id": "0" * 36, "retries": 0}
    envelopes = [Envelope(PAYLOAD, headers, f"{number}") for number in range(size)]
    receiver = broker.receiver(QUEUE, lease=60.0)
    deliveries = []
    yield lambda: broker.send(QUEUE, envelopes)
    yield lambda: deliveries.extend(receiver.receive(size, 0.0))
    pairs = [(delivery, Complete()) for delivery in deliveries]
    yield lambda: receiver.settle(pairs)


@contextmanager
def filled(depth: int, durability: Durability) -> Iterator[Database]:
    """A database whose queue holds `depth` messages at all times."""
    with tempfile.TemporaryDirectory() as directory:
        database = Database(f"{directory}/queues.db", durability=durability)
        engine = Engine(database)
        engine.create_queue(QUEUE)
        engine.send(QUEUE, [NewMessage(PAYLOAD)] * (depth - 1))
        yield database
        database.close()


def main() -> None:
    """Measure all rounds and print the figures."""
    durability: Durability = "full" if "full" in sys.argv[1:] else "process"
    print(machine(("msgpack",)))
    print(f"durability: {durability}; file, {len(PAYLOAD)}-byte payloads; us per message")
    print(f"{'':<42} {'send':>6} {'receive':>8} {'complete':>9}   sum of the three")
    for depth in DEPTHS:
        with filled(depth, durability) as database:
            engine, broker = Engine(database), LocalBroker(database)
            cases = {
                "engine, one by one": (lambda e=engine: engine_steps(e, 1), SINGLE, 1),
                f"engine, batches of {BATCH}": (
                    lambda e=engine: engine_steps(e, BATCH),
                    BATCHES,
                    BATCH,
                ),
                "broker, one by one": (lambda b=broker: broker_steps(b, 1), SINGLE, 1),
                f"broker, batches of {BATCH}": (
                    lambda b=broker: broker_steps(b, BATCH),
                    BATCHES,
                    BATCH,
                ),
            }
            runs: dict[str, list[list[float]]] = {name: [] for name in cases}
            for _ in range(ROUNDS):
                for name, (steps, times, size) in cases.items():
                    runs[name].append(microseconds(steps, times, size))
            for name, costs in runs.items():
                send, receive, complete = (
                    percentile(step, 0.5) for step in zip(*costs, strict=True)
                )
                label = f"depth {depth:,}, {name}"
                total = spread([sum(cost) for cost in costs])
                print(f"{label:<42} {send:>6.1f} {receive:>8.1f} {complete:>9.1f}   {total}")


if __name__ == "__main__":
    main()
