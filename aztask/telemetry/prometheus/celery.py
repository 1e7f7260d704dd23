"""The metrics under the names of celery-exporter, so that existing Grafana boards work.

Source of the names and labels: celery-exporter (danihodovic/celery-exporter, ``src/exporter.py``);
Grafana boards 17508 and 17509 read them. A worker feeds them itself, so ``hostname`` is the
worker's name. ``celery_task_sent`` counts nothing here: senders are other processes. The queue's
length comes from ``aztask exporter``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from aztask.events.event import Event
from aztask.hooks import WorkerStatus
from aztask.telemetry.labels import TaskLabels, cleaned

LABELS: Final = ["name", "hostname", "queue_name"]
COUNTED: Final = {
    "received": "received",
    "started": "started",
    "succeeded": "succeeded",
    "resubmitted": "retried",
    "cancelled": "revoked",
    "expired": "revoked",
    "dead_lettered": "rejected",
}
"""Celery's event for ours. A dead letter is what Celery rejects."""


class CeleryMetrics:
    """Registers the metrics with `registry` and updates them."""

    def __init__(self, registry: CollectorRegistry, labels: TaskLabels, worker: str) -> None:
        self._labels = labels
        self._worker = worker = cleaned(worker)
        self._counters = {
            name: Counter(f"celery_task_{name}", f"Tasks {name}.", LABELS, registry=registry)
            for name in (
                "sent",
                "received",
                "started",
                "succeeded",
                "rejected",
                "revoked",
                "retried",
            )
        }
        self._failed = Counter(
            "celery_task_failed",
            "Tasks failed, without those that are retried.",
            ["name", "hostname", "exception", "queue_name"],
            registry=registry,
        )
        self._runtime = Histogram("celery_task_runtime", "Runtime.", LABELS, registry=registry)
        self._wait = Histogram("celery_task_queue_wait_time", "Wait.", LABELS, registry=registry)
        up = Gauge("celery_worker_up", "1 while the worker runs.", ["hostname"], registry=registry)
        up.labels(worker).set(1)
        self._active = Gauge(
            "celery_worker_tasks_active", "Running tasks.", ["hostname"], registry=registry
        ).labels(worker)

    def count(self, kind: str, queue: str, task: str, group: Sequence[Event]) -> None:
        """Count events of the worker that have this kind, queue and task."""
        labels = (self._labels.task(task), self._worker, queue)
        name = COUNTED.get(kind)
        if name is not None:
            self._counters[name].labels(*labels).inc(len(group))
        for event in group:
            if kind == "failed":
                error = self._labels.error(event.error_type)
                self._failed.labels(labels[0], self._worker, error, queue).inc()
            elif kind == "started" and event.wait_seconds is not None:
                self._wait.labels(*labels).observe(event.wait_seconds)
            elif kind == "succeeded" and event.duration_seconds is not None:
                self._runtime.labels(*labels).observe(event.duration_seconds)

    def status(self, status: WorkerStatus) -> None:
        """Take over the number of running tasks."""
        self._active.set(len(status.running))
