"""What an idle Celery prefork worker costs on each address, beside an earlier tree.

Usage: python benchmarks/celery_idle.py BASE [--check] [> docs/benchmarks/celery-idle.txt]

BASE is as in `compare.py`. The workers of both trees run at the same time, on one empty queue of
each service, and every window measures all of them: whatever else the machine does, it does to
both. CPU time is that of all processes of a worker, and the emulator's and Azurite's is not in it.
A figure holds if the 95 % interval of its ratio (as in `compare.py`) reaches down to 1 or below.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from celery_round import MODULE, QUEUE, WAYS, spent
from celery_workers import Workers
from common import Check, conclude, machine, spread
from compare import TREE, Ratio, azurite, emulator, tree_of

from aztask import App

WINDOWS = int(os.environ.get("BENCH_WINDOWS", "25"))
WINDOW, SETTLING = 4.0, 5.0
ADDRESSES = ("local", "Service Bus", "Storage queue")
NEW, OLD = "new", "old"


@contextmanager
def served(address: str, folder: Path) -> Iterator[dict[str, str]]:
    """The environment of the workers on a new queue of this service."""
    with ExitStack() as stack:
        found = {"COMPARE_BROKER": f"local://{folder}/queues.db"}
        if address != "local":
            server = emulator() if address == "Service Bus" else azurite(folder)
            found = stack.enter_context(server)
        found["AZTASK_BROKER"] = found["COMPARE_BROKER"]
        app = App("compare", broker=found["AZTASK_BROKER"])
        app.broker.declare(QUEUE)
        app.close()
        yield found


def measured(workers: dict[tuple[str, str], Workers]) -> dict[tuple[str, str], list[float]]:
    """Per cent of a core that each worker uses, window by window."""
    figures: dict[tuple[str, str], list[float]] = defaultdict(list)
    used = {key: spent(each) for key, each in workers.items()}
    began = time.perf_counter()
    for _ in range(WINDOWS):
        time.sleep(WINDOW)
        now = {key: spent(each) for key, each in workers.items()}
        ended = time.perf_counter()
        for key in workers:
            figures[key].append(100 * (now[key] - used[key]) / (ended - began))
        used, began = now, ended
    return figures


def main(base: str) -> None:
    """Measure all windows, print the figures, and check them."""
    print(f"benchmark: an idle Celery worker, prefork -c 8: this tree beside {base}")
    print(machine(("celery", "kombu", "azure-servicebus", "azure-storage-queue")))
    print(f"command: python benchmarks/celery_idle.py BASE; {WINDOWS} windows of {WINDOW:g} s\n")
    workers: dict[tuple[str, str], Workers] = {}
    with ExitStack() as stack:
        name = stack.enter_context(tempfile.TemporaryDirectory(prefix="aztask-celery-idle-"))
        old = stack.enter_context(tree_of(base))
        for address in ADDRESSES:
            folder = Path(name) / address.replace(" ", "")
            folder.mkdir()
            environment = stack.enter_context(served(address, folder))
            for side, tree in ((NEW, TREE), (OLD, old)):
                (folder / side).mkdir()
                found = Workers(MODULE, WAYS[0], folder / side, environment, str(tree))
                stack.callback(found.close)
                found.start()
                workers[address, side] = found
        time.sleep(SETTLING)
        figures = measured(workers)
    checks = []
    for address in ADDRESSES:
        new, old_figures = figures[address, NEW], figures[address, OLD]
        ratio = Ratio.of([[each] for each in new], [[each] for each in old_figures])
        print(f"  {address}, new: % of a core     {spread(new)}")
        print(f"  {address}, old: % of a core     {spread(old_figures)}")
        print(f"  {address}: new/old              {ratio.middle:.3f} "
              f"({ratio.low:.3f} to {ratio.high:.3f})")  # fmt: skip
        checks.append(Check(f"{address}: low end of new/old", ratio.low, 1, "x", at_least=False))
    conclude(checks)


if __name__ == "__main__":
    main(sys.argv[1])
