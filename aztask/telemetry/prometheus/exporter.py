"""``aztask exporter``: the depths of queues and the number of workers, from one process.

Why not from every worker: each would ask the service for the same figures, and on Storage queues
every question costs money. So one exporter asks, every `interval` seconds, however many Prometheus
servers scrape it.

Rules
1. A queue that cannot be read has ``aztask_queue_up`` 0 and no figures: old ones would look true.
2. A queue's error does not affect the other queues.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final

from prometheus_client import CollectorRegistry, Gauge, generate_latest

from aztask.app import App
from aztask.errors import AztaskError
from aztask.queues.base import MessageState, QueueStats
from aztask.stores.records.base import WorkerRecord
from aztask.support.parts import Part
from aztask.telemetry.http import HttpAnswer, PageServer
from aztask.telemetry.labels import cleaned
from aztask.telemetry.prometheus.worker import METRICS_TYPE, PROBES

logger = logging.getLogger(__name__)

STATES: Final = ("active", "leased", "scheduled", "deferred")
PATIENCE_SECONDS: Final = 15.0
STALE_TURNS: Final = 3
"""The exporter is not ready if it has not finished a turn for so many intervals."""


class QueueDepths:
    """The exporter's metrics; `refresh` asks for them."""

    def __init__(
        self,
        app: App,
        queues: Callable[[], Sequence[str]],
        registry: CollectorRegistry,
        *,
        celery_names: bool = False,
    ) -> None:
        """queues: called in each turn. celery_names: add ``celery_queue_length`` and its kin."""
        self._app = app
        self._queues = queues
        self._messages = Gauge(
            "aztask_queue_messages", "Messages by state.", ["queue", "state"], registry=registry
        )
        self._total = self._of_queue(
            "aztask_queue_length", "All messages but dead letters.", registry
        )
        self._dead = self._of_queue("aztask_queue_dead_letters", "Dead letters.", registry)
        self._oldest = self._of_queue(
            "aztask_queue_oldest_message_seconds",
            "How long the first message has been available; 0 if no message is.",
            registry,
        )
        self._up = self._of_queue("aztask_queue_up", "1 if the queue can be read.", registry)
        self._workers = self._of_queue(
            "aztask_queue_workers", "Workers with a recent heartbeat.", registry
        )
        self._running = self._of_queue(
            "aztask_queue_running_tasks", "Running tasks, by their workers' heartbeats.", registry
        )
        self._turned = Gauge(
            "aztask_exporter_last_turn_timestamp_seconds",
            "When the figures were last asked for.",
            registry=registry,
        )
        self._celery_length = self._celery_workers = None
        if celery_names:
            labels = ["queue_name"]
            self._celery_length = Gauge(
                "celery_queue_length", "Messages in the queue.", labels, registry=registry
            )
            self._celery_workers = Gauge(
                "celery_active_worker_count", "Workers of the queue.", labels, registry=registry
            )
        self._known: set[str] = set()
        self.turned_at = 0.0

    @staticmethod
    def _of_queue(name: str, text: str, registry: CollectorRegistry) -> Gauge:
        return Gauge(name, text, ["queue"], registry=registry)

    def refresh(self) -> None:
        """Ask for all figures once."""
        queues = list(self._queues())
        for queue in self._known - set(queues):
            self._forget(queue)
            with suppress(KeyError):
                self._up.remove(cleaned(queue))
        self._known = set(queues)
        for queue in queues:
            try:
                self._show(self._app.broker.stats(queue), self._age(queue))
            except Exception as error:  # it concerns this queue alone (rule 2)
                bug = not isinstance(error, AztaskError)
                logger.warning("queue %s cannot be read: %s", queue, error, exc_info=bug)
                self._forget(queue)
                self._up.labels(cleaned(queue)).set(0)
        self._show_workers(queues)
        self._turned.set_to_current_time()
        self.turned_at = time.monotonic()

    def _age(self, queue: str) -> float:
        """Seconds that the first message has been available; it may be leased."""
        for message in self._app.broker.peek(queue, limit=1):
            if message.state in (MessageState.ACTIVE, MessageState.LEASED):
                return max(0.0, time.time() - message.enqueued_at)
        return 0.0

    def _show(self, stats: QueueStats, age: float) -> None:
        label = cleaned(stats.queue)
        for state in STATES:
            count = getattr(stats, state)
            if count is not None:
                self._messages.labels(label, state).set(count)
        self._total.labels(label).set(stats.living)
        if stats.dead is not None:
            self._dead.labels(label).set(stats.dead)
        self._oldest.labels(label).set(age)
        self._up.labels(label).set(1)
        if self._celery_length is not None:
            self._celery_length.labels(label).set(stats.living)

    def _show_workers(self, queues: Sequence[str]) -> None:
        """Count the workers of each queue; without a result store there are no heartbeats."""
        workers: list[WorkerRecord] = []
        try:
            workers = self._app.results.workers() if self._app.results is not None else []
        except Exception as error:  # the figures of the queues are shown all the same
            bug = not isinstance(error, AztaskError)
            logger.warning("the workers' heartbeats cannot be read: %s", error, exc_info=bug)
            return
        alive = [worker for worker in workers if worker.state_at(time.time()) == "alive"]
        for queue in queues:
            label = cleaned(queue)
            serving = [worker for worker in alive if queue in worker.queues]
            self._workers.labels(label).set(len(serving))
            running = sum(task.queue == queue for worker in serving for task in worker.tasks)
            self._running.labels(label).set(running)
            if self._celery_workers is not None:
                self._celery_workers.labels(label).set(len(serving))

    def _forget(self, queue: str) -> None:
        label = cleaned(queue)
        for gauge in (self._total, self._dead, self._oldest, self._celery_length):
            if gauge is not None:
                with suppress(KeyError):
                    gauge.remove(label)
        for state in STATES:
            with suppress(KeyError):
                self._messages.remove(label, state)


@contextmanager
def exporting(
    app: App,
    queues: Callable[[], Sequence[str]],
    address: tuple[str, int],
    *,
    interval: float,
    celery_names: bool,
) -> Iterator[str]:
    """Serve the figures inside the ``with`` block; yields the URL.

    interval: seconds between two turns. Raises ConfigurationError if the address is taken.
    """
    registry = CollectorRegistry()
    depths = QueueDepths(app, queues, registry, celery_names=celery_names)
    stopping = threading.Event()

    part = Part("exporter", longest=STALE_TURNS * interval + PATIENCE_SECONDS)

    def turn() -> None:
        while not stopping.is_set():
            part.begin()
            try:
                depths.refresh()
            except Exception as error:  # noqa: BLE001  # an SDK may raise anything
                part.failed(error, "the queues cannot be listed, it is tried again")
            part.rest()
            stopping.wait(interval)

    def ready() -> HttpAnswer:
        if time.monotonic() - depths.turned_at > STALE_TURNS * interval + PATIENCE_SECONDS:
            return HttpAnswer(503, b"the queues have not been read for a while, see the log\n")
        return HttpAnswer(200, b"ok\n")

    server = PageServer(
        *address,
        {
            "/metrics": lambda: HttpAnswer(200, generate_latest(registry), METRICS_TYPE),
            "/healthz": lambda: HttpAnswer(200, b"ok\n"),
            "/readyz": ready,
        },
        quick=PROBES,
    )
    part.thread(turn, "aztask-exporter").start()
    server.start()
    try:
        yield server.url
    finally:
        stopping.set()
        part.stop()
        server.stop()
