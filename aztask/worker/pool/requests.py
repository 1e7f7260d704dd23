"""What a running task asks the worker for: a longer lease, a stored checkpoint, session state."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from aztask.brokers.base import SessionHolder
from aztask.brokers.delivery import Renewed
from aztask.errors import AztaskError, LeaseError, LeaseLost, MessageTooLarge
from aztask.message.envelope import Envelope
from aztask.message.message import TaskMessage
from aztask.support.display import safe_str
from aztask.worker.lane import Lane
from aztask.worker.pipeline.work import WorkItem, message_of
from aztask.worker.pool.answers import LOST, TOO_LARGE
from aztask.worker.pool.children import PoolProcess
from aztask.worker.pool.timelimits import TimeLimits
from aztask.worker.runtime import WorkerRuntime

logger = logging.getLogger(__name__)

RETRY_RESERVE = 1024
"""Bytes kept free beside a checkpoint, for the counters and times that a retry adds."""


@dataclass(slots=True)
class TaskRequest:
    """kind: "save", "state" or "set-state". error: why it could not be done, "" when it was."""

    process: PoolProcess
    item: WorkItem
    kind: str
    value: bytes | None = None
    error: str = ""


class TaskRequests:
    """Answers them: extensions through the keeper, the others through a lane of their own."""

    def __init__(self, runtime: WorkerRuntime, limits: TimeLimits) -> None:
        self._app = runtime.app
        self._keeper = runtime.keeper
        self._clock = runtime.clock
        self._limits = limits
        self._lane: Lane[TaskRequest] = Lane(
            "requests",
            self._do_all,
            self._answer_all,
            runtime.mailbox,
            threads=runtime.lane_threads,
        )

    def answer(self, process: PoolProcess, kind: str, number: int, *details: Any) -> None:
        """Begin to do what the task that delivery `number` runs asked for."""
        item = process.items.get(number)
        if item is None:
            return
        if kind == "extend":
            if item.settled:  # at most once: there is no lease to lose
                process.tell(["renewed", number, item.delivery.deadline])
                return
            seconds = max(details[0], item.lease.seconds)
            self._keeper.extend(item.lease, seconds, self._limits.limit_at(item))
        elif kind in ("save", "state", "set-state"):
            self._lane.submit([TaskRequest(process, item, kind, *details)])
            self._lane.turn()

    def stop(self) -> None:
        """Finish what is under way."""
        self._lane.stop()

    def _do_all(self, requests: Sequence[TaskRequest]) -> None:
        for request in requests:
            try:
                if request.kind == "save":
                    request.error = self._save(request.item, request.value or b"")
                else:
                    self._exchange(request)
            except Exception as error:  # it is this task's alone, and the task waits for an answer
                logger.exception("task %s: %s failed", request.item.key.task_id, request.kind)
                request.error = f"{type(error).__name__}: {safe_str(error)}"

    def _answer_all(self, requests: Sequence[TaskRequest]) -> None:
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
            request.error = f"queue {item.queue!r} has no sessions, so there is no state to keep"
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
                logger.warning("the state of session %s: %s", session, error)
                request.error = str(error)

    def _save(self, item: WorkItem, state: bytes) -> str:
        """Why it could not be stored, `LOST` when the lease is; "" when it is stored.

        One request replaces the content and renews the lease: either both happen or neither.
        """
        if item.opened is None or item.settled:
            return "a message that is gone already (at-most-once) cannot hold a checkpoint"
        if not self._app.broker.capabilities.update:
            return self._keep(item, state)
        try:
            envelope = self._checked(item.opened.message, state)
            answer = self._keeper.update(item.lease, item.receiver, envelope)
        except AztaskError as error:
            return _reason(item, error)
        return "" if isinstance(answer, Renewed) else LOST

    def _checked(self, message: TaskMessage, state: bytes) -> Envelope:
        """The message with this checkpoint. Raises MessageTooLarge if a retry cannot carry it."""
        envelope = self._app.codec.to_envelope(replace(message, saved=state))
        self._app.broker.check(envelope, reserve=RETRY_RESERVE)
        return envelope

    def _keep(self, item: WorkItem, state: bytes) -> str:
        """As `_save`, where the service cannot change a message: in the run's row of the result
        store. A redelivery finds it there; a clone carries it in its headers as usual.
        """
        results = self._app.results
        if results is None:
            return "checkpoints need a result store here: this service cannot change a message"
        try:
            self._checked(message_of(item), state)
            kept = results.save(item.key, item.owner, state)
        except AztaskError as error:
            return _reason(item, error)
        return "" if kept else LOST


def _reason(item: WorkItem, error: AztaskError) -> str:
    """Why a checkpoint is not stored, as `Answers` understands it."""
    logger.warning("could not store the checkpoint of %s: %s", item.key.task_id, error)
    if isinstance(error, LeaseError):
        return LOST
    if isinstance(error, MessageTooLarge):
        return f"{TOO_LARGE}the checkpoint does not fit: {error}"
    return str(error)
