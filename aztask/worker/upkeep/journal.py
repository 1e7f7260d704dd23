"""What a worker tells of its deliveries: lifecycle events, and its closing summary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from aztask.events.event import Event, EventKind
from aztask.events.sink import EventSink
from aztask.message.message import TaskMessage
from aztask.results.base import State
from aztask.settlement import DeadLetter
from aztask.support.clock import Clock
from aztask.worker.pipeline.work import Job

_KINDS: dict[State, EventKind] = {
    State.SUCCEEDED: "succeeded",
    State.FAILED: "failed",
    State.RETRYING: "resubmitted",
    State.SNOOZED: "snoozed",
    State.CANCELLED: "cancelled",
    State.EXPIRED: "expired",
}


class Journal:
    """Turns jobs into events. Only the supervisor's loop calls it."""

    def __init__(self, sink: EventSink, clock: Clock) -> None:
        self._sink = sink
        self._clock = clock
        self.counts: Counter[str] = Counter()

    def received(self, jobs: Iterable[Job]) -> None:
        """Deliveries came in."""
        for job in jobs:
            self._emit("received", job)

    def started(self, job: Job) -> None:
        """A task began; for short tasks this is told together with their end."""
        if not job.start_told and job.started_at is not None:
            job.start_told = True
            wall = self._clock.wall() - (self._clock.monotonic() - job.started_at)
            due = job.delivery.enqueued_at
            wait = max(0.0, wall - due)
            self._emit("started", job, ts=wall, wait=wait, lease=job.delivery.lease_seconds)

    def renewed(self, job: Job, age: float) -> None:
        """A lease was renewed when `age` (a share of it) had passed."""
        lease = job.delivery.lease_seconds
        self._emit("renewed", job, lease=lease, margin=lease * (1.0 - age))

    def ended(self, job: Job) -> None:
        """A delivery is done with: what the stages noted, and how it ended."""
        self.started(job)
        now = self._clock.monotonic()
        held = now - job.received_at
        for kind, text in job.notes:
            self.counts[kind] += 1
            known: EventKind = "settle_failed" if kind == "settle_failed" else "lease_lost"
            lease = job.delivery.lease_seconds
            self._emit(known, job, lease=lease, held=held, error_type=kind, error=text)
        outcome = job.outcome
        if outcome is not None and not job.repeated and (job.settled or not job.notes):
            self.counts[outcome.state.value] += 1
            self._emit(
                _KINDS[outcome.state],
                job,
                duration=None if job.started_at is None else job.duration,
                lease=job.delivery.lease_seconds,
                margin=job.delivery.deadline - now,
                held=held,
                error_type=outcome.error_type or None,
                error=outcome.error or None,
            )
        if isinstance(job.settlement, DeadLetter) and job.settled:
            self.counts["dead-lettered"] += 1
            self._emit(
                "dead_lettered",
                job,
                error_type=job.settlement.reason,
                error=job.settlement.description,
            )

    def buried(self, message: TaskMessage, queue: str, deliveries: int, dead: DeadLetter) -> None:
        """The broker dead-lettered a message by itself."""
        self.counts["dead-lettered"] += 1
        self._sink.emit(
            Event(
                "dead_lettered",
                message.id,
                message.task,
                queue,
                deliveries,
                message.resubmit_count,
                error_type=dead.reason,
                error=dead.description,
            )
        )

    def lease_changed(self, queue: str, former: float, lease: float, reason: str) -> None:
        """From now on the queue's messages are received under another lease."""
        self._sink.emit(
            Event(
                "lease_changed",
                "",
                "",
                queue,
                lease_seconds=lease,
                former_lease_seconds=former,
                reason=reason,
            )
        )

    def flush(self) -> None:
        """Write what was emitted."""
        self._sink.flush()

    def close(self) -> None:
        """Write and close the file."""
        self._sink.close()

    def summary(self) -> str:
        """The worker's closing line."""
        order = ["succeeded", "failed", "retrying", "snoozed", "expired", "cancelled"]
        rare = ["dead-lettered", "lease_lost", "settle_failed"]
        parts = [f"{self.counts[name]} {name}" for name in order[:3]]
        parts += [
            f"{self.counts[name]} {name.replace('_', ' ')}"
            for name in (*order[3:], *rare)
            if self.counts[name]
        ]
        return ", ".join(parts)

    def _emit(
        self,
        kind: EventKind,
        job: Job,
        *,
        ts: float = 0.0,
        duration: float | None = None,
        wait: float | None = None,
        lease: float | None = None,
        margin: float | None = None,
        held: float | None = None,
        error_type: str | None = None,
        error: str | None = None,
    ) -> None:
        message = job.message
        self._sink.emit(
            Event(
                kind,
                message.id if message else job.delivery.envelope.message_id,
                message.task if message else "",
                job.queue,
                job.delivery.delivery_count,
                message.resubmit_count if message else 0,
                duration,
                wait,
                lease,
                margin,
                error_type,
                error,
                ts,
                held_seconds=held,
                renewals=None if held is None else job.lease.renewals,
            )
        )
