"""Runs one delivery's task in a slot and answers with the decision about its message.

Packets from the worker
    inbox:   [number, message fields, delivery_count, deadline, enqueued_at], and for a task of a
             workflow that takes a value: its input (`aztask.workflows.inputs`); for one that has a
             slot: its input or None, and the times when it may start [from, until]
    control: ["renewed", number, deadline] | ["lost", number, reason]
             | ["answer", number, error, value] | ["interrupt", number, kind, text]
             | ["stopping", 0] | ["ping", 0]
Packets to the worker
    ["done", number, started, seconds, value] | ["lost", number, started, seconds]
    | ["stopped", number, started, seconds]
    | ["late", number]
    | ["failed", number, started, seconds, settlement, type, text, traceback]
    | ["parked", number, started, seconds, delay, text, since, waits]
    | ["save", number, state] | ["extend", number, seconds] | ["spent", number, limit, amount]
    | ["state", number] | ["set-state", number, state] | ["overdue", number, process ends]
    | ["alive"], the answer to a ping
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
import os
import time
from collections.abc import Awaitable
from contextlib import suppress
from typing import Any, Final

from aztask.app import App
from aztask.context import TaskLease, note_stopping, set_current_context
from aztask.errors import (
    AztaskError,
    LeaseLost,
    MaxLeaseExceeded,
    TaskStopped,
    TimeLimitExceeded,
    WorkerStopping,
)
from aztask.message.message import MESSAGE_FIELDS, TaskMessage, build
from aztask.steps.emitting import Emission, MemoryEmission
from aztask.support.clock import boot_seconds
from aztask.worker.pool.attempt import OpenRun, RunReader
from aztask.worker.pool.eventloop import LazyLoop
from aztask.worker.pool.interrupt import CoroutineRun, InterruptSlot
from aztask.worker.pool.leaseguard import LeaseGuard
from aztask.worker.pool.link import Board
from aztask.worker.pool.packets import Answers, PacketsOut

logger = logging.getLogger(__name__)

TIMED: Final = 7
"""Values in the packet of a delivery that has a slot."""

INTERRUPTS: dict[str, type[AztaskError]] = {
    "lease": LeaseLost,
    "limit": TimeLimitExceeded,
    "max-lease": MaxLeaseExceeded,
    "cancel": TaskStopped,
    "stopping": WorkerStopping,
}


class SlotRunner:
    """Runs deliveries for all slots of a pool process."""

    def __init__(
        self,
        app: App,
        board: Board,
        outbox: PacketsOut,
        guard: LeaseGuard,
        worker: int,
        loop: LazyLoop,
    ) -> None:
        """worker: the process id of the worker."""
        self._board = board
        self._outbox = outbox
        self._guard = guard
        self._answers = Answers()
        self._attempts = RunReader(app, outbox, self._answers, worker)
        self._loop = loop
        self._slots: dict[int, InterruptSlot] = {}

    def run(self, slot: InterruptSlot, packet: list[Any]) -> None:
        """Run the delivery in `packet` and send the answer.

        An error of ours ends the delivery alone. Raises OSError if the worker cannot be reached.
        """
        try:
            self._run(slot, packet)
        except OSError:
            raise
        except Exception as error:  # noqa: BLE001  # those of task code are answers
            self.give_up(slot, packet[0], error)

    def give_up(self, slot: InterruptSlot, number: int, error: Exception) -> None:
        """Answer for a delivery that failed because of an error of ours: it is redelivered."""
        logger.error("delivery %s failed unexpectedly, it is redelivered", number, exc_info=error)
        self._guard.end(number)
        self._slots.pop(number, None)
        self._board.clear(slot.index)
        self._attempts.send(["lost", number, boot_seconds(), 0.0])

    def _run(self, slot: InterruptSlot, packet: list[Any]) -> None:
        if len(packet) == TIMED:
            opens, closes = packet.pop()
            time.sleep(max(0.0, opens - boot_seconds()))
            if boot_seconds() > closes:
                self._attempts.send(["late", packet[0]])
                return
        delivery = self._begin(slot, packet)
        if delivery.lease.lost:
            answer = ["lost"]
        else:  # context variables that a run sets are gone with it
            answer = contextvars.copy_context().run(self._attempt, slot, delivery)
        self._end(slot, delivery, answer)

    async def run_coroutine(
        self, slot: InterruptSlot, packet: list[Any], run: CoroutineRun
    ) -> None:
        """As `run`, for a coroutine function; `run` is the asyncio task that calls this."""
        try:
            await self._run_coroutine(slot, packet, run)
        except OSError:
            raise
        except Exception as error:  # noqa: BLE001  # as above
            self.give_up(slot, packet[0], error)

    async def _run_coroutine(
        self, slot: InterruptSlot, packet: list[Any], run: CoroutineRun
    ) -> None:
        if len(packet) == TIMED:
            opens, closes = packet.pop()
            await asyncio.sleep(max(0.0, opens - boot_seconds()))
            if boot_seconds() > closes:
                self._attempts.send(["late", packet[0]])
                return
        delivery = self._begin(slot, packet)
        lost = delivery.lease.lost
        answer = ["lost"] if lost else await self._attempt_coroutine(slot, delivery, run)
        self._end(slot, delivery, answer)

    def handle(self, kind: str, number: int, *rest: Any) -> None:
        """Handle a control packet about a delivery, which may have ended here."""
        if kind == "answer":
            self._answers.answer(number, *rest)
        elif kind == "renewed":
            self._guard.renewed(number, rest[0])
        elif kind == "lost":
            self._guard.lose(number, rest[0])
        elif kind == "stopping":
            note_stopping()

    def interrupt(self, number: int, kind: str, text: str) -> None:
        """Raise the error that `kind` stands for in the task. text: why."""
        if kind == "lease":
            self._guard.lose(number, text)
        self._raise(number, INTERRUPTS[kind])

    def stop_overdue(self, now: float) -> None:
        """Stop the runs whose leases ended by `now` without news from the worker (`LeaseGuard`).

        The worker may not be reading, so nothing here waits for it, not even to log.
        """
        interrupt, end = self._guard.overdue(now)
        for number in interrupt:
            self.say(["overdue", number, False])
            self._raise(number, LeaseLost)
        if end is not None:
            self.say(["overdue", end, True])
            os._exit(1)

    def _raise(self, number: int, error: type[AztaskError]) -> None:
        slot = self._slots.get(number)
        if slot is not None:
            slot.interrupt(number, error)

    def say(self, packet: list[Any]) -> None:
        """Tell the worker something, unless it does not read now."""
        with suppress(OSError):  # the worker has ended
            self._outbox.send(packet, wait=False)

    def _begin(self, slot: InterruptSlot, packet: list[Any]) -> OpenRun:
        number, fields, delivery_count, deadline, enqueued_at, *more = packet
        given = [value for value in more if value is not None]
        message = build(TaskMessage, dict(zip(MESSAGE_FIELDS, fields, strict=True)))
        lease = TaskLease(
            deadline, ask=lambda seconds: self._attempts.send(["extend", number, seconds])
        )
        self._guard.begin(number, lease, deadline)
        started = boot_seconds()
        self._board.note(slot.index, number, started)
        self._slots[number] = slot
        return OpenRun(number, message, delivery_count, enqueued_at, lease, started, given)

    def _end(self, slot: InterruptSlot, delivery: OpenRun, answer: list[Any]) -> None:
        self._attempts.check_fork(delivery.message)
        self._guard.end(delivery.number)
        self._slots.pop(delivery.number, None)
        self._board.clear(slot.index)
        answer[1:1] = (delivery.number, delivery.started, boot_seconds() - delivery.started)
        self._attempts.send(answer)

    def _attempt(self, slot: InterruptSlot, delivery: OpenRun) -> list[Any]:
        """The answer, without number and times."""
        attempts, message = self._attempts, delivery.message
        try:
            call = attempts.open(delivery)
            try:
                slot.begin(delivery.number)
                set_current_context(call.context)
                try:
                    with attempts.hooks(call.context):
                        value = call.begin()
                        if inspect.isawaitable(value):
                            value = self._loop.get().call(value, slot)
                finally:
                    slot.end()
            finally:
                set_current_context(None)
            return attempts.value(value, call)
        except BaseException as error:  # noqa: BLE001  # task code may raise anything at all
            return attempts.error(error, message)

    async def _attempt_coroutine(
        self, slot: InterruptSlot, delivery: OpenRun, run: CoroutineRun
    ) -> list[Any]:
        """As `_attempt`, in the asyncio task whose context variables are its own."""
        attempts, message = self._attempts, delivery.message
        try:
            if attempts.fetching.needed(message, delivery.given):
                call = await asyncio.to_thread(attempts.open, delivery)
            else:
                call = attempts.open(delivery)
            try:
                slot.begin(delivery.number, run)
                set_current_context(call.context)
                self._loop.get().own(call.context)
                with attempts.hooks(call.context):
                    value = await _interruptible(
                        _written(_interruptible(call.begin(), run), call.context.emission), run
                    )
            finally:
                slot.end()
                set_current_context(None)
            data = attempts.encoded(value, call)
            if len(data) > attempts.fetching.result_bytes:
                return await asyncio.to_thread(attempts.done, data, message.id)
            return attempts.done(data, message.id)
        except BaseException as error:  # noqa: BLE001  # task code may raise anything at all
            return attempts.error(run.meaning(error), message)


async def _written(awaitable: Awaitable[Any], emission: Emission | MemoryEmission) -> Any:
    """Await a task, and then until what it emitted is written: on a thread, not on the loop."""
    error: BaseException | None = None
    try:
        return await awaitable
    except BaseException as raised:
        error = raised
        raise
    finally:
        if emission.open:
            await asyncio.to_thread(emission.end, error)


async def _interruptible(awaitable: Awaitable[Any], run: CoroutineRun) -> Any:
    """Await the task's coroutine; hooks see the interrupt and not the cancellation."""
    try:
        return await awaitable
    except asyncio.CancelledError as error:
        raise run.meaning(error) from None
