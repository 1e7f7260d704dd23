"""Waits until no worker runs a task of some queues, tasks and tenants: ``aztask control drain``."""

from __future__ import annotations

import time
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Final

from aztask.app import App
from aztask.errors import ConfigurationError, NotFound, did_you_mean
from aztask.limits.control import Scope
from aztask.limits.declaration import Limit
from aztask.limits.holders import usage_of
from aztask.stores.records.base import SILENT_SECONDS, ResultStore, WorkerRecord
from aztask.stores.records.controls import ControlStore, controls_of
from aztask.support.display import printable, visible

OBEYED_SECONDS: Final = 5.0
"""A heartbeat that is this much younger than the pause was written by a worker that obeys it."""

LOOK_SECONDS: Final = 1.0
NAMED: Final = 3


def keyed_limit(app: App, tenant: str) -> tuple[Limit, str]:
    """(limit, key) of ``LIMIT=KEY``. Raises NotFound for a limit that the app does not declare."""
    name, _, key = tenant.partition("=")
    known = [each.name for each in app.limits.values() if each.key is not None]
    if name not in known:
        hint = did_you_mean(name, known)
        raise NotFound(
            f"the app declares no limit {printable(name, 60)} with a key.{hint} See: aztask limits"
        )
    return app.limits[name], key


def permits_of(app: App, tenant: str) -> HeldPermits:
    """The permits of ``LIMIT=KEY``. Raises NotFound, ConfigurationError without a concurrency."""
    limit, key = keyed_limit(app, tenant)
    store = controls_of(app.results)
    if limit.concurrency is None or store is None:
        raise ConfigurationError(
            f"limit {limit.name!r} has no concurrency, so nothing shows what its keys run: pause "
            "the tenant instead, and see aztask running"
        )
    return HeldPermits(store, limit, key)


@dataclass(frozen=True, slots=True)
class HeldPermits:
    """The permits of one key of a limit, which show what runs."""

    store: ControlStore
    limit: Limit
    key: str

    def held(self) -> str:
        """The workers that hold some, "" for none. Raises BrokerUnavailable."""
        used = usage_of(self.store, self.limit, self.key).held or {}
        workers = ", ".join(f"{visible(name)} ({count})" for name, count in sorted(used.items()))
        return f"key {visible(self.key)} of limit {self.limit.name} on {workers}" if used else ""


def wait_until_idle(
    store: ResultStore,
    names: Set[tuple[Scope, str]],
    timeout: float,
    permits: Sequence[HeldPermits] = (),
) -> str:
    """Wait for at most `timeout` seconds; returns what still runs then, "" if nothing does.

    permits: those of tenants.

    Only the workers' own clocks are compared with each other: each one's heartbeat with the one
    that was found first.
    """
    looked_at = time.monotonic()
    give_up_at = looked_at + timeout
    first: dict[str, tuple[float, float]] = {}
    while True:
        left, workers, before = [], store.workers(), looked_at
        looked_at = time.monotonic()
        if looked_at - before > SILENT_SECONDS / 2:
            # The store did not answer, and took no heartbeats either, perhaps.
            first = {name: (seen_at, looked_at) for name, (seen_at, _) in first.items()}
        for worker in workers:
            if worker.damage or worker.stopped:
                continue
            seen_at, found_at = first.setdefault(worker.name, (worker.seen_at, time.monotonic()))
            if worker.seen_at == seen_at and time.monotonic() - found_at > SILENT_SECONDS:
                continue  # it is silent
            if worker.seen_at < seen_at + OBEYED_SECONDS:
                left.append(f"worker {visible(worker.name)}, whose heartbeat is awaited")
            elif running := _running(worker, names):
                left.append(running)
        left += [held for each in permits if (held := each.held())]
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
