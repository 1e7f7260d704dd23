"""The metrics of one worker, fed by its events and its status.

Rules
1. All label values are bounded: queues are those of the worker, for the others see
   `aztask.telemetry.labels`. The worker's name is a label of one series only.
2. Feeding costs a few dictionary look-ups for each event: the series of a queue and task are looked
   up once and kept.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Final, TypeAlias, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from aztask.events.event import Event
from aztask.hooks import WorkerStatus
from aztask.telemetry.labels import TaskLabels, cleaned
from aztask.telemetry.margins import share_left

Metric = TypeVar("Metric", Counter, Gauge, Histogram)
Listener: TypeAlias = Callable[[Event], None]

SECONDS: Final = (0.005, 0.025, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0)
SHARES: Final = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.75, 0.9)
OUTCOMES: Final = {
    "succeeded": "succeeded",
    "failed": "failed",
    "resubmitted": "retried",
    "snoozed": "snoozed",
    "cancelled": "cancelled",
    "expired": "expired",
}
MOST_SERIES: Final = 10_000
"""Looked-up series that are kept; their number is bounded by the app's tasks and queues."""


class WorkerMetrics:
    """Registers the metrics with `registry` and updates them. Any thread may collect."""

    def __init__(self, registry: CollectorRegistry, labels: TaskLabels, worker: str) -> None:
        self._registry = registry
        self._labels = labels
        self._make_task_metrics()
        self._make_lease_metrics()
        self._make_worker_metrics(worker)
        keep = lru_cache(MOST_SERIES)
        self._of_queue = keep(self._queue_series)
        self._of_task = keep(self._task_series)

    def _make_task_metrics(self) -> None:
        registry = self._registry
        self._received = Counter(
            "aztask_messages_received", "Messages received.", ["queue"], registry=registry
        )
        self._redelivered = Counter(
            "aztask_messages_redelivered",
            "Messages received that had been delivered before without a settlement.",
            ["queue"],
            registry=registry,
        )
        self._tasks = Counter(
            "aztask_tasks",
            "Runs that ended, by outcome.",
            ["queue", "task", "outcome"],
            registry=registry,
        )
        self._failures = Counter(
            "aztask_task_failures",
            "Runs that failed, by the type of their error; retried ones included.",
            ["queue", "task", "error"],
            registry=registry,
        )
        self._duration = Histogram(
            "aztask_task_duration_seconds",
            "Duration of runs.",
            ["queue", "task"],
            buckets=SECONDS,
            registry=registry,
        )
        self._wait = Histogram(
            "aztask_task_wait_seconds",
            "From the time a message was available until its first run started.",
            ["queue"],
            buckets=SECONDS,
            registry=registry,
        )
        self._punctuality = Histogram(
            "aztask_task_punctuality_seconds",
            "From the time a retry was due until it started.",
            ["queue"],
            buckets=SECONDS,
            registry=registry,
        )
        self._dead = Counter(
            "aztask_dead_letters",
            "Messages dead-lettered by this worker, or noticed by it, by reason.",
            ["queue", "task", "reason"],
            registry=registry,
        )
        self._put_offs = Counter(
            "aztask_put_offs",
            "Deliveries put off: a pause, a limit, an open circuit breaker, an unknown task.",
            ["queue", "task"],
            registry=registry,
        )

    def _make_lease_metrics(self) -> None:
        self._margin = Histogram(
            "aztask_lease_margin_ratio",
            "Share of the lease that was left when it was renewed or its task ended.",
            ["queue"],
            buckets=SHARES,
            registry=self._registry,
        )
        self._renewals = Counter(
            "aztask_lease_renewals", "Lease renewals.", ["queue"], registry=self._registry
        )
        self._losses = Counter(
            "aztask_lease_losses",
            "Leases that ended before their message was settled, and refused settlements.",
            ["queue", "kind"],
            registry=self._registry,
        )

    def _make_worker_metrics(self, worker: str) -> None:
        registry = self._registry
        info = Gauge("aztask_worker_info", "The worker's name.", ["worker"], registry=registry)
        info.labels(cleaned(worker)).set(1)
        self._running = Gauge("aztask_worker_running_tasks", "Running tasks.", registry=registry)
        self._capacity = Gauge(
            "aztask_worker_capacity", "Tasks that can run at the same time.", registry=registry
        )
        self._held = Gauge(
            "aztask_worker_held_messages",
            "Messages under a lease of this worker, waiting ones included.",
            registry=registry,
        )
        self._oldest = Gauge(
            "aztask_worker_longest_run_seconds",
            "How long the longest running task has run.",
            registry=registry,
        )
        self._draining = Gauge(
            "aztask_worker_draining", "1 while the worker ends its last tasks.", registry=registry
        )

    # -- feeding -----------------------------------------------------------------------------

    def event(self, event: Event) -> None:
        """Count one event of the worker."""
        kind = event.event
        queue = self._of_queue(event.queue)
        if kind == "received":
            queue.received.inc()
            if event.delivery_count > 1:
                queue.redelivered.inc()
        elif kind == "started":
            if event.wait_seconds is not None:
                waits = queue.punctuality if event.resubmit_count else queue.wait
                waits.observe(event.wait_seconds)
        elif kind == "renewed":
            queue.renewals.inc()
            queue.left(event)
        elif kind in OUTCOMES:
            self._ended(event, queue)
        elif kind == "put_off":
            self._put_offs.labels(event.queue, self._labels.task(event.task)).inc()
        elif kind in ("lease_lost", "settle_failed"):
            self._losses.labels(event.queue, kind).inc()
        elif kind == "dead_lettered":
            task = self._labels.task(event.task)
            self._dead.labels(event.queue, task, self._labels.reason(event.error_type)).inc()

    def _ended(self, event: Event, queue: _QueueSeries) -> None:
        ended, duration = self._of_task(event.queue, self._labels.task(event.task), event.event)
        ended.inc()
        if event.duration_seconds is not None:
            duration.observe(event.duration_seconds)
            queue.left(event)
            if event.event in ("failed", "resubmitted"):
                error = self._labels.error(event.error_type)
                task = self._labels.task(event.task)
                self._failures.labels(event.queue, task, error).inc()

    def status(self, status: WorkerStatus) -> None:
        """Take over the worker's state."""
        self._running.set(len(status.running))
        self._capacity.set(status.capacity)
        self._held.set(status.held)
        self._oldest.set(max(status.running, default=0.0))
        self._draining.set(status.draining)

    # -- series ------------------------------------------------------------------------------

    def _queue_series(self, queue: str) -> _QueueSeries:
        return _QueueSeries(
            self._received.labels(queue),
            self._redelivered.labels(queue),
            self._wait.labels(queue),
            self._punctuality.labels(queue),
            self._renewals.labels(queue),
            self._margin.labels(queue),
        )

    def _task_series(self, queue: str, task: str, kind: str) -> tuple[Counter, Histogram]:
        outcome = self._tasks.labels(queue, task, OUTCOMES[kind])
        return outcome, self._duration.labels(queue, task)


class _QueueSeries:
    """The series of one queue."""

    __slots__ = ("_margin", "punctuality", "received", "redelivered", "renewals", "wait")

    def __init__(
        self,
        received: Counter,
        redelivered: Counter,
        wait: Histogram,
        punctuality: Histogram,
        renewals: Counter,
        margin: Histogram,
    ) -> None:
        self.received = received
        self.redelivered = redelivered
        self.wait = wait
        self.punctuality = punctuality
        self.renewals = renewals
        self._margin = margin

    def left(self, event: Event) -> None:
        """Note the share of the lease that is left."""
        share = share_left(event)
        if share is not None:
            self._margin.observe(share)
