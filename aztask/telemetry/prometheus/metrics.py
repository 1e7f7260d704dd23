"""The metrics of one worker, fed by its events and its status.

Rules
1. All label values are bounded: queues are those of the worker, for the others see
   `aztask.telemetry.labels`. The worker's name is a label of one series only.
2. Events are counted many at a time, see `aztask.telemetry.prometheus.worker`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from threading import Lock
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

from aztask.hooks import WorkerStatus
from aztask.stores.events.event import Event
from aztask.telemetry.labels import TaskLabels, cleaned, share_left

# -- a histogram that takes many values at once --------------------------------------------
#
# The library's own histogram takes them one by one, each under two locks. A worker counts its
# events together, so it has hundreds of values for the same series at a time.


INFINITY: Final = "+Inf"


class Distribution(Collector):
    """One histogram with all its series. Any thread may call."""

    def __init__(
        self,
        registry: CollectorRegistry,
        name: str,
        text: str,
        labels: Sequence[str],
        buckets: Sequence[float],
    ) -> None:
        """Register the histogram.

        * `name`, `text`, `labels`: of the metric.
        * `buckets`: their highest values, ascending, without infinity.
        """
        self._name = name
        self._text = text
        self._labels = labels
        self._buckets = buckets
        self._series: dict[tuple[str, ...], _Series] = {}
        self._lock = Lock()
        registry.register(self)

    def observe(self, series: tuple[str, ...], values: Sequence[float]) -> None:
        """Add values to a series. `series`: the values of its labels, in their order."""
        if not values:
            return
        ordered = sorted(values)
        reached = [bisect_right(ordered, most) for most in self._buckets]
        added = [*reached, len(ordered)]
        with self._lock:
            known = self._series.get(series)
            if known is None:
                known = self._series[series] = _Series(len(added))
            known.add(added, sum(ordered))

    def describe(self) -> list[HistogramMetricFamily]:
        """The metric without values, from which the registry learns its name."""
        return [HistogramMetricFamily(self._name, self._text, labels=self._labels)]

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """The metric with all its series."""
        (family,) = self.describe()
        names = [str(float(most)) for most in self._buckets]
        with self._lock:
            found = [(key, list(each.counts), each.total) for key, each in self._series.items()]
        for key, counts, total in found:
            buckets = list(zip([*names, INFINITY], map(float, counts), strict=True))
            family.add_metric(key, buckets, total)
        yield family


class _Series:
    """The counts of one series: of the values up to each bucket's limit, and of all values."""

    __slots__ = ("counts", "total")

    def __init__(self, size: int) -> None:
        self.counts = [0] * size
        self.total = 0.0

    def add(self, counts: Sequence[int], total: float) -> None:
        self.counts = [old + new for old, new in zip(self.counts, counts, strict=True)]
        self.total += total


SECONDS: Final = (0.005, 0.025, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0)
SHARES: Final = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.75, 0.9)
OUTCOMES: Final = {
    "succeeded": "succeeded",
    "failed": "failed",
    "resubmitted": "retried",
    "snoozed": "snoozed",
    "waiting": "waiting",
    "cancelled": "cancelled",
    "expired": "expired",
}


class WorkerMetrics:
    """Registers the metrics with `registry` and updates them. Any thread may collect."""

    def __init__(self, registry: CollectorRegistry, labels: TaskLabels, worker: str) -> None:
        self._registry = registry
        self._labels = labels
        self._make_task_metrics()
        self._make_lease_metrics()
        self._make_worker_metrics(worker)

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
        self._duration = Distribution(
            self._registry,
            "aztask_task_duration_seconds",
            "Duration of runs.",
            ["queue", "task"],
            SECONDS,
        )
        self._wait = Distribution(
            self._registry,
            "aztask_task_wait_seconds",
            "From the time a message was available until its first run started.",
            ["queue"],
            SECONDS,
        )
        self._punctuality = Distribution(
            self._registry,
            "aztask_task_punctuality_seconds",
            "From the time a retry was due until it started.",
            ["queue"],
            SECONDS,
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
        self._margin = Distribution(
            self._registry,
            "aztask_lease_margin_ratio",
            "Share of the lease that was left when it was renewed or its task ended.",
            ["queue"],
            SHARES,
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

    def count(self, kind: str, queue: str, task: str, group: Sequence[Event]) -> None:
        """Count events of the worker that have this kind, queue and task."""
        if kind == "received":
            self._count_received(queue, group)
        elif kind == "started":
            self._count_started(queue, group)
        elif kind in OUTCOMES:
            self._count_ended(kind, queue, self._labels.task(task), group)
        elif kind == "renewed":
            self._renewals.labels(queue).inc(len(group))
            self._observe_margins(queue, group)
        elif kind == "put_off":
            self._put_offs.labels(queue, self._labels.task(task)).inc(len(group))
        elif kind in ("lease_lost", "settle_failed"):
            self._losses.labels(queue, kind).inc(len(group))
        elif kind == "dead_lettered":
            for event in group:
                reason = self._labels.reason(event.error_type)
                self._dead.labels(queue, self._labels.task(task), reason).inc()

    def _count_received(self, queue: str, group: Sequence[Event]) -> None:
        self._received.labels(queue).inc(len(group))
        self._redelivered.labels(queue).inc(sum(event.delivery_count > 1 for event in group))

    def _count_started(self, queue: str, group: Sequence[Event]) -> None:
        known = [event for event in group if event.wait_seconds is not None]
        for metric, retried in ((self._wait, False), (self._punctuality, True)):
            waits = [e.wait_seconds or 0.0 for e in known if bool(e.resubmit_count) is retried]
            metric.observe((queue,), waits)

    def _count_ended(self, kind: str, queue: str, task: str, group: Sequence[Event]) -> None:
        self._tasks.labels(queue, task, OUTCOMES[kind]).inc(len(group))
        ran = [event for event in group if event.duration_seconds is not None]
        self._duration.observe((queue, task), [event.duration_seconds or 0.0 for event in ran])
        self._observe_margins(queue, ran)
        if kind in ("failed", "resubmitted"):
            for event in ran:
                error = self._labels.error(event.error_type)
                self._failures.labels(queue, task, error).inc()

    def _observe_margins(self, queue: str, group: Sequence[Event]) -> None:
        shares = [share for event in group if (share := share_left(event)) is not None]
        self._margin.observe((queue,), shares)

    def status(self, status: WorkerStatus) -> None:
        """Take over the worker's state."""
        self._running.set(len(status.running))
        self._capacity.set(status.capacity)
        self._held.set(status.held)
        self._oldest.set(max(status.running, default=0.0))
        self._draining.set(status.draining)
