"""The decisions about a delivery: before it runs, and after its run has ended.

Each method decides (`WorkItem.decide`) or makes the item ready to run. Nothing is recorded or sent
here.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from aztask.app import App
from aztask.errors import did_you_mean
from aztask.message.message import TaskMessage
from aztask.retry import describe
from aztask.settlement import Complete, DeadLetter, Decision, Resubmit
from aztask.steps.waits import wait_from
from aztask.stores.records.base import (
    PARKED,
    RENEWED,
    Cancelled,
    Foreign,
    OtherTask,
    Outcome,
    Outdated,
    OwnedElsewhere,
    Recorded,
    StartAnswer,
    State,
    Unreadable,
)
from aztask.stores.records.owners import FOREIGN_ID, OTHER_TASK
from aztask.support.clock import Clock
from aztask.support.display import mask, storable
from aztask.support.floodlog import FloodLog
from aztask.worker.logs import next_step
from aztask.worker.pipeline.redelivery import NO_KEY, UNKNOWN_TASK, Redelivery
from aztask.worker.pipeline.work import Step, Waits, WorkItem, message_of

logger = logging.getLogger(__name__)

DELIVERY_LIMIT: Final = "delivery-limit"
UNREADABLE_RECORD: Final = "unreadable-record"

UNKNOWN_TASK_STEPS: Final = 10
LONGEST_UNKNOWN_PAUSE: Final = 30.0
SHORTEST_PARKING: Final = 1.0
LONGEST_PARKING: Final = 6 * 86400.0
"""A Storage queue hides a message for at most 7 days."""


class Decisions:
    """Decides how deliveries end. Any thread may call."""

    def __init__(self, app: App, redelivery: Redelivery, clock: Clock, floods: FloodLog) -> None:
        self._app = app
        self._floods = floods
        self._redelivery = redelivery
        self._clock = clock

    # -- before the run ----------------------------------------------------------------------

    def early(self, item: WorkItem) -> bool:
        """Whether it arrived before its eta, which only foreign producers set.

        If so, it is resubmitted for that time: it waits in the broker, never here.
        """
        message = message_of(item)
        early = (message.eta or 0.0) - self._clock.wall()
        if early <= 0:
            return False
        clone = message.chained(delivery_base=self._redelivery.delivery_base(item))
        item.decide(Resubmit(delay=early, counted=False), clone=clone)
        return True

    def unknown(self, item: WorkItem) -> tuple[float, float] | None:
        """Decide whether a delivery that cannot run here waits for a worker that can run it.

        Such a worker knows the task, and has the key with which the message is encrypted.

        Returns for how many seconds it is put off, and since when this is so. None if the
        grace has passed, so that it is claimed and dead-lettered; and in a session, where the
        message itself waits and nothing but the count in its row tells for how long.
        """
        message, now = message_of(item), self._clock.wall()
        since = _unknown_since(message, now)
        if item.in_order or now - since >= self._app.settings.unknown_task_grace_seconds:
            return None
        self._log_unknown(item)
        return self._unknown_delay, since

    def claimed(self, item: WorkItem, answer: StartAnswer) -> None:
        """Decide after the store's answer to the start."""
        if isinstance(answer, Recorded):
            outcome = answer.outcome
            item.decide(outcome.settlement, outcome, recorded=True, repeated=True)
        elif isinstance(answer, OwnedElsewhere):
            item.decide(Complete())
        elif isinstance(answer, Outdated):  # its lease has ended: there is nothing to settle
            item.note("lease_lost", "a newer delivery of the message has started")
            item.end()
        elif isinstance(answer, Unreadable):
            # The run may have ended, so it is not repeated; the dead letter keeps its message.
            self._log_dead(item, UNREADABLE_RECORD, answer.reason)
            item.decide(DeadLetter(UNREADABLE_RECORD, answer.reason))
        elif isinstance(answer, Foreign):
            # Nothing is recorded: the row is the other owner's. A replay has a row of its own.
            text = (
                f"task id {item.key.task_id} belongs to {answer.broker}, which shares the result "
                f"store with {self._app.owner.broker}; send it again under another id"
            )
            self._log_dead(item, FOREIGN_ID, text)
            item.decide(DeadLetter(FOREIGN_ID, text))
        elif isinstance(answer, OtherTask):
            text = (
                f"task id {item.key.task_id} is that of task {answer.task} in queue {answer.queue}:"
                " another program has used it; send the task again under another id, or replay it"
            )
            self._log_dead(item, OTHER_TASK, text)
            item.decide(DeadLetter(OTHER_TASK, text))
        elif isinstance(answer, Cancelled):
            item.claim(answer.starts)
            self.cancelled(item)
        else:
            self._redelivery.own(item, answer)
            self._before_run(item, answer.starts)
        item.tries = 0

    def _before_run(self, item: WorkItem, starts: int) -> None:
        """Find a reason not to run a delivery that we own; without one it is ready."""
        message = message_of(item)
        limit = self._redelivery.start_limit(item)
        now = self._clock.wall()
        if message.expires is not None and now >= message.expires:
            self._conclude(item, State.EXPIRED, Complete())
        elif starts > limit:
            text = f"started {limit} times without an outcome; the worker's log has the cause"
            self._log_dead(item, DELIVERY_LIMIT, text)
            self._conclude(item, State.FAILED, DeadLetter(DELIVERY_LIMIT, text))
        elif item.dropped:
            self.cancelled(item)
        elif item.refusal is not None:
            self._log_dead(item, *item.refusal)
            self._conclude(item, State.FAILED, DeadLetter(*item.refusal))
        elif item.task is None:
            self._unknown_task(item, now)
        elif item.instead is not None:
            if isinstance(item.instead.settlement, DeadLetter):
                dead = item.instead.settlement
                self._log_dead(item, dead.reason, dead.description)
            item.decide(item.instead.settlement, item.instead)
        else:
            item.change(Step.CLAIM)

    def _unknown_task(self, item: WorkItem, now: float) -> None:
        """Dead-letter it: its grace has passed, see `unknown`.

        In a session it is snoozed until then, because the same message is redelivered in its place:
        the number of its snoozes says how long it has waited.
        """
        message = message_of(item)
        grace = self._app.settings.unknown_task_grace_seconds
        delay = self._unknown_delay
        since = _unknown_since(message, now)
        waited = message.snooze_count * delay if item.in_order else now - since
        if waited < grace:
            self._log_unknown(item)
            settlement = self._redelivery.put_off(item, delay)
            why = NO_KEY if self._app.codec.locked(message) else UNKNOWN_TASK
            self._conclude(item, State.SNOOZED, settlement, why)
        else:
            reason, text = UNKNOWN_TASK, f"no worker knew the task {message.task!r} for {grace:g} s"
            if locked := self._app.codec.locked(message):
                reason, text = NO_KEY, f"no worker had its key for {grace:g} s: {locked}"
            self._log_dead(item, reason, text)
            self._conclude(item, State.FAILED, DeadLetter(reason, text))

    @property
    def _unknown_delay(self) -> float:
        """Seconds between two tries to find a worker that knows the task."""
        grace = self._app.settings.unknown_task_grace_seconds
        return min(LONGEST_UNKNOWN_PAUSE, grace / UNKNOWN_TASK_STEPS)

    def _log_unknown(self, item: WorkItem) -> None:
        if locked := self._app.codec.locked(message_of(item)):
            self._floods.warning(
                logger,
                f"{NO_KEY}, to be retried",
                "%s: %s. A worker that has the key may still run it: retry in %g s, dead-lettered "
                "after %g s (unknown_task_grace)",
                item.label,
                locked,
                self._unknown_delay,
                self._app.settings.unknown_task_grace_seconds,
            )
            return
        self._floods.warning(
            logger,
            f"{UNKNOWN_TASK}, to be retried",
            "%s: this app has no such task.%s A worker that has it may still run it: retry in "
            "%g s, dead-lettered after %g s (unknown_task_grace)",
            item.label,
            did_you_mean(message_of(item).task, tuple(self._app.tasks)),
            self._unknown_delay,
            self._app.settings.unknown_task_grace_seconds,
        )

    def _log_dead(self, item: WorkItem, reason: str, text: str) -> None:
        """Log a dead letter that no failed run explains."""
        line = "%s did not run, dead-lettered: %s: %s"
        self._floods.warning(logger, reason, line, item.label, reason, text)

    # -- after the run -----------------------------------------------------------------------

    def succeeded(self, item: WorkItem, value: bytes) -> None:
        """Decide for a task that returned `value`, encoded."""
        settlement = Complete()
        outcome = Outcome(
            State.SUCCEEDED, settlement, value, at=self._clock.wall(), duration=item.duration
        )
        item.decide(settlement, outcome)

    def failed(
        self, item: WorkItem, decision: Decision, error_type: str, error: str, trace: str
    ) -> None:
        """Decide for a task that raised an error. decision: of its retry policy."""
        state = State.FAILED
        settlement = self._redelivery.decide(item, decision)
        if not isinstance(settlement, DeadLetter) and not item.settled:
            counted = not isinstance(decision, Resubmit) or decision.counted
            state = State.RETRYING if counted else State.SNOOZED
        self._conclude(item, state, settlement, error_type, error, trace)

    def parked(
        self, item: WorkItem, delay: float, what: str, since: float, waits: Sequence[object]
    ) -> None:
        """Decide for a task that waits for `delay` seconds: its next hop goes on.

        A long wait is cut: the run wakes, finds that its time has not come, and waits again. So its
        row in the result store is never as old as the retention, and nothing that purges by age
        takes a task that waits for one that has ended.

        * `since`: UTC epoch seconds. `waits`: each the parts of a `Wait`.
        """
        longest = max(SHORTEST_PARKING, self._app.settings.result_retention_seconds / 2)
        delay = min(delay, longest, LONGEST_PARKING)
        item.waits_for = Waits(since, tuple(wait_from(each) for each in waits))
        settlement = replace(self._redelivery.resubmit(delay, counted=False), asked=True)
        self._conclude(item, State.SNOOZED, settlement, PARKED, what)

    def renewed(self, item: WorkItem, what: str) -> None:
        """Decide for a task that continues with other arguments: its next hop is due at once."""
        settlement = replace(self._redelivery.resubmit(0.0, counted=False), asked=True)
        self._conclude(item, State.SNOOZED, settlement, RENEWED, what)

    def died(self, item: WorkItem, error_type: str, error: str) -> None:
        """Decide for a task whose process died or was killed at a limit."""
        policy = item.task.retry if item.task else self._app.retry
        decision = policy.decide_named(error_type, error, message_of(item))
        follows = next_step(
            decision,
            message_of(item),
            max_retries=policy.max_retries,
            strategy=self._redelivery.strategy(item),
            now=self._clock.wall(),
            settled=item.settled,
        )
        logger.warning("%s failed, %s: %s", item.label, follows, describe(error_type, error))
        self.failed(item, decision, error_type, error, "")

    def cancelled(self, item: WorkItem) -> None:
        """Decide for a task that was cancelled, before or during its run."""
        self._conclude(item, State.CANCELLED, Complete())

    def _conclude(
        self,
        item: WorkItem,
        state: State,
        settlement: Decision,
        error_type: str = "",
        error: str = "",
        trace: str = "",
    ) -> None:
        if isinstance(settlement, DeadLetter) and not error_type:
            error_type, error = settlement.reason, settlement.description
        texts = (storable(mask(error_type)), storable(mask(error)), storable(mask(trace)))
        outcome = Outcome(state, settlement, None, *texts, self._clock.wall(), item.duration)
        item.decide(settlement, outcome)


def _unknown_since(message: TaskMessage, now: float) -> float:
    """Since when no worker knows the task.

    A future time, which a hostile sender or a wrong clock wrote, counts as now. Otherwise the
    message would be put off without end.
    """
    return now if message.unknown_since is None else min(message.unknown_since, now)
