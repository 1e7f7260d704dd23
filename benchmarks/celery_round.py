"""Rounds of `compare.py` with Celery's workers on the transport of the tree on ``PYTHONPATH``.

The ways to run Celery are prefork and solo, as in `celery_transports.py`. Workers run and
are warm; they are stopped with SIGSTOP while it is the other tree's turn, and while the queue is
filled with no-ops. A rate counts from SIGCONT until the queue is empty, and its CPU time is that of
all processes of the workers. What an idle prefork worker uses is measured before that, in
microseconds per second.

Both trees use one Azurite or one emulator, which `compare.py` runs: ``COMPARE_BROKER``, and
``COMPARE_DELAYED`` for a proxy that delays each answer by 5 ms.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
import time
from pathlib import Path

from celery_workers import WAYS as ALL
from celery_workers import Way, Workers
from common import family, processor_seconds, take_turn

from aztask import App

WAYS = ALL[:2]  # eight solo workers do what one does
MODULE, QUEUE = "celery_aztask_app", os.environ.get("COMPARE_QUEUE", "celery-bench")
PATIENCE, SETTLING, IDLE = 120.0, 2.0, 4.0
LOCAL_TASKS, BUS_TASKS = 1_000, 500
STORAGE_TASKS = 900
"""So many that a slice has thirty receives, each of which has Azurite scan the queue."""
SLICES = 5
ONLY = os.environ.get("COMPARE_ONLY", "")
"""The name of a figure has this in it; else it is not measured."""


class Site:
    """The queue of one service, and what is measured of it."""

    def __init__(self, address: str, folder: Path) -> None:
        """folder: for the workers' logs and marks."""
        scheme, _, path = address.partition("://")
        self._file = Path(path) if scheme == "local" else None
        os.environ["AZTASK_BROKER"] = address
        sys.path.append(str(Path(__file__).parent / "peers"))
        self._app = App("compare", broker=address)
        self._tasks = importlib.import_module(MODULE)
        self._folder = folder
        self.figures: dict[str, list[float]] = {}

    def depth(self) -> int:
        """How many messages the queue has."""
        return self._app.broker.stats(QUEUE).living

    def measure(self, name: str, way: Way, count: int, address: str, *, idle: bool = False) -> None:
        """Measure slices of `count` no-ops, and before that what the workers use while idle.

        * `name`: distinguishes the figures; "" if there is one address.
        * `address`: what the workers use.
        """
        resting, rate = f"{name}idle, {way.name} (CPU)", f"{name}{way.name}: tasks/s"
        idle = idle and ONLY in resting
        if not idle and ONLY not in rate:
            return
        take_turn()
        self._app.broker.declare(QUEUE)
        self._app.broker.purge(QUEUE)
        environment = {"AZTASK_BROKER": address}
        workers = Workers(MODULE, way, self._folder, environment, os.environ["PYTHONPATH"])
        try:
            workers.start()
            self._tasks.send(4 * way.slots)
            self.emptied()
            if idle:
                time.sleep(SETTLING)
                for _ in range(SLICES):
                    began, used = time.perf_counter(), -spent(workers)
                    time.sleep(IDLE)
                    used += spent(workers)
                    self._add(resting, 1e6 * used, began)
            for _ in range(SLICES if ONLY in rate else 0):
                with workers.frozen(self._file):
                    take_turn()
                    self._tasks.send(count)
                    began, used = time.perf_counter(), -spent(workers)
                self.emptied()
                self._add(rate, count, began)
                used += spent(workers)
                self._add(f"{rate} (CPU)", 1e6 * used / count)
        finally:
            workers.close()

    def _add(self, name: str, value: float, began: float | None = None) -> None:
        """Record `value`, or what it is for each second since `began`."""
        seconds = 1.0 if began is None else time.perf_counter() - began
        self.figures.setdefault(name, []).append(value / seconds)

    def emptied(self) -> None:
        """Wait until the queue is empty. Raises TimeoutError."""
        give_up_at = time.monotonic() + PATIENCE
        while left := self.depth():
            if time.monotonic() > give_up_at:
                raise TimeoutError(f"{left} messages are left after {PATIENCE:g} s")
            time.sleep(min(0.05, 0.01 + left / 4000))


def spent(workers: Workers) -> float:
    """CPU seconds of all processes of the workers."""
    return sum(processor_seconds(pid) for each in workers.processes for pid in family(each.pid))


def celery_local() -> dict[str, list[float]]:
    """Measure the embedded queue."""
    with tempfile.TemporaryDirectory(prefix="aztask-compare-") as folder:
        address = f"local://{folder}/queues.db"
        site = Site(address, Path(folder))
        for way in WAYS:
            site.measure("", way, LOCAL_TASKS, address, idle=way is WAYS[0])
        return site.figures


def celery_servicebus() -> dict[str, list[float]]:
    """Measure Service Bus, directly and through the proxy."""
    direct, delayed = os.environ["COMPARE_BROKER"], os.environ["COMPARE_DELAYED"]
    with tempfile.TemporaryDirectory(prefix="aztask-compare-") as folder:
        site = Site(direct, Path(folder))
        for way in WAYS:
            site.measure("0 ms, ", way, BUS_TASKS, direct, idle=way is WAYS[0])
            site.measure("5 ms, ", way, BUS_TASKS, delayed)
        return site.figures


def celery_storagequeue() -> dict[str, list[float]]:
    """Measure a Storage queue."""
    address = os.environ["COMPARE_BROKER"]
    with tempfile.TemporaryDirectory(prefix="aztask-compare-") as folder:
        site = Site(address, Path(folder))
        for way in WAYS:
            site.measure("", way, STORAGE_TASKS, address, idle=way is WAYS[0])
        return site.figures
