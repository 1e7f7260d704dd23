"""The cost of an event: `emit` and `flush` of a worker's typical mix, compared with json.dumps.

Run ``python benchmarks/events.py``. Figures are medians of interleaved rounds, without checks.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable

from aztask.stores.events.sink import Event, FileEventSink

TURNS, TASKS_PER_TURN, ROUNDS = 200, 32, 7


def hand_written(directory: str) -> float:
    """Seconds per event through the file sink: construction, emit and its share of the flush."""
    sink = FileEventSink(directory, "worker-1@machine:4711")
    begun = time.perf_counter()
    for turn in range(TURNS):
        for task in range(TASKS_PER_TURN):
            task_id = f"6f1d7c52-9f6e-4c52-8d0e-{turn:06d}{task:06d}"
            sink.emit(Event("received", task_id, "shop.resize", "default", 1, lease_seconds=60.0))
            sink.emit(Event("started", task_id, "shop.resize", "default", 1, wait_seconds=0.0123))
            sink.emit(
                Event(
                    "succeeded",
                    task_id,
                    "shop.resize",
                    "default",
                    1,
                    duration_seconds=0.123456,
                    lease_seconds=60.0,
                    margin_seconds=59.8,
                )
            )
        sink.flush()
    spent = time.perf_counter() - begun
    sink.close()
    return spent / (TURNS * TASKS_PER_TURN * 3)


def dumped(directory: str) -> float:
    """Seconds per event with dicts and json.dumps, written once per turn."""
    begun = time.perf_counter()
    with tempfile.TemporaryFile(dir=directory) as stream:
        for turn in range(TURNS):
            lines = []
            for task in range(TASKS_PER_TURN * 3):
                record = {
                    "id": f"x-{turn}-{task}",
                    "v": 1,
                    "event": "succeeded",
                    "ts": time.time(),
                    "task_id": f"6f1d7c52-9f6e-4c52-8d0e-{turn:06d}{task:06d}",
                    "task": "shop.resize",
                    "queue": "default",
                    "worker": "worker-1@machine:4711",
                    "delivery_count": 1,
                    "resubmit_count": 0,
                    "duration_seconds": 0.123456,
                    "lease_seconds": 60.0,
                }
                lines.append(json.dumps(record))
            stream.write("\n".join(lines).encode())
    return (time.perf_counter() - begun) / (TURNS * TASKS_PER_TURN * 3)


def main() -> None:
    """Measure in interleaved rounds, and print microseconds per event."""
    ways: dict[str, Callable[[str], float]] = {"FileEventSink": hand_written, "json.dumps": dumped}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            with tempfile.TemporaryDirectory() as directory:
                times[name].append(way(directory))
    for name, values in times.items():
        print(f"{name:15} {statistics.median(values) * 1e6:6.2f} us per event")


if __name__ == "__main__":
    main()
