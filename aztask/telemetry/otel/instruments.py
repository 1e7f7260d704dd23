"""The metrics: those of the messaging conventions, and those of leases.

Rules
1. A worker's figures come from its supervisor, none from its pool processes: one time series for
   each worker. Pool processes and other programs count what they send.
2. No attribute has a value from outside, except for names of tasks that the app has registered: the
   number of time series is bounded. See `aztask.telemetry.labels`.
3. Recording one value costs the SDK about 7 microseconds, so counts are summed up here and read by
   the SDK when it exports.
"""

from __future__ import annotations

from collections.abc import Mapping
from threading import Lock
from typing import Final

from opentelemetry.metrics import CallbackOptions, Meter, Observation

from aztask.stores.events.event import Event
from aztask.telemetry.labels import TaskLabels, share_left
from aztask.telemetry.otel.attributes import MessagingAttributes

OPERATION_BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
RUN_BUCKETS: Final = (0.005, 0.025, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0)
"""Seconds. The conventions' buckets end at 10 s; tasks run and wait for longer."""
SHARE_BUCKETS: Final = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.75, 0.9)
"""Shares of a lease."""

ENDINGS: Final = frozenset(
    {"succeeded", "failed", "resubmitted", "snoozed", "waiting", "cancelled"}
)


class Total:
    """A counter whose sums the SDK reads when it exports. Any thread may add."""

    def __init__(self, meter: Meter, name: str, unit: str, text: str) -> None:
        self._sums: dict[tuple[str, ...], tuple[Mapping[str, str | int], list[int]]] = {}
        self._lock = Lock()
        meter.create_observable_counter(name, [self._observed], unit, text)

    def add(self, key: tuple[str, ...], count: int, attributes: Mapping[str, str | int]) -> None:
        """Add `count`. key: stands for the attributes."""
        with self._lock:
            known = self._sums.get(key)
            if known is None:
                known = self._sums[key] = (attributes, [0])
            known[1][0] += count

    def _observed(self, _: CallbackOptions) -> list[Observation]:
        with self._lock:
            return [Observation(count[0], attributes) for attributes, count in self._sums.values()]


class Instruments:
    """All instruments, and the listener that feeds them with a worker's events."""

    def __init__(self, meter: Meter, attributes: MessagingAttributes, labels: TaskLabels) -> None:
        self._attributes = attributes
        self._labels = labels
        self._sent = Total(meter, "messaging.client.sent.messages", "{message}", "Messages sent.")
        self._consumed = Total(
            meter, "messaging.client.consumed.messages", "{message}", "Messages received."
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
        self._renewals = Total(meter, "aztask.lease.renewals", "{renewal}", "Renewals.")
        self._losses = Total(
            meter,
            "aztask.lease.losses",
            "{lease}",
            "Leases that ended before their message was settled.",
        )
        self._dead = Total(
            meter, "aztask.messages.dead_lettered", "{message}", "Dead letters, by reason."
        )
        self._known: dict[tuple[str, str, str], Mapping[str, str | int]] = {}

    # -- operations --------------------------------------------------------------------------

    def sent(
        self, common: Mapping[str, str | int], count: int, seconds: float, error_type: str
    ) -> None:
        """Count a send of `count` messages. error_type: "" if it succeeded."""
        attributes = {**common, "error.type": error_type} if error_type else common
        queue = str(common["messaging.destination.name"])
        self._sent.add((queue, error_type), count, attributes)
        self._operation.record(seconds, attributes)

    def received(self, common: Mapping[str, str | int], count: int, seconds: float) -> None:
        """Count a receive that brought `count` messages."""
        self._consumed.add((str(common["messaging.destination.name"]),), count, common)
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
            self._count(self._renewals, event.queue, "", "")
            self._left(event)
        elif kind in ("lease_lost", "settle_failed"):
            self._count(self._losses, event.queue, event.task, "")
        elif kind == "dead_lettered":
            reason = self._labels.reason(event.error_type)
            self._count(self._dead, event.queue, event.task, reason)

    def _count(self, total: Total, queue: str, task: str, error: str) -> None:
        label = self._labels.task(task) if task else ""
        total.add((queue, label, error), 1, self._of(queue, task, error))

    def _left(self, event: Event) -> None:
        share = share_left(event)
        if share is not None:
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
