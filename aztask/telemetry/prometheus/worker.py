"""``aztask worker --http``: a worker's metrics and probes.

The supervisor process answers, in which no task code runs: a task that holds the interpreter delays
no answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector, generate_latest

from aztask.app import App
from aztask.telemetry.health import Health
from aztask.telemetry.http import Answer, PageServer
from aztask.telemetry.labels import TaskLabels
from aztask.telemetry.prometheus.backlog import Backlog
from aztask.telemetry.prometheus.celery import CeleryMetrics
from aztask.telemetry.prometheus.metrics import WorkerMetrics

METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


@contextmanager
def serving(
    app: App, worker: str, queues: Sequence[str], address: tuple[str, int], *, celery_names: bool
) -> Iterator[str]:
    """Serve a worker's metrics and probes inside the ``with`` block; yields the URL.

    Call it in the supervisor process, before the worker receives. celery_names: add the metrics
    under the names of celery-exporter. Raises ConfigurationError if the address is taken.
    """
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    labels = TaskLabels(app.tasks)
    listeners: list[WorkerMetrics | CeleryMetrics] = [WorkerMetrics(registry, labels, worker)]
    if celery_names:
        listeners.append(CeleryMetrics(registry, labels, worker))
    health = Health.of(app, queues[0])
    backlog = Backlog([each.count for each in listeners])
    app.hooks.event(backlog.add)
    app.hooks.status(lambda _: backlog.tidy())
    for each in listeners:
        app.hooks.status(each.status)
    app.hooks.status(health.status)
    _add_health(registry, health)
    server = PageServer(
        *address,
        {
            "/metrics": lambda: _metrics(registry, backlog),
            "/healthz": lambda: _probe(health.not_live()),
            "/readyz": lambda: _probe(health.not_ready()),
        },
    )
    health.start()
    server.start()
    try:
        yield server.url
    finally:
        server.stop()
        health.stop()


def _metrics(registry: CollectorRegistry, backlog: Backlog) -> Answer:
    backlog.count()
    return Answer(200, generate_latest(registry), METRICS_TYPE)


def _probe(problem: str) -> Answer:
    if problem:
        return Answer(503, f"{problem}\n".encode())
    return Answer(200, b"ok\n")


def _add_health(registry: CollectorRegistry, health: Health) -> None:
    ready = Gauge("aztask_worker_ready", "1 if the worker can run tasks.", registry=registry)
    ready.set_function(lambda: not health.not_ready())
    for contact in health.contacts:
        name = contact.name.replace(" ", "_")
        up = Gauge(f"aztask_{name}_up", f"1 if the {contact.name} answers.", registry=registry)
        up.set_function(lambda contact=contact: not contact.problem)  # type: ignore[misc]
