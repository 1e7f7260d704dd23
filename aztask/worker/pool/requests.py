"""The requests of running tasks: a longer lease, a stored checkpoint, the state of a session.

What a task has used of a limit is noted, too, and needs no answer.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from aztask.errors import AztaskError, LeaseError, LeaseLost, MessageTooLarge
from aztask.message.envelope import Envelope
from aztask.message.message import TaskMessage
from aztask.queues.base import SessionHolder
from aztask.queues.delivery import Renewed
from aztask.support.display import safe_str
from aztask.worker.lane import Work
from aztask.worker.pipeline.work import WorkItem, message_of
from aztask.worker.pool.leaseguard import NO_DEADLINE
from aztask.worker.pool.packets import LOST, TOO_LARGE
from aztask.worker.pool.pool import PoolProcess
from aztask.worker.pool.timelimits import TimeLimits
from aztask.worker.runtime import WorkerRuntime

logger = logging.getLogger(__name__)

RETRY_RESERVE = 1024
"""Bytes kept free beside a checkpoint for the counters and times that a retry adds."""


@dataclass(slots=True)
class TaskRequest:
    """kind: "save", "state" or "set-state". error: why it failed, "" if it did not."""

    process: PoolProcess
    item: WorkItem
    kind: str
    value: bytes | None = None
    error: str = ""


class TaskRequests(Work[TaskRequest]):
    """Answers requests: extensions through the lease keeper, the others on a lane."""

    def __init__(self, runtime: WorkerRuntime, limits: TimeLimits) -> None:
        self._app = runtime.app
        self._keeper = runtime.keeper
        self._clock = runtime.clock
        self._limits = limits
        self._lane = runtime.lane("requests", self, threads=runtime.lane_threads)

    def answer(self, process: PoolProcess, kind: str, number: int, *details: Any) -> None:
        """Start to handle a request of the task that runs delivery `number`."""
        item = process.items.get(number)
        if item is None:
            return
        if kind == "extend":
            if item.settled:  # at most once: there is no lease to lose
                process.tell(["renewed", number, min(NO_DEADLINE, item.permits_until)])
                return
            seconds = max(details[0], item.lease.seconds)
            self._keeper.extend(item.lease, seconds, self._limits.limit_at(item))
        elif kind == "spent":
            limit, amount = details
            item.spent[limit] = item.spent.get(limit, 0) + amount
        elif kind in ("save", "state", "set-state"):
            self._lane.submit([TaskRequest(process, item, kind, *details)])
            self._lane.turn()

    def stop(self) -> None:
        """Finish the pending requests and end the lane."""
        self._lane.stop()

    def work(self, requests: Sequence[TaskRequest]) -> None:
        """Carry these out; on a thread of the lane."""
        for request in requests:
            try:
                if request.kind == "save":
                    request.error = self._save(request.item, request.value or b"")
                else:
                    self._exchange(request)
            except Exception as error:  # the task waits for an answer, and no other task fails
                logger.exception(
                    "%s: request %r failed, the task gets the error",
                    request.item.label,
                    request.kind,
                )
                request.error = f"{type(error).__name__}: {safe_str(error)}"

    def done(self, requests: Sequence[TaskRequest]) -> None:
        """Answer the tasks, which wait for it."""
        for request in requests:
            item, value = request.item, None
            if request.kind == "state":
                value = request.value
            elif request.kind == "save" and not request.error:
                item.rewrite(saved=request.value)
            request.process.tell(["answer", item.number, request.error, value])

    def _exchange(self, request: TaskRequest) -> None:
        """Read or write the state of the item's session, on the connection that holds it."""
        item, holder = request.item, request.item.receiver
        session = item.delivery.session or ""
        if not isinstance(holder, SessionHolder):
            request.error = f"queue {item.queue!r} has no sessions, so it keeps no session state"
        elif not item.settled and not item.lease.alive(self._clock.monotonic()):
            request.error = LOST
        else:
            try:
                if request.kind == "state":
                    request.value = holder.session_state(session)
                else:
                    holder.set_session_state(session, request.value)
            except LeaseLost:
                request.error = LOST
            except AztaskError as error:
                logger.warning(
                    "%s: the state of session %s is unavailable, the task gets the error: %s",
                    item.label,
                    session,
                    error,
                )
                request.error = str(error)

    def _save(self, item: WorkItem, state: bytes) -> str:
        """Store a checkpoint; returns "", `LOST`, or why it could not be stored.

        One request replaces the content and renews the lease: either both happen or neither.
        """
        if item.opened is None or item.settled:
            return "an at-most-once message is completed before it runs: it holds no checkpoint"
        if not self._app.broker.capabilities.update:
            return self._keep(item, state)
        try:
            envelope = self._checked(item.opened.message, state)
            answer = self._keeper.update(item.lease, item.receiver, envelope)
        except AztaskError as error:
            return _reason(item, error)
        return "" if isinstance(answer, Renewed) else LOST

    def _checked(self, message: TaskMessage, state: bytes) -> Envelope:
        """The message with this checkpoint. Raises MessageTooLarge if a retry would not fit."""
        envelope = self._app.codec.to_envelope(replace(message, saved=state))
        self._app.broker.check(envelope, reserve=RETRY_RESERVE)
        return envelope

    def _keep(self, item: WorkItem, state: bytes) -> str:
        """As `_save`, for services that cannot change a message: store it in the run's row.

        A redelivery finds it in the result store; a clone carries it in its headers as usual.
        """
        results = self._app.results
        if results is None:
            return "this broker cannot change a message: checkpoints need a result store"
        try:
            self._checked(message_of(item), state)
            kept = results.save(item.key, item.owner, state)
        except AztaskError as error:
            return _reason(item, error)
        return "" if kept else LOST


def _reason(item: WorkItem, error: AztaskError) -> str:
    """Log why a checkpoint is not stored; returns the error as `Answers` reads it."""
    logger.warning(
        "%s: its checkpoint was not stored, the task gets the error: %s", item.label, error
    )
    if isinstance(error, LeaseError):
        return LOST
    if isinstance(error, MessageTooLarge):
        return f"{TOO_LARGE}the checkpoint does not fit: {error}"
    return str(error)
