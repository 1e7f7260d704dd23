"""``aztask worker --http``: a worker's metrics and probes.

The supervisor process answers, in which no task code runs: a task that holds the interpreter delays
no answer.
"""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import itemgetter
from threading import Lock
from typing import Final, Protocol

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from aztask.app import App
from aztask.hooks import WorkerStatus
from aztask.stores.events.event import Event
from aztask.support.parts import all_parts, failures
from aztask.telemetry.health import Health
from aztask.telemetry.http import HttpAnswer, PageServer
from aztask.telemetry.labels import TaskLabels, cleaned
from aztask.telemetry.prometheus.metrics import WorkerMetrics
from aztask.worker.overseer import Overseer

logger = logging.getLogger(__name__)

# -- events that wait to be counted --------------------------------------------------------
#
# Counters are seen only when they are scraped. So the events of a worker are kept as they come and
# counted together: at a scrape, and when there are many. Those of one kind, queue and task are one
# group, and one sum. That takes much less CPU time than to count each event between two other steps
# of the worker.


MANY: Final = 200
"""So few that they are still in the processor's cache when they are counted."""

KIND_QUEUE_TASK: Final[Callable[[Event], tuple[str, str, str]]] = itemgetter(
    *map(Event._fields.index, ("event", "queue", "task"))
)
"""What events are grouped by. Reading the three by name takes twice as long."""


class Counting(Protocol):
    """Counts the events of one group, of which there is at least one."""

    def __call__(self, kind: str, queue: str, task: str, group: Sequence[Event], /) -> None:
        """`kind`, `queue`, `task`: of all events of the group."""


class Backlog:
    """Passes events on, many at a time. Any thread may call.

    `add` keeps one event. It is the method of a queue, without a Python function around it: a
    worker calls it several times for each task.
    """

    def __init__(self, listeners: Sequence[Counting]) -> None:
        """`listeners`: each is called with each group, by one thread at a time."""
        self._listeners = listeners
        self._events: deque[Event] = deque()
        self._counting = Lock()
        self.add: Callable[[Event], None] = self._events.append

    def tidy(self) -> None:
        """Count the events if there are `MANY`; to be called at least once a second."""
        if len(self._events) >= MANY:
            self.count()

    def count(self) -> None:
        """Pass all events on. A listener's error is logged, and all other groups are counted."""
        with self._counting:
            groups: dict[tuple[str, str, str], list[Event]] = defaultdict(list)
            for _ in range(len(self._events)):
                event = self._events.popleft()
                groups[KIND_QUEUE_TASK(event)].append(event)
            for (kind, queue, task), group in groups.items():
                for listener in self._listeners:
                    try:
                        listener(kind, queue, task, group)
                    except Exception:
                        logger.exception("events were not counted: %s of %s", len(group), kind)


# -- the metrics under the names of celery-exporter, so that existing Grafana boards work --
#
# Source of the names and labels: celery-exporter (danihodovic/celery-exporter,
# ``src/exporter.py``); Grafana boards 17508 and 17509 read them. A worker feeds them itself, so
# ``hostname`` is the worker's name. ``celery_task_sent`` counts nothing here: senders are other
# processes. The queue's length comes from ``aztask exporter``.


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


PROBES: Final = ("/healthz", "/readyz")
METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


@contextmanager
def observing(
    app: App, worker: str, queues: Sequence[str], *, celery_names: bool
) -> Iterator[dict[str, Callable[[], str]]]:
    """Measure a worker inside the ``with`` block; yields what makes the texts of its pages.

    They are ``metrics``, and of the probes ``live``, ``ready`` and ``failing``: why not, or "".
    Call it in the supervisor process, before the worker receives. celery_names: add the metrics
    under the names of celery-exporter.
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
    registry.register(PartMetrics())
    health.start()
    try:
        yield {
            "metrics": lambda: _metrics(registry, backlog),
            "live": health.not_live,
            "ready": health.not_ready,
            "failing": health.failing,
        }
    finally:
        health.stop()


@contextmanager
def serving(pages: Mapping[str, Callable[[], str]], address: tuple[str, int]) -> Iterator[str]:
    """Serve the pages of `observing` inside the ``with`` block; yields the URL.

    Raises ConfigurationError if the address is taken.
    """
    server = PageServer(
        *address,
        {
            "/metrics": lambda: HttpAnswer(200, pages["metrics"]().encode(), METRICS_TYPE),
            "/healthz": lambda: _probe(pages["live"]()),
            "/readyz": lambda: _probe(pages["ready"](), pages["failing"]()),
        },
        quick=PROBES,
    )
    server.start()
    try:
        yield server.url
    finally:
        server.stop()


def overseen(overseer: Overseer) -> dict[str, Callable[[], str]]:
    """The pages of several supervisors, from what they tell their overseer."""
    return {
        "metrics": lambda: joined(overseer.metrics()),
        "live": lambda: overseer.probe("live"),
        "ready": lambda: overseer.probe("ready"),
        "failing": lambda: overseer.probe("failing"),
    }


def joined(texts: Mapping[int, str]) -> str:
    """The metrics of several supervisors as one text, with a label `supervisor`, its number.

    They are not added up: when a supervisor is replaced, its counters begin at 0, and Prometheus
    would take a sum that falls for one that began anew, and count all that is left of it again.
    `texts`: "" for a supervisor that does not answer.
    """
    up, answers = "aztask_supervisor_up", {number: int(bool(texts[number])) for number in texts}
    families = {
        f"# HELP {up} 1 if the supervisor answers.\n# TYPE {up} gauge": [
            f'{up}{{supervisor="{number}"}} {answer}' for number, answer in answers.items()
        ]
    }
    for number, text in texts.items():
        label = f'supervisor="{number}"'
        head = ""
        for line in filter(None, text.split("\n")):
            if line.startswith("# HELP "):
                head = line
            elif line.startswith("#"):
                head += f"\n{line}"
                families.setdefault(head, [])
            else:  # no name of a metric contains a brace or a space
                name, mark, rest = line.partition("{" if "{" in line else " ")
                labels = f"{label},{rest}" if mark == "{" else f"{label}}} {rest}"
                families[head].append(f"{name}{{{labels}")
    return "\n".join(line for head, lines in families.items() for line in (head, *lines)) + "\n"


def _metrics(registry: CollectorRegistry, backlog: Backlog) -> str:
    backlog.count()
    return generate_latest(registry).decode()


def _probe(problem: str, failing: str = "") -> HttpAnswer:
    """503 with the problem, else 200; failing: parts that do not stop the worker's work."""
    status, first = (503, problem) if problem else (200, "ok")
    lines = [first, *(line for line in failing.splitlines() if line not in first)]
    return HttpAnswer(status, ("\n".join(lines) + "\n").encode())


class PartMetrics(Collector):
    """``aztask_part_failing`` of each part, asked for at each scrape: a stuck loop shows, too."""

    def collect(self) -> Iterable[Metric]:
        """The metric with a sample for each part, and for each item that one has put aside."""
        metric = GaugeMetricFamily(
            "aztask_part_failing", "1 if the part fails or stands still.", labels=["part"]
        )
        failing = {failure.part for failure in failures()}
        for name in sorted({part.name for part in all_parts()} | failing):
            metric.add_metric([cleaned(name)], float(name in failing))
        yield metric


def _add_health(registry: CollectorRegistry, health: Health) -> None:
    ready = Gauge("aztask_worker_ready", "1 if the worker can run tasks.", registry=registry)
    ready.set_function(lambda: not health.not_ready())
    for contact in health.contacts:
        name = contact.name.replace(" ", "_")
        up = Gauge(f"aztask_{name}_up", f"1 if the {contact.name} answers.", registry=registry)
        up.set_function(lambda contact=contact: not contact.problem)  # type: ignore[misc]
