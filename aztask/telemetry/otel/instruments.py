"""The metrics: those of the messaging conventions, and those of leases.

Rules
1. A worker's figures come from its supervisor, none from its pool processes: one time series for
   each worker. Pool processes and other programs count what they send.
2. No attribute has a value from outside, except for names of tasks that the app has registered: the
   number of time series is bounded. See `aztask.telemetry.labels`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from opentelemetry.metrics import Meter

from aztask.events.event import Event
from aztask.telemetry.labels import TaskLabels
from aztask.telemetry.otel.attributes import MessagingAttributes

OPERATION_BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
RUN_BUCKETS: Final = (0.005, 0.025, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0)
"""Seconds. The conventions' buckets end at 10 s; tasks run and wait for longer."""
SHARE_BUCKETS: Final = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.75, 0.9)
"""Shares of a lease."""

ENDINGS: Final = frozenset({"succeeded", "failed", "resubmitted", "snoozed", "cancelled"})


class Instruments:
    """All instruments, and the listener that feeds them with a worker's events."""

    def __init__(self, meter: Meter, attributes: MessagingAttributes, labels: TaskLabels) -> None:
        self._attributes = attributes
        self._labels = labels
        self._sent = meter.create_counter(
            "messaging.client.sent.messages", "{message}", "Messages sent."
        )
        self._consumed = meter.create_counter(
            "messaging.client.consumed.messages", "{message}", "Messages received."
        )
        self._operation = meter.create_histogram(
            "messaging.client.operation.duration",
            "s",
            "Duration of sends, receives and settlements, each of a whole batch.",
            explicit_bucket_boundaries_advisory=OPERATION_BUCKETS,
        )
        self._process = meter.create_histogram(
            "messaging.process.duration",
            "s",
            "Duration of runs.",
            explicit_bucket_boundaries_advisory=RUN_BUCKETS,
        )
        self._wait = meter.create_histogram(
            "aztask.task.wait",
            "s",
            "From the time a message was available until its first run started.",
            explicit_bucket_boundaries_advisory=RUN_BUCKETS,
        )
        self._punctuality = meter.create_histogram(
            "aztask.task.punctuality",
            "s",
            "From the time a retry was due until it started.",
            explicit_bucket_boundaries_advisory=RUN_BUCKETS,
        )
        self._margin = meter.create_histogram(
            "aztask.lease.margin",
            "1",
            "Share of the lease that was left when it was renewed or its task ended.",
            explicit_bucket_boundaries_advisory=SHARE_BUCKETS,
        )
        self._renewals = meter.create_counter("aztask.lease.renewals", "{renewal}", "Renewals.")
        self._losses = meter.create_counter(
            "aztask.lease.losses", "{lease}", "Leases that ended before their message was settled."
        )
        self._dead = meter.create_counter(
            "aztask.messages.dead_lettered", "{message}", "Messages dead-lettered, by reason."
        )
        self._known: dict[tuple[str, str, str], Mapping[str, str | int]] = {}

    # -- operations --------------------------------------------------------------------------

    def sent(
        self, common: Mapping[str, str | int], count: int, seconds: float, error_type: str
    ) -> None:
        """Count a send of `count` messages. error_type: "" if it succeeded."""
        attributes = {**common, "error.type": error_type} if error_type else common
        self._sent.add(count, attributes)
        self._operation.record(seconds, attributes)

    def received(self, common: Mapping[str, str | int], count: int, seconds: float) -> None:
        """Count a receive that brought `count` messages."""
        self._consumed.add(count, common)
        self._operation.record(seconds, common)

    def settled(self, common: Mapping[str, str | int], seconds: float, error_type: str) -> None:
        """Record the duration of a batch of settlements."""
        attributes = {**common, "error.type": error_type} if error_type else common
        self._operation.record(seconds, attributes)

    # -- events ------------------------------------------------------------------------------

    def event(self, event: Event) -> None:
        """Record one event of a worker."""
        kind = event.event
        if kind == "received":
            return
        if kind == "started":
            if event.wait_seconds is not None:
                histogram = self._punctuality if event.resubmit_count else self._wait
                histogram.record(event.wait_seconds, self._of(event.queue, event.task, ""))
        elif kind in ENDINGS:
            if event.duration_seconds is not None:
                error = "" if kind == "succeeded" else self._labels.error(event.error_type)
                attributes = self._of(event.queue, event.task, error)
                self._process.record(event.duration_seconds, attributes)
                self._left(event)
        elif kind == "renewed":
            attributes = self._of(event.queue, "", "")
            self._renewals.add(1, attributes)
            self._left(event)
        elif kind in ("lease_lost", "settle_failed"):
            self._losses.add(1, self._of(event.queue, event.task, ""))
        elif kind == "dead_lettered":
            reason = self._labels.reason(event.error_type)
            self._dead.add(1, self._of(event.queue, event.task, reason))

    def _left(self, event: Event) -> None:
        if event.margin_seconds is not None and event.lease_seconds:
            share = event.margin_seconds / event.lease_seconds
            self._margin.record(share, self._of(event.queue, "", ""))

    def _of(self, queue: str, task: str, error: str) -> Mapping[str, str | int]:
        """The attributes of a worker's figure, made once; every value in them is bounded."""
        name = self._labels.task(task) if task else ""
        key = (queue, name, error)
        known = self._known.get(key)
        if known is None:
            made = dict(self._attributes.of(queue, "process", "process"))
            if name:
                made["aztask.task"] = name
            if error:
                made["error.type"] = error
            known = self._known[key] = made
        return known
