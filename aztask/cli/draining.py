"""Waits until no worker runs a task of some queues and tasks, for ``aztask control drain``."""

from __future__ import annotations

import time
from collections.abc import Set
from typing import Final

from aztask.limits.control import Scope
from aztask.results.base import SILENT_SECONDS, ResultStore, WorkerRecord
from aztask.support.display import visible

OBEYED_SECONDS: Final = 5.0
"""A heartbeat that is this much younger than the pause was written by a worker that obeys it."""

LOOK_SECONDS: Final = 1.0
NAMED: Final = 3


def wait_until_idle(store: ResultStore, names: Set[tuple[Scope, str]], timeout: float) -> str:
    """Wait for at most `timeout` seconds; returns what still runs then, "" if nothing does.

    Only the workers' own clocks are compared with each other: each one's heartbeat with the one
    that was found first.
    """
    give_up_at = time.monotonic() + timeout
    first: dict[str, tuple[float, float]] = {}
    while True:
        left = []
        for worker in store.workers():
            if worker.damage or worker.stopped:
                continue
            seen_at, found_at = first.setdefault(worker.name, (worker.seen_at, time.monotonic()))
            if worker.seen_at == seen_at and time.monotonic() - found_at > SILENT_SECONDS:
                continue  # it is silent
            if worker.seen_at < seen_at + OBEYED_SECONDS:
                left.append(f"worker {visible(worker.name)}, whose heartbeat is awaited")
            elif running := _running(worker, names):
                left.append(running)
        if not left or time.monotonic() >= give_up_at:
            more = f" and {len(left) - NAMED} more" if len(left) > NAMED else ""
            return "; ".join(left[:NAMED]) + more
        time.sleep(min(LOOK_SECONDS, max(0.0, give_up_at - time.monotonic())))


def _running(worker: WorkerRecord, names: Set[tuple[Scope, str]]) -> str:
    """What the worker runs of these; "" for nothing. Only its longest tasks are known by name."""
    found = [
        each
        for each in worker.tasks
        if (Scope.TASK, each.task) in names or (Scope.QUEUE, each.queue) in names
    ]
    if found:
        return f"task {visible(found[0].task)} {visible(found[0].task_id)} on {worker.name}"
    if worker.running > len(worker.tasks):
        return f"{worker.running - len(worker.tasks)} unnamed tasks on {worker.name}"
    return ""
