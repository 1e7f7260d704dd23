"""Periodic chores of a worker: heartbeats, cancelled runs, old rows and events, workflows."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from aztask.brokers.base import QueueStats
from aztask.errors import AztaskError, QueueNotFound
from aztask.events.retention import remove_old
from aztask.limits.rates import ENTRY_PREFIX, ENTRY_SECONDS
from aztask.payloads.ageing import remove_ended
from aztask.results.base import ResultStore, WorkerRecord
from aztask.results.controls import controls_of
from aztask.results.schedules import schedules_of
from aztask.results.uniques import uniques_of
from aztask.results.workflows import workflows_of
from aztask.uniqueness.rules import QUIET
from aztask.worker.lane import Lane
from aztask.worker.pipeline.uniquekeys import unique_engine
from aztask.worker.runtime import WorkerRuntime
from aztask.worker.upkeep.deadwatch import DeadWatch
from aztask.worker.upkeep.scheduling import Scheduling
from aztask.workflows.repair import Repair
from aztask.workflows.starting import Starter

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 5.0
PURGE_SECONDS = 60.0
PURGE_AGAIN_SECONDS = 5.0
EVENTS_SECONDS = 3600.0
PAYLOAD_SECONDS = 3600.0
PURGED_MANY = 1000
"""After a purge of this many records more may be left, since some stores stop after some seconds:
the next purge comes sooner."""

DRAINED_SECONDS = 0.1
DEAD_SECONDS = 15.0
GRAPH_SECONDS = 5.0
REMOTE_GRAPH_SECONDS = 30.0
IDLE_GRAPH_SECONDS = 60.0
"""Seconds between two looks at open workflows; the last one if the store is remote and there are
none, since every look costs requests."""


QUIET_SECONDS = 1.0
REMOTE_QUIET_SECONDS = 5.0
"""Seconds between two looks at debounced tasks whose quiet time may be over."""


class Housekeeping:
    """Does the chores on a thread of its own, so that none of them delays the supervisor."""

    def __init__(self, runtime: WorkerRuntime) -> None:
        app, clock, mailbox = runtime.app, runtime.clock, runtime.mailbox
        self._dead = DeadWatch(
            app,
            runtime.options.queues,
            clock,
            lambda *found: mailbox.post(lambda: runtime.journal.buried(*found)),
        )
        self._queues = runtime.options.queues
        self._dead_at = 0.0
        self._graphs_at = 0.0
        self._repair: Repair | None = None
        self._app = app
        self._clock = clock
        self._mailbox = mailbox
        self._lane: Lane[Callable[[], object]] = Lane(
            "chores", self._run, lambda chores: None, mailbox, threads=1
        )
        self._heartbeat_at = 0.0
        # At random within the first minute: workers that live for a few seconds purge, too, in
        # proportion to the time that they live, and those that start together take turns.
        self._purge_at = clock.monotonic() + random.uniform(0.0, PURGE_SECONDS)  # noqa: S311  # no secret
        self._events_at = self._payloads_at = self._purge_at
        self._look_at = 0.0
        self._unique_at = 0.0
        self._scheduling = (
            Scheduling(self._app, runtime.name) if runtime.options.schedules else None
        )

    def start(self) -> None:
        """Begin to make occurrences if the app declares schedules."""
        if self._scheduling is not None and self._app.schedules.declared:
            self._scheduling.start()

    def tick(
        self,
        now: float,
        record: Callable[[], WorkerRecord],
        running: Callable[[], Sequence[str]],
        stop: Callable[[Sequence[str]], None],
    ) -> None:
        """Start the chores that are due.

        record: makes the heartbeat. running: the ids of the running tasks. stop: gets the ids of
        those that have been cancelled.
        """
        if len(self._lane):
            return
        if now >= self._events_at and self._app.settings.events is not None:
            self._events_at = now + EVENTS_SECONDS
            self._lane.submit([self._remove_old_events])
        if now >= self._payloads_at and self._app.payloads is not None:
            self._payloads_at = now + PAYLOAD_SECONDS
            retention = self._app.settings.result_retention_seconds
            self._lane.submit([partial(remove_ended, self._app.payloads, retention)])
        results = self._app.results
        if results is None:
            return
        if now >= self._heartbeat_at:
            self._heartbeat_at = now + HEARTBEAT_SECONDS
            self.tell(record())
            if ids := running():
                self._lane.submit([partial(self._look_for_cancelled, results, ids, stop)])
        if now >= self._dead_at and self._dead.useful:
            self._dead_at = now + DEAD_SECONDS
            self._lane.submit([self._dead.look])
        if now >= self._graphs_at and workflows_of(results) is not None:
            self._graphs_at = now + (REMOTE_GRAPH_SECONDS if results.remote else GRAPH_SECONDS)
            self._lane.submit([partial(self._look_after_workflows, results)])
        if now >= self._unique_at and uniques_of(results) is not None:
            self._unique_at = now + (REMOTE_GRAPH_SECONDS if results.remote else GRAPH_SECONDS)
            self._lane.submit([partial(self._look_after_unique_tasks, results)])
        if now >= self._purge_at:
            self._purge_at = now + PURGE_SECONDS
            if self._scheduling is not None and schedules_of(results) is not None:
                self._lane.submit([self._scheduling.start_if_wanted])
            before = self._clock.wall() - self._app.settings.result_retention_seconds
            self._lane.submit([partial(self._purge, results, before)])

    def _remove_old_events(self) -> None:
        settings = self._app.settings
        remove_old(
            Path(settings.events or "."),
            self._clock.wall() - settings.events_retention_seconds,
            uploaded_only=settings.events_container is not None,
        )

    def _look_for_cancelled(
        self, results: ResultStore, ids: Sequence[str], stop: Callable[[Sequence[str]], None]
    ) -> None:
        if found := results.to_stop(ids):
            self._mailbox.post(lambda: stop(found))

    def _look_after_workflows(self, results: ResultStore) -> None:
        if self._repair is None:
            self._repair = self._new_repair()
        if not self._repair.look() and results.remote:
            self._graphs_at = self._clock.monotonic() + IDLE_GRAPH_SECONDS

    def _look_after_unique_tasks(self, results: ResultStore) -> None:
        engine = unique_engine(self._app)
        if engine is None:
            self._unique_at = math.inf  # no task of this app is unique
            return
        engine.repair()
        if any(task.unique and task.unique.until == QUIET for task in self._app.tasks.values()):
            pause = REMOTE_QUIET_SECONDS if results.remote else QUIET_SECONDS
            self._unique_at = min(self._unique_at, self._clock.monotonic() + pause)

    def _new_repair(self) -> Repair:
        app, engine = self._app, self._app.workflows.engine
        return Repair(
            engine,
            Starter(engine, app.broker, app.codec, self._clock),
            app.broker.stats,
            self._clock,
            at_most_once=lambda name: (
                name in app.tasks and app.tasks[name].delivery == "at-most-once"
            ),
        )

    def _purge(self, results: ResultStore, before: float) -> None:
        if self._repair is not None:
            self._repair.purge(before)
        controls = controls_of(results)
        if controls is not None and self._app.limits:
            controls.purge(ENTRY_PREFIX, controls.time().at - ENTRY_SECONDS)
        if results.purge(before) >= PURGED_MANY:
            self._purge_at = min(self._purge_at, self._clock.monotonic() + PURGE_AGAIN_SECONDS)

    def tell(self, record: WorkerRecord) -> None:
        """Write a heartbeat to the result store, if there is one."""
        results = self._app.results
        if results is not None:
            self._lane.submit([partial(results.heartbeat, record)])

    def drained(self) -> bool:
        """Whether the queues are empty, delayed messages included; a missing queue is, too."""
        now = self._clock.monotonic()
        if now < self._look_at:
            return False
        self._look_at = now + DRAINED_SECONDS
        try:
            stats = [self._stats(queue) for queue in self._queues]
        except AztaskError as error:
            logger.warning("cannot check that the queues are empty, retry follows: %s", error)
            return False
        return not any(each.active or each.leased or each.scheduled or each.total for each in stats)

    def _stats(self, queue: str) -> QueueStats:
        try:
            return self._app.broker.stats(queue)
        except QueueNotFound:
            return QueueStats(queue, active=0, leased=0, scheduled=0, deferred=0, dead=0)

    def stop(self) -> None:
        """Finish the pending chores and end the threads."""
        if self._scheduling is not None:
            self._scheduling.stop()
        self._lane.stop()

    def _run(self, chores: Sequence[Callable[[], object]]) -> None:
        for chore in chores:
            try:
                chore()
            except AztaskError as error:
                logger.warning("a periodic chore failed, it will be tried again: %s", error)
