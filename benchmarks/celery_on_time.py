"""How late Celery starts tasks with an eta, and retries, on aztask's transport.

Usage: python benchmarks/celery_on_time.py [--check] [--brokers local,servicebus,storagequeue]

One worker with four slots, prefork and threads, on each broker: a local file, the emulator and
Azurite. 40 tasks with an eta and 40 that retry once with an eta fall due within ten seconds, so a
slot is always free. A task marks the time of its first line. None may start early, and 95 % must
start within 100 ms.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests"), str(HERE.parent)]

import azurite  # noqa: E402
from celery_workers import Way, Workers  # noqa: E402
from common import Check, conclude, machine, percentile  # noqa: E402
from compare_round import emulator  # noqa: E402

BROKERS = ("local", "servicebus", "storagequeue")
POOLS = ("prefork", "threads")
KINDS = ("eta", "retry")
WARM, TASKS = 32, 40
FIRST, LAST = 3.0, 13.0
PATIENCE = 60.0


@contextmanager
def address_of(broker: str, folder: Path) -> Iterator[str]:
    """The address of a running broker."""
    if broker == "servicebus":
        with emulator() as address:
            yield address
    elif broker == "storagequeue":
        with azurite.running(folder / "azurite", movable=False) as server:
            yield server.connection_string
    else:
        yield f"local://{folder}/queues.db"


def lateness(address: str, pool: str, folder: Path) -> dict[str, list[float]]:
    """Milliseconds from the time of each task to its start, for each kind of task."""
    way = Way(pool, ("-P", pool, "-c", "4"), 1, 4)
    workers = Workers("celery_aztask_app", way, folder, {"AZTASK_BROKER": address})
    workers.start()
    try:
        # Warm: each pool process has opened its own connection, which takes a second on Azure.
        workers.run(f"m.timed('warm', 0.5, 1.5, {WARM})")
        workers.await_marks("warm-", 2 * WARM, PATIENCE)
        workers.run(f"m.timed('timed', {FIRST}, {LAST}, {TASKS})")
        return {
            kind: [
                1000 * (at - float(key.partition(":")[2]))
                for key, at in workers.await_marks(f"timed-{kind}", TASKS, PATIENCE).items()
            ]
            for kind in KINDS
        }
    finally:
        workers.close()


def main() -> None:
    """Measure, print the figures, and check them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--brokers", default=",".join(BROKERS))
    asked = parser.parse_args()
    print("benchmark: Celery tasks with an eta on aztask's transport, one worker with four slots")
    print(machine(("celery", "kombu", "azure-servicebus", "azure-storage-queue")))
    print("command: python benchmarks/celery_on_time.py; milliseconds late\n")
    print(f"  {'':<34} {'earliest':>9} {'p50':>9} {'p95':>9} {'latest':>9}")
    checks = []
    for broker in asked.brokers.split(","):
        for pool in POOLS:
            with tempfile.TemporaryDirectory(prefix="aztask-on-time-") as name:
                folder = Path(name)
                with address_of(broker, folder) as address:
                    found = lateness(address, pool, folder)
            for kind, late in found.items():
                row = f"{broker}, {pool}, {kind}"
                middle, most = percentile(late, 0.5), percentile(late, 0.95)
                print(
                    f"  {row:<34} {min(late):>9.1f} {middle:>9.1f} {most:>9.1f} {max(late):>9.1f}",
                    flush=True,
                )
                checks.append(Check(f"{row}: earliest", min(late), 0.0, "ms late"))
                checks.append(Check(f"{row}: p95", most, 100.0, "ms late", at_least=False))
    conclude(checks)


if __name__ == "__main__":
    main()
