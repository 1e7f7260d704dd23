"""The pool process: takes deliveries from the worker, runs them in its slots, and answers.

Forked by `aztask.worker.pool.forkserver`, or started by it as ``python -m aztask.worker.pool.child
SETUP``. Rules
1. With one slot, tasks run in the main thread. With more, each slot is a thread.
2. One thread at a time waits for the next delivery, the others wait for a lock. So a packet wakes
   one thread, not all of them.
3. The control thread listens for renewals, interrupts and answers. If no renewal arrives before a
   run's deadline, it stops that run itself: the worker may be stopped or frozen.
4. When the worker ends, this process ends: on Linux at once through the parent-death signal, else
   when the socket closes.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import socket
import sys
import threading
from typing import Any, Final, NoReturn

from aztask.context import set_only_slot
from aztask.hooks import WorkerInfo
from aztask.loading import load_app
from aztask.support.display import safe_str, storable
from aztask.worker.logs import configure
from aztask.worker.pool.board import Board
from aztask.worker.pool.interrupt import InterruptSlot
from aztask.worker.pool.leaseguard import LeaseGuard
from aztask.worker.pool.packets import Packets
from aztask.worker.pool.runner import ERROR_CHARACTERS, Runner

logger = logging.getLogger(__name__)

NAME: Final = b"aztask-pool"
"""The name of a pool process in `top` and `/proc/PID/comm`."""

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
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name, 0, 0, 0)


def leave_ending_to_worker() -> None:
    """Make SIGINT and SIGTERM do nothing here: the worker alone decides when its pool ends.

    ^C reaches every process of a terminal, and systemd sends SIGTERM to every process of a service.
    Both get a handler that does nothing, because an ignored signal would stay ignored in programs
    that tasks start. Processes that tasks fork (`multiprocessing`) end by these signals as usual.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    os.register_at_fork(after_in_child=end_as_usual)


def end_as_usual() -> None:
    """Restore what SIGINT and SIGTERM do in any Python program."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


class Child:
    """One pool process: its connections to the worker, its slots and its threads."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self._inbox = self._packets(setup["inbox"])
        self._outbox = self._packets(setup["outbox"])
        self._control = self._packets(setup["control"])
        self._board = Board(setup["board"], setup["slots"])
        self._inbox_lock = threading.Lock()
        slots = setup["slots"]
        self._slots = [InterruptSlot(index, main_thread=slots == 1) for index in range(slots)]
        self._app_spec: str = setup["app"]
        set_only_slot(setup.get("alone", False))
        self._worker: int = setup["worker"]
        self._name: str = setup["name"]

    @staticmethod
    def _packets(descriptor: int) -> Packets:
        return Packets(socket.socket(fileno=descriptor))

    def run(self) -> None:
        """Import the app, then serve until the worker retires this process."""
        try:
            app = load_app(self._app_spec)
        except BaseException as error:  # noqa: BLE001  # user code may raise anything
            text = storable(safe_str(error, ERROR_CHARACTERS))
            self._outbox.send(["broken", f"{type(error).__name__}: {text}"])
            return
        self._guard = LeaseGuard(self._control.fileno())
        self._runner = Runner(app, self._board, self._outbox, self._guard, self._worker)
        threading.Thread(target=self._listen, name="aztask-control", daemon=True).start()
        with app.hooks.process.around(WorkerInfo(self._name)):
            self._outbox.send(["ready"])
            self._serve_all()

    def _serve_all(self) -> None:
        if len(self._slots) == 1:
            self._serve(self._slots[0])
            return
        threads = [
            threading.Thread(target=self._serve, args=(slot,), name=f"aztask-slot-{slot.index}")
            for slot in self._slots
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _serve(self, slot: InterruptSlot) -> None:
        while True:
            with self._inbox_lock:
                packet = self._inbox.receive()
            if not packet:
                return
            self._runner.run(slot, packet)

    def _listen(self) -> None:
        """Handle control packets (see `Runner`); when the worker ends, this process ends too."""
        while True:
            if (now := self._guard.wait()) is not None:
                self._runner.stop_overdue(self._slots, now)
                continue
            packet = self._control.receive()
            if not packet:
                break
            kind, number, *rest = packet
            if kind == "interrupt":
                self._runner.interrupt(self._slots, number, *rest)
            else:
                self._runner.handle(kind, number, *rest)
        os._exit(0)


def serve(setup: dict[str, Any]) -> NoReturn:
    """Be a pool process until the worker retires it.

    setup: see `aztask.worker.pool.children`; also the parent's process id and four descriptors.
    """
    die_with_parent(setup["parent"])
    leave_ending_to_worker()
    name_thread(NAME)
    sys.path[:0] = [path for path in setup["path"] if path not in sys.path]
    configure(*setup["log"])
    try:
        Child(setup).run()
    except (BrokenPipeError, ConnectionResetError):
        os._exit(1)  # the worker has ended: there is no process to report to
    os._exit(0)  # threads that tasks left behind must not keep the process alive


def main() -> None:
    """Serve with the setup that the command line gives as JSON."""
    serve(json.loads(sys.argv[1]))


if __name__ == "__main__":
    main()
