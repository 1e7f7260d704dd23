"""The pool process: takes deliveries from the worker, runs them in its slots, and answers.

Forked by `aztask.worker.pool.forkserver`, or started by it as ``python -m aztask.worker.pool.child
SETUP``. Rules
1. With one slot, tasks run in the main thread; with more, each slot is a thread.
2. One thread at a time waits for the next delivery: the others wait for its lock, so that a packet
   wakes one thread, not all of them.
3. The control thread listens for renewals, interrupts and answers. When the worker is gone, so is
   this process: at once through the parent-death signal on Linux, else when the socket closes.
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

from aztask.hooks import WorkerInfo
from aztask.loading import load_app
from aztask.worker.logs import configure
from aztask.worker.pool.board import Board
from aztask.worker.pool.interrupt import InterruptSlot
from aztask.worker.pool.packets import Packets
from aztask.worker.pool.runner import Runner

logger = logging.getLogger(__name__)

NAME: Final = b"aztask-pool"
"""What the kernel calls a pool process, in `top` and `/proc/PID/comm`."""

_PR_SET_PDEATHSIG: Final = 1  # prctl(2)
_PR_SET_NAME: Final = 15


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the call above
        os._exit(1)


def name_thread(name: bytes) -> None:
    """Have the kernel show this name, of 15 bytes at most, for the calling thread (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name, 0, 0, 0)


def leave_ending_to_worker() -> None:
    """Have ^C, which reaches a whole terminal, and SIGTERM, which systemd sends to all processes of
    a service, do nothing here: the worker alone decides when its pool ends.

    By a handler: that a signal is ignored would be inherited by the programs that tasks start. What
    they fork (`multiprocessing`) ends by these signals as usual.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    os.register_at_fork(after_in_child=end_as_usual)


def end_as_usual() -> None:
    """Have ^C and SIGTERM do what they do in any Python program."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


class Child:
    """One pool process."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self._inbox = self._packets(setup["inbox"])
        self._outbox = self._packets(setup["outbox"])
        self._control = self._packets(setup["control"])
        self._board = Board(setup["board"], setup["slots"])
        self._inbox_lock = threading.Lock()
        slots = setup["slots"]
        self._slots = [InterruptSlot(index, main_thread=slots == 1) for index in range(slots)]
        self._app_spec: str = setup["app"]
        self._worker: int = setup["worker"]
        self._name: str = setup["name"]

    @staticmethod
    def _packets(descriptor: int) -> Packets:
        return Packets(socket.socket(fileno=descriptor))

    def run(self) -> None:
        """Serve until the worker says that it is enough."""
        try:
            app = load_app(self._app_spec)
        except BaseException as error:  # noqa: BLE001  # user code: whatever it is, say it
            self._outbox.send(["broken", f"{type(error).__name__}: {error}"])
            return
        self._runner = Runner(app, self._board, self._outbox, self._worker)
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
        """Control packets; see `Runner` for what they mean. The end of them is the end of us."""
        while packet := self._control.receive():
            kind, number, *rest = packet
            if kind == "interrupt":
                self._runner.interrupt(self._slots, number, *rest)
            else:
                self._runner.told(kind, number, *rest)
        os._exit(0)


def serve(setup: dict[str, Any]) -> NoReturn:
    """Be a pool process until the worker says that it is enough.

    setup: see `aztask.worker.pool.children`, with the parent's process id and four descriptors.
    """
    die_with_parent(setup["parent"])
    leave_ending_to_worker()
    name_thread(NAME)
    sys.path[:0] = [path for path in setup["path"] if path not in sys.path]
    configure(*setup["log"])
    try:
        Child(setup).run()
    except (BrokenPipeError, ConnectionResetError):
        os._exit(1)  # the worker is gone; nobody is left to tell
    os._exit(0)  # threads that tasks left behind do not keep the process


def main() -> None:
    """Start from the command line."""
    serve(json.loads(sys.argv[1]))


if __name__ == "__main__":
    main()
