"""A worker's reports about its deliveries: lifecycle events, log lines and the closing summary."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable
from typing import Final

from aztask.limits.control import Pause, Scope
from aztask.message.message import TaskMessage
from aztask.settlement import DeadLetter
from aztask.stores.events.event import Event, EventKind
from aztask.stores.events.sink import EventSink
from aztask.stores.records.base import WAITING, Outcome, State
from aztask.stores.records.onceruns import OnceRun
from aztask.support.clock import Clock
from aztask.worker.logs import LOG_TASKS, brief_seconds
from aztask.worker.pipeline.redelivery import NOT_HERE
from aztask.worker.pipeline.work import Stage, WorkItem
from aztask.worker.upkeep.recording import Recorder

# -- tasklog ---------------------------------------------------------------------------------
#
# The log lines of tasks that end, and one summary a minute when there are too many of them.
#
# Rules
# 1. Failed runs have their own line, written where they are decided; here they are only counted.
# 2. Up to `LINES_A_SECOND` tasks are logged one by one. When a second has more, a summary replaces
#    the lines for at least `SUMMARY_SECONDS`, and until the rate has fallen below the limit.


logger = logging.getLogger("aztask.worker")

LINES_A_SECOND: Final = 50
SUMMARY_SECONDS: Final = 60.0


class TaskLog:
    """Logs tasks as they end; only the supervisor's loop calls it.

    mode: "auto" (rule 2), "all" (a line for every task) or "off" (failures only).
    """

    def __init__(self, clock: Clock, mode: str = LOG_TASKS[0]) -> None:
        self._clock = clock
        self._mode = mode
        self._second = -math.inf
        self._in_second = 0
        self._summary_began: float | None = None
        self._counts: Counter[str] = Counter()

    def ended(self, item: WorkItem, outcome: Outcome) -> None:
        """Log how a task ended, or count it for the summary."""
        if self._mode == "off" or not logger.isEnabledFor(logging.INFO):
            return
        if self._mode == "auto" and self._summarises(self._clock.monotonic()):
            self._counts[WAITING if outcome.parked else outcome.state.value] += 1
        elif line := _line(item, outcome):
            logger.info("%s %s", item.label, line)

    def tick(self, now: float) -> None:
        """Write the summary if it is due. now: on the clock of the deadlines."""
        began = self._summary_began
        if began is None or now - began < SUMMARY_SECONDS:
            return
        busy = self._counts.total() > LINES_A_SECOND * (now - began)
        self._write(now - began)
        self._summary_began = now if busy else None

    def close(self) -> None:
        """Write what the last summary did not cover."""
        if self._summary_began is not None and self._counts:
            self._write(self._clock.monotonic() - self._summary_began)
        self._summary_began = None

    def _summarises(self, now: float) -> bool:
        """Whether this task is only counted."""
        if self._summary_began is not None:
            return True
        if now - self._second >= 1.0:
            self._second, self._in_second = now, 0
        self._in_second += 1
        if self._in_second <= LINES_A_SECOND:
            return False
        logger.info(
            "more than %d tasks a second: one summary each %g s replaces their lines "
            "(--log-tasks all keeps them)",
            LINES_A_SECOND,
            SUMMARY_SECONDS,
        )
        self._summary_began = now
        return True

    def _write(self, seconds: float) -> None:
        parts = ", ".join(f"{count} {state}" for state, count in self._counts.most_common())
        logger.info(
            "%d %s ended in the last %.0f s%s",
            self._counts.total(),
            "task" if self._counts.total() == 1 else "tasks",
            seconds,
            f": {parts}" if parts else "",
        )
        self._counts.clear()


def _line(item: WorkItem, outcome: Outcome) -> str:
    """What to say about the end of a task; "" if another line has said it."""
    if outcome.state is State.SUCCEEDED:
        return f"succeeded in {brief_seconds(item.duration)}"
    if outcome.parked:
        return f"waits: {outcome.error}"
    if outcome.state is State.SNOOZED and outcome.error_type not in NOT_HERE:
        delay = getattr(outcome.settlement, "delay", 0.0)
        return f"snoozed, it runs again in {brief_seconds(delay)}"
    if outcome.state is State.CANCELLED:
        return "was cancelled"
    if outcome.state is State.EXPIRED:
        return "did not run: it expired before it could start"
    return ""


# -- journal ---------------------------------------------------------------------------------


_KINDS: dict[State, EventKind] = {
    State.SUCCEEDED: "succeeded",
    State.FAILED: "failed",
    State.RETRYING: "resubmitted",
    State.SNOOZED: "snoozed",
    State.CANCELLED: "cancelled",
    State.EXPIRED: "expired",
}


def _task_of(item: WorkItem) -> str:
    """The name of the task; "" for a message that could not be read."""
    return item.opened.message.task if item.opened is not None else ""


class Journal:
    """Turns the stages of items into events; only the supervisor's loop calls it."""

    def __init__(
        self,
        sink: EventSink,
        clock: Clock,
        log: TaskLog | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        """log: by default it logs single tasks up to a rate ("auto").

        recorder: counts for the history, if the result store keeps one.
        """
        self._sink = sink
        self._clock = clock
        self._log = log or TaskLog(clock)
        self.recorder = recorder
        self.counts: Counter[str] = Counter()

    def received(self, items: Iterable[WorkItem]) -> None:
        """Report deliveries that were received."""
        for item in items:
            self._emit("received", item)

    def started(self, item: WorkItem) -> None:
        """Report that a task has started, once; for short tasks together with their end."""
        run = item.run
        if run is not None and not run.start_reported and run.started_at is not None:
            run.start_reported = True
            wall = self._clock.wall() - (self._clock.monotonic() - run.started_at)
            due = item.delivery.enqueued_at
            wait = max(0.0, wall - due)
            self._emit("started", item, ts=wall, wait=wait, lease=item.delivery.lease_seconds)
            message = item.opened.message if item.opened is not None else None
            if self.recorder is not None and message is not None and not message.resubmit_count:
                self.recorder.waited(item.queue, message.task, wait)

    def renewed(self, item: WorkItem, age: float) -> None:
        """Report a renewal. age: the share of the lease that had passed."""
        lease = item.delivery.lease_seconds
        self._emit("renewed", item, lease=lease, margin=lease * (1.0 - age))

    def ended(self, item: WorkItem) -> None:
        """Report how a delivery ended, and what its stages noted."""
        self.started(item)
        now = self._clock.monotonic()
        held = now - item.received_at
        for kind, text in item.notes:
            self.counts[kind] += 1
            if kind != "settle_failed" and item.run is not None:
                logger.warning(
                    "%s: lease lost, this run is neither recorded nor settled: %s", item.label, text
                )
            known: EventKind = "settle_failed" if kind == "settle_failed" else "lease_lost"
            lease = item.delivery.lease_seconds
            self._emit(known, item, lease=lease, held=held, error_type=kind, error=text)
            if self.recorder is not None and known == "lease_lost":
                self.recorder.lost(item.queue, _task_of(item))
        outcome = item.outcome
        repeated = item.decided is not None and item.decided.repeated
        if outcome is not None and not repeated and (item.settled or not item.notes):
            parked = outcome.parked
            kind = WAITING if parked else outcome.state.value
            self.counts[kind] += 1
            self._log.ended(item, outcome)
            duration = None if item.run is None else item.duration
            if self.recorder is not None:
                self.recorder.ended(item.queue, _task_of(item), outcome.state, duration)
            self._emit(
                "waiting" if parked else _KINDS[outcome.state],
                item,
                duration=duration,
                lease=item.delivery.lease_seconds,
                margin=item.delivery.deadline - now,
                held=held,
                error_type=None if parked else outcome.error_type or None,
                error=None if parked else outcome.error or None,
                reason=outcome.error if parked else None,
            )
        if item.decided is not None and item.decided.put_off:
            self._put_off(item, item.decided.put_off)
        if isinstance(item.settlement, DeadLetter) and item.settled:
            self.counts["dead-lettered"] += 1
            self._emit(
                "dead_lettered",
                item,
                error_type=item.settlement.reason,
                error=item.settlement.description,
            )

    def _put_off(self, item: WorkItem, reason: str) -> None:
        """Report that a run may not start yet, once it waits: in the queue, or under its lease."""
        if item.settled or item.stage is Stage.HELD:
            self.counts["put_off"] += 1
            held = self._clock.monotonic() - item.received_at
            self._emit("put_off", item, held=held, reason=reason)

    def buried(self, message: TaskMessage, queue: str, deliveries: int, dead: DeadLetter) -> None:
        """Report a message that the broker itself dead-lettered."""
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
                workflow_id=message.workflow,
                parent_id=message.parent_id,
            )
        )

    def lost(self, run: OnceRun, error_type: str, error: str) -> None:
        """Report an at-most-once run whose worker is gone."""
        key = run.key
        self.counts["failed"] += 1
        if self.recorder is not None:
            self.recorder.ended(run.queue, run.task, State.FAILED)
        self._sink.emit(
            Event(
                "failed", key.task_id, run.task, run.queue, 1, key.hop,
                error_type=error_type, error=error,
            )
        )  # fmt: skip

    def lease_changed(self, queue: str, former: float, lease: float, reason: str) -> None:
        """Report that the queue's messages are received under another lease from now on."""
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

    def control_changed(self, pause: Pause, what: str) -> None:
        """Report that this worker obeys a pause, or its end, from now on."""
        queue = pause.name if pause.scope is Scope.QUEUE else ""
        task = pause.name if pause.scope is Scope.TASK else ""
        self._sink.emit(Event("control_changed", "", task, queue, reason=f"{pause} is {what}"))

    def adjusted(self, what: str) -> None:
        """Report another number of tasks at the same time, or another limit, from now on."""
        self._sink.emit(Event("control_changed", "", "", "", reason=what))

    def flush(self) -> None:
        """Write the events that were reported."""
        self._sink.flush()

    def tick(self, now: float) -> None:
        """Write the log's summary if it is due. now: on the clock of the deadlines."""
        self._log.tick(now)

    def close(self) -> None:
        """Write the last summary and all events, and close the sink."""
        self._log.close()
        self._sink.close()

    def summary(self) -> str:
        """The counts for the worker's last log line."""
        order = ["succeeded", "failed", "retrying", "snoozed", "waiting", "expired", "cancelled"]
        rare = ["put_off", "dead-lettered", "lease_lost", "settle_failed"]
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
        item: WorkItem,
        *,
        ts: float = 0.0,
        duration: float | None = None,
        wait: float | None = None,
        lease: float | None = None,
        margin: float | None = None,
        held: float | None = None,
        error_type: str | None = None,
        error: str | None = None,
        reason: str | None = None,
    ) -> None:
        message = item.opened.message if item.opened is not None else None
        self._sink.emit(
            Event(
                kind,
                message.id if message else item.delivery.envelope.message_id,
                message.task if message else "",
                item.queue,
                item.delivery.delivery_count,
                message.resubmit_count if message else 0,
                duration,
                wait,
                lease,
                margin,
                error_type,
                error,
                ts,
                held_seconds=held,
                renewals=None if held is None else item.lease.renewals,
                reason=reason,
                workflow_id=message.workflow if message else None,
                parent_id=message.parent_id if message else None,
            )
        )
