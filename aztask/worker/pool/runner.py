"""Runs one delivery's task in a slot and answers with the decision about its message.

Packets from the worker
    inbox:   [number, message fields, delivery_count, deadline], and for a task of a workflow that
             takes a value: its input (`aztask.workflows.inputs`)
    control: ["renewed", number, deadline] | ["lost", number, reason]
             | ["answer", number, error, value] | ["interrupt", number, kind, text]
Packets to the worker
    ["done", number, started, seconds, value] | ["lost", number, started, seconds]
    | ["failed", number, started, seconds, settlement, type, text, traceback]
    | ["save", number, state] | ["extend", number, seconds]
    | ["state", number] | ["set-state", number, state] | ["overdue", number, process ends]

Rules
1. Whatever task code raises, `SystemExit` and `KeyboardInterrupt` included, is a failed attempt.
   The decision of the task's retry policy is the answer, and the slot continues.
2. Texts are cleaned here, at their source (`aztask.support.display.storable`), so that every store
   and service can take them.
3. A process that a task forks has a copy of this one's stack. It must neither answer nor take the
   next delivery: when the task's function returns there, the process ends.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
import os
import socket
import sys
import threading
import time
from contextlib import nullcontext, suppress
from typing import Any, NoReturn

from aztask.app import App
from aztask.context import Context, TaskLease, set_current_context
from aztask.errors import (
    AztaskError,
    CodecError,
    EncodeError,
    LeaseLost,
    MaxLeaseExceeded,
    Reject,
    Retry,
    TaskControl,
    TaskStopped,
    TimeLimitExceeded,
)
from aztask.message.message import MESSAGE_FIELDS, TaskMessage
from aztask.retry import describe
from aztask.sending.sessionrules import strategy_in_session
from aztask.session import Session
from aztask.settlement import REASON_LIMIT, DeadLetter, Decision, to_record
from aztask.support.clock import boot_seconds
from aztask.support.display import safe_str, storable, traceback_of
from aztask.support.failpoint import hit_in_pool
from aztask.support.frozen import build
from aztask.support.masking import mask
from aztask.task import Task
from aztask.worker.logs import next_step
from aztask.worker.pool.answers import Answers
from aztask.worker.pool.board import Board
from aztask.worker.pool.interrupt import InterruptSlot
from aztask.worker.pool.leaseguard import LeaseGuard
from aztask.worker.pool.packets import Packets
from aztask.worker.pool.traces import trim_traceback
from aztask.workflows.inputs import first_argument

logger = logging.getLogger(__name__)

NAME_CHARACTERS = 200
ERROR_CHARACTERS = 4_000
TRACEBACK_CHARACTERS = 16_000

INTERRUPTS: dict[str, type[AztaskError]] = {
    "lease": LeaseLost,
    "limit": TimeLimitExceeded,
    "max-lease": MaxLeaseExceeded,
    "cancel": TaskStopped,
}


class Runner:
    """Runs deliveries for all slots of a pool process."""

    def __init__(
        self, app: App, board: Board, outbox: Packets, guard: LeaseGuard, worker: int
    ) -> None:
        """worker: the process id of the worker."""
        self._app = app
        self._pid = os.getpid()
        self._worker = worker
        self._board = board
        self._outbox = outbox
        self._guard = guard
        self._answers = Answers()
        self._local = threading.local()

    def run(self, slot: InterruptSlot, packet: list[Any]) -> None:
        """Run the delivery in `packet` and send the answer."""
        number, fields, delivery_count, deadline, *given = packet
        message = build(TaskMessage, dict(zip(MESSAGE_FIELDS, fields, strict=True)))
        lease = TaskLease(deadline, ask=lambda seconds: self._send(["extend", number, seconds]))
        self._guard.begin(number, lease, deadline)
        started = boot_seconds()
        self._board.note(slot.index, number, started)
        if lease.lost:
            answer: list[Any] = ["lost"]
        else:
            answer = self._attempt(slot, number, message, delivery_count, lease, given)
        if os.getpid() != self._pid:
            _end_forked(message, None)
        self._guard.end(number)
        self._board.clear(slot.index)
        answer[1:1] = (number, started, boot_seconds() - started)
        self._send(answer)

    def handle(self, kind: str, number: int, *rest: Any) -> None:
        """Handle a control packet about a delivery, which may have ended here."""
        if kind == "answer":
            self._answers.answer(number, *rest)
        elif kind == "renewed":
            self._guard.renewed(number, rest[0])
        elif kind == "lost":
            self._guard.lose(number, rest[0])

    def interrupt(self, slots: list[InterruptSlot], number: int, kind: str, text: str) -> None:
        """Raise the error that `kind` stands for in the task. text: why."""
        if kind == "lease":
            self._guard.lose(number, text)
        for slot in slots:
            slot.interrupt(number, INTERRUPTS[kind])

    def stop_overdue(self, slots: list[InterruptSlot], now: float) -> None:
        """Stop the runs whose leases ended by `now` without news from the worker (`LeaseGuard`).

        The worker may not be reading, so nothing here waits for it, not even to log.
        """
        interrupt, end = self._guard.overdue(now)
        for number in interrupt:
            self._report(["overdue", number, False])
            for slot in slots:
                slot.interrupt(number, LeaseLost)
        if end is not None:
            self._report(["overdue", end, True])
            os._exit(1)

    def _report(self, packet: list[Any]) -> None:
        with suppress(OSError):  # the worker has ended
            self._outbox.send(packet, socket.MSG_DONTWAIT)

    def _attempt(
        self,
        slot: InterruptSlot,
        number: int,
        message: TaskMessage,
        delivery_count: int,
        lease: TaskLease,
        given: list[Any],
    ) -> list[Any]:
        """The answer, without number and times. given: the input, if the task takes one."""
        task = self._app.tasks.get(message.task)
        try:
            try:
                if task is None:
                    raise EncodeError(
                        f"the pool process has not registered the task {message.task!r}"
                    )
                args, kwargs = self._app.codec.decode_arguments(message)
                if given:
                    args = (first_argument(self._app.codec, *given[0]), *args)
                saved = self._app.codec.decode_value(message.saved) if message.saved else None
            except CodecError as error:
                verdict = DeadLetter("undecodable", str(error))
                return ["failed", to_record(verdict), *_described(error)]
            context = Context(
                message,
                delivery_count=delivery_count,
                lease=lease,
                saved=saved,
                save=lambda state: self._save(number, state, lease),
                session=self._session(number, message.session, lease) if message.session else None,
            )
            if task.lease_of is not None:
                self._send(["extend", number, float(task.lease_of(*args, **kwargs))])
            try:
                slot.begin(number)
                set_current_context(context)
                try:
                    value = self._call(task, context, args, kwargs)
                finally:
                    slot.end()
            finally:
                set_current_context(None)
            hit_in_pool("ran", self._worker)
            return ["done", self._app.codec.encode_value(value)]
        except LeaseLost:
            return ["lost"]
        except BaseException as error:  # noqa: BLE001  # task code may raise anything at all
            return self._failed(task, error, message)

    def _call(
        self, task: Task[..., Any], context: Context, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        hook = self._app.hooks.run
        with hook.around(context) if hook else nullcontext():
            value = task.call(context, args, kwargs)
            if inspect.isawaitable(value):
                runner: asyncio.Runner | None = getattr(self._local, "asyncio", None)
                if runner is None:
                    runner = self._local.asyncio = asyncio.Runner()
                # In the context of this call: hooks and tasks may have set variables in it.
                value = runner.run(_awaited(value), context=contextvars.copy_context())
        return value

    def _failed(
        self, task: Task[..., Any] | None, error: BaseException, message: TaskMessage
    ) -> list[Any]:
        if os.getpid() != self._pid:
            _end_forked(message, error)
        trim_traceback(error)
        policy = task.retry if task is not None else self._app.retry
        if isinstance(error, EncodeError):
            # Another run would most likely return the same value, so it is not retried.
            verdict: Any = DeadLetter("unserialisable-result", safe_str(error, REASON_LIMIT))
        else:
            verdict = policy.decide(error, message)
        if not isinstance(error, TaskControl | TaskStopped):
            logger.warning(
                "task %s %s failed, %s: %s",
                message.task, message.id, self._next_step(task, verdict, message),
                describe(type(error).__name__, safe_str(error, ERROR_CHARACTERS)),
                exc_info=error,
            )  # fmt: skip
        elif isinstance(error, Retry | Reject) or isinstance(verdict, DeadLetter):
            logger.warning(
                "task %s %s raised %s, %s",
                message.task, message.id, describe(type(error).__name__, safe_str(error, 500)),
                self._next_step(task, verdict, message),
            )  # fmt: skip
        return ["failed", to_record(verdict), *_described(error)]

    def _next_step(
        self, task: Task[..., Any] | None, verdict: Decision, message: TaskMessage
    ) -> str:
        """What the worker will do now, for the log."""
        strategy: str = self._app.settings.retry_strategy
        if message.session:
            strategy = strategy_in_session(
                task, self._app.settings.retry_strategy, ordered=message.ordered
            )
        elif task is not None:
            strategy = task.retry_strategy
        return next_step(
            verdict,
            message,
            max_retries=(task.retry if task is not None else self._app.retry).max_retries,
            strategy=strategy,
            now=time.time(),
            settled=task is not None and task.delivery == "at-most-once",
        )

    def _save(self, number: int, state: Any, lease: TaskLease) -> None:
        self._send(["save", number, self._app.codec.encode_value(state)])
        self._answers.wait(number, lease)

    def _session(self, number: int, name: str, lease: TaskLease) -> Session:
        codec = self._app.codec

        def load() -> Any:
            lease.ensure()
            self._send(["state", number])
            state = self._answers.wait(number, lease)
            return None if state is None else codec.decode_value(state)

        def store(value: Any) -> None:
            lease.ensure()
            state = None if value is None else codec.encode_value(value)
            self._send(["set-state", number, state])
            self._answers.wait(number, lease)

        return Session(name, load=load, store=store)

    def _send(self, packet: list[Any]) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError(
                "a process that a task forked cannot use the task's context; "
                "return the value to the task and store it there"
            )
        self._outbox.send(packet)


async def _awaited(value: Any) -> Any:
    return await value


def _end_forked(message: TaskMessage, error: BaseException | None) -> NoReturn:
    """End a process that the task forked, as if its program had ended (rule 3)."""
    status = 0 if error is None else 1
    if isinstance(error, SystemExit):
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    elif error is not None:
        logger.warning(
            "task %s %s: a process that it forked ended with an error; the task continues",
            message.task, message.id, exc_info=error,
        )  # fmt: skip
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(status & 0xFF)


def _described(error: BaseException) -> tuple[str, str, str]:
    """(type, text, traceback) of an error, for a record: cut, cleaned, secrets masked."""
    try:
        text = str(error)
    except BaseException as broken:  # noqa: BLE001  # a user's __str__ may fail or exit as well
        text = f"(its text cannot be read: {type(broken).__name__})"
    return (
        storable(type(error).__name__, NAME_CHARACTERS),
        storable(mask(text[: 2 * ERROR_CHARACTERS]), ERROR_CHARACTERS),
        storable(
            mask(traceback_of(error)[-2 * TRACEBACK_CHARACTERS :])[-TRACEBACK_CHARACTERS:],
            TRACEBACK_CHARACTERS,
        ),
    )
