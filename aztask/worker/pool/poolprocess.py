"""The pool process: takes deliveries from the worker, runs them in its slots, and answers.

Forked by `aztask.worker.pool.forkserver`, or started by it as
``python -m aztask.worker.pool.poolprocess SETUP``; in the portable shell it is
``python -m aztask.worker.pool.portablelink``. Rules
1. With one slot, tasks run in the main thread. With more, each slot is a thread, or in the pool
   ``asyncio`` a coroutine on the process's event loop (`aztask.worker.pool.poolprocess`).
2. One thread at a time waits for the next delivery, the others wait for a lock. So a packet wakes
   one thread, not all of them. The main thread runs the event loop in the meantime.
3. The control thread listens for renewals, interrupts and answers. If no renewal arrives before a
   run's deadline, it stops that run itself: the worker may be stopped or frozen.
4. The threads are parts (`aztask.support.parts`). One that can no longer reach the worker ends the
   process, whose tasks have failed; the worker replaces it. So does an event loop that has died.
5. When the worker ends, this process ends: on Linux at once through the parent-death signal. In the
   portable shell the watching process kills it (`aztask.worker.pool.watcher`). In both it ends by
   itself when its sockets close, unless a task holds the interpreter.
"""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import gc
import json
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from aztask.app import App
from aztask.app.loading import load_app
from aztask.context import set_only_slot
from aztask.hooks import WorkerInfo
from aztask.message.message import MESSAGE_FIELDS
from aztask.support.display import safe_str, storable
from aztask.support.failpoint import hit_in_pool
from aztask.support.parts import Part
from aztask.worker.logs import configure, configured
from aztask.worker.pool.attempt import ERROR_CHARACTERS
from aztask.worker.pool.eventloop import EventLoop, LazyLoop, end_process
from aztask.worker.pool.interrupt import CoroutineRun, InterruptSlot, MainThread
from aztask.worker.pool.leaseguard import LeaseGuard
from aztask.worker.pool.link import Board, PoolPlan
from aztask.worker.pool.loopwatch import LoopWatch
from aztask.worker.pool.packets import Packets, PacketsIn, PacketsOut
from aztask.worker.pool.runner import SlotRunner
from aztask.worker.stopsignals import leave_ending_to_worker

# -- The pool ``asyncio``: one process runs the tasks of all slots on its event loop.
#
# Rules
# 1. A task that is an ``async def`` is one asyncio task. A plain function runs in a thread, so that
#    it does not block the loop.
# 2. A packet is read only when a slot is free. So what is unread can be taken back, as in every
#    pool.

_TASK: Final = MESSAGE_FIELDS.index("task")


class CoroutineServer:
    """Reads deliveries and runs them, in the main thread of a pool process."""

    def __init__(
        self, app: App, inbox: PacketsIn, runner: SlotRunner, loop: EventLoop, slots: int
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
                packet = self._inbox.receive(wait=False)
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


logger = logging.getLogger(__name__)

NAME: Final = b"aztask-pool"
"""The name of a pool process in `top` and `/proc/PID/comm`."""

PACKETS_A_TURN: Final = 1024
UNREACHABLE: Final = "it cannot reach its worker: did a task close its descriptors?"

_PR_SET_PDEATHSIG: Final = 1  # prctl(2)
_PR_SET_NAME: Final = 15


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends (on Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent died before the call above
        os._exit(1)


def name_thread(name: bytes) -> None:
    """Name the calling thread in the kernel's listings. name: at most 15 bytes (on Linux)."""
    if sys.platform == "linux":
        with suppress(AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_NAME, name, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class ProcessEnds:
    """What a pool process has of its link: where packets come from and go to, and the board."""

    inbox: PacketsIn
    outbox: PacketsOut
    control: PacketsIn
    board: Board

    @classmethod
    def of_descriptors(cls, setup: Mapping[str, Any]) -> ProcessEnds:
        """Those of the fork server: the setup names their descriptors."""
        names = ("inbox", "outbox", "control")
        inbox, outbox, control = (Packets(socket.socket(fileno=setup[name])) for name in names)
        return cls(inbox, outbox, control, Board(setup["board"], setup["slots"]))


class ProcessMain:
    """One pool process: its connections to the worker, its slots and its threads."""

    def __init__(self, setup: Mapping[str, Any], ends: ProcessEnds) -> None:
        self._inbox, self._outbox, self._control = ends.inbox, ends.outbox, ends.control
        self._board = ends.board
        self._slots: int = setup["slots"]
        self._inbox_lock = threading.Lock()
        self._serving = Part("slots")
        self._listening = Part("control")
        self._main = MainThread()
        self._loop = LazyLoop(self._main)
        self._on_loop = setup.get("pool") == "asyncio"
        self._app_spec: str = setup["app"]
        set_only_slot(setup.get("alone", False))
        self._worker: int = setup["worker"]
        self._name: str = setup["name"]

    def run(self) -> None:
        """Import the app, open its lifespans, and serve until the worker retires this process."""
        try:
            app = load_app(self._app_spec)
        except BaseException as error:  # noqa: BLE001  # user code may raise anything
            self._broken("cannot import the app", error)
            return
        hit_in_pool("pool-imported", self._worker)
        self._guard = LeaseGuard(self._control.fileno())
        self._runner = SlotRunner(
            app, self._board, self._outbox, self._guard, self._worker, self._loop
        )
        self._listening.thread(self._listen, "aztask-control").start()
        with app.hooks.process.around(WorkerInfo(self._name)):
            try:
                lifespans = app.hooks.lifespan.open(self._complete)
            except BaseException as error:  # noqa: BLE001  # as above
                self._broken("cannot open a lifespan of the app", error)
                return
            gc.freeze()  # the app's modules stay: the garbage collector can skip them
            self._outbox.send(["ready"])
            hit_in_pool("pool-ready", self._worker)
            try:
                self._serve_all(app)
            finally:
                lifespans.close()

    def _broken(self, what: str, error: BaseException) -> None:
        text = storable(safe_str(error, ERROR_CHARACTERS))
        self._outbox.send(["broken", f"{what}: {type(error).__name__}: {text}"])

    def _complete(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.get().complete(coroutine)

    def _serve_all(self, app: App) -> None:
        if self._slots == 1 and not self._on_loop:
            self._serve_here(InterruptSlot(0, main=self._main))
            return
        loop = self._loop.get()
        if self._on_loop or any(task.is_coroutine for task in app.tasks.values()):
            LoopWatch(loop).start()
        if self._on_loop:
            CoroutineServer(app, self._inbox, self._runner, loop, self._slots).serve()
        else:
            self._serve_in_threads(loop)

    def _serve_here(self, slot: InterruptSlot) -> None:
        while True:
            loop = self._loop.made
            packet = loop.receive(self._inbox) if loop is not None else self._inbox.receive()
            if not packet:
                return
            self._runner.run(slot, packet)

    def _serve_in_threads(self, loop: EventLoop) -> None:
        """Serve in a thread for each slot; this thread runs the loop until all have ended."""
        ended = loop.loop.create_future()
        left = set(range(self._slots))

        def note_end(index: int) -> None:
            left.discard(index)
            if not left:
                ended.set_result(None)

        def serve(slot: InterruptSlot) -> None:
            self._serve(slot)
            loop.loop.call_soon_threadsafe(note_end, slot.index)

        for index in range(self._slots):
            # Context variables that a lifespan has set are seen in every thread.
            run = contextvars.copy_context().run
            name = f"aztask-slot-{index}"
            self._serving.thread(run, name, serve, InterruptSlot(index)).start()
        loop.drive(ended)

    def _serve(self, slot: InterruptSlot) -> None:
        try:
            while True:
                self._serving.rest()
                with self._inbox_lock:
                    packet = self._inbox.receive()
                if not packet:
                    return
                try:
                    self._runner.run(slot, packet)
                except OSError:
                    raise
                except Exception as error:  # noqa: BLE001  # the delivery must not be forgotten
                    self._runner.give_up(slot, packet[0], error)
        except (BrokenPipeError, ConnectionResetError):
            os._exit(1)  # the worker has ended
        except OSError as error:
            end_process(UNREACHABLE, error)

    def _listen(self) -> None:
        """Handle control packets (see `SlotRunner`); when the worker ends, so does this process."""
        try:
            self._handle_packets()
        except (BrokenPipeError, ConnectionResetError):
            os._exit(1)
        except OSError as error:
            end_process(UNREACHABLE, error)

    def _handle_packets(self) -> None:
        while True:
            self._listening.rest()
            now = None if self._control.buffered else self._guard.wait()
            self._listening.begin()
            if now is not None:
                self._runner.stop_overdue(now)
                continue
            # All that have arrived, before the guard computes the next deadline of all runs again.
            for _ in range(PACKETS_A_TURN):
                try:
                    packet = self._control.receive(wait=False)
                except BlockingIOError:
                    break
                if not packet:
                    os._exit(0)
                kind, number, *rest = packet
                if kind == "ping":
                    self._runner.say(["alive"])
                elif kind == "interrupt":
                    self._runner.interrupt(number, *rest)
                else:
                    self._runner.handle(kind, number, *rest)


def setup_of(plan: PoolPlan) -> dict[str, Any]:
    """What the worker tells a pool process of this plan, beside the ends of its link."""
    return {
        "app": plan.app,
        "slots": plan.slots,
        "pool": plan.pool,
        "alone": plan.alone,
        "worker": os.getpid(),
        "name": plan.worker,
        "path": [path for path in sys.path if path],
        "log": configured(),
    }


def serve_forked(setup: Mapping[str, Any]) -> NoReturn:
    """Be a pool process of the fork server until the worker retires it.

    setup: see `setup_of`; also the parent's process id and four descriptors.
    """
    die_with_parent(setup["parent"])
    hit_in_pool("pool-set-up", setup["worker"])
    serve(setup, ProcessEnds.of_descriptors(setup))


def serve(setup: Mapping[str, Any], ends: ProcessEnds) -> NoReturn:
    """Be a pool process until the worker retires it. setup: see `setup_of`."""
    leave_ending_to_worker()
    name_thread(NAME)
    sys.path[:0] = [path for path in setup["path"] if path not in sys.path]
    configure(*setup["log"])
    try:
        ProcessMain(setup, ends).run()
    except (BrokenPipeError, ConnectionResetError):
        os._exit(1)  # the worker has ended: there is no process to report to
    for stream in (sys.stdout, sys.stderr):  # what tasks have printed
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(0)  # threads that tasks left behind must not keep the process alive


def main() -> None:
    """Serve with the setup that the command line gives as JSON."""
    serve_forked(json.loads(sys.argv[1]))


if __name__ == "__main__":
    main()
