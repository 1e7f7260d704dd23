"""The pool ``asyncio``: one process runs the tasks of all slots on its event loop.

Rules
1. A task that is an ``async def`` is one asyncio task. A plain function runs in a thread, so that
   it does not block the loop.
2. A packet is read only when a slot is free. So what is unread can be taken back, as in every pool.
"""

from __future__ import annotations

import asyncio
import contextvars
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from aztask.app import App
from aztask.message.message import MESSAGE_FIELDS
from aztask.support.parts import Part
from aztask.worker.pool.eventloop import EventLoop, end_process
from aztask.worker.pool.interrupt import CoroutineRun, InterruptSlot
from aztask.worker.pool.packets import Packets
from aztask.worker.pool.runner import SlotRunner

_TASK: Final = MESSAGE_FIELDS.index("task")


class CoroutineServer:
    """Reads deliveries and runs them, in the main thread of a pool process."""

    def __init__(
        self, app: App, inbox: Packets, runner: SlotRunner, loop: EventLoop, slots: int
    ) -> None:
        self._app = app
        self._inbox = inbox
        self._runner = runner
        self._loop = loop
        self._free = list(range(slots))
        self._part = Part("slots")
        self._threads = ThreadPoolExecutor(slots, "aztask-slot", self._part.adopt)
        self._busy: set[asyncio.Future[None]] = set()
        self._reading = False
        self._retired = False
        self._ended: asyncio.Future[None] = loop.loop.create_future()

    def serve(self) -> None:
        """Run tasks until the process is retired. Raises OSError if the worker has ended."""
        self._read_on()
        self._loop.drive(self._ended)
        try:
            self._ended.result()
        except (BrokenPipeError, ConnectionResetError):
            raise
        except BaseException as error:  # noqa: BLE001  # an error of ours, such as a closed socket
            end_process("a task's slot has failed", error)

    def _read_on(self) -> None:
        """Read when the worker sends. Tasks inherit the context variables of this process."""
        if not self._reading:
            self._reading = True
            self._loop.loop.add_reader(self._inbox.fileno(), self._read)

    def _read(self) -> None:
        while self._free and not self._retired:
            try:
                packet = self._inbox.receive(socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError as error:
                end_process("it cannot reach its worker: did a task close its descriptors?", error)
            if packet:
                self._start(packet)
            else:
                self._retired = True
        self._reading = False
        self._loop.loop.remove_reader(self._inbox.fileno())
        self._check_end()

    def _start(self, packet: list[Any]) -> None:
        slot = InterruptSlot(self._free.pop())
        task = self._app.tasks.get(packet[1][_TASK])
        loop = self._loop.loop
        future: asyncio.Future[None]
        if task is None or task.is_coroutine:
            run = CoroutineRun(self._loop.main, loop)
            future = run.task = loop.create_task(self._runner.run_coroutine(slot, packet, run))
        else:
            variables = contextvars.copy_context()
            future = loop.run_in_executor(
                self._threads, variables.run, self._runner.run, slot, packet
            )
        self._busy.add(future)
        future.add_done_callback(lambda future: self._over(slot, future))

    def _over(self, slot: InterruptSlot, future: asyncio.Future[None]) -> None:
        """A slot is free again. An error here is our own: those of tasks are answered."""
        self._busy.discard(future)
        self._free.append(slot.index)
        error = asyncio.CancelledError() if future.cancelled() else future.exception()
        if error is not None and not self._ended.done():
            self._ended.set_exception(error)
        self._check_end()
        if not self._retired:
            self._read_on()

    def _check_end(self) -> None:
        if self._retired and not self._busy and not self._ended.done():
            self._ended.set_result(None)
