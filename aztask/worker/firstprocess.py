"""The first process of a container: it passes signals on to the worker, and reaps orphans.

In a container without an init, ``aztask worker`` is process 1. The kernel then treats it specially:
signals without a handler do nothing, and every process whose parent has died becomes its child, a
zombie until it is waited for. A worker that waited for any child would take the exit codes of
processes that its own code or `subprocess` waits for. So process 1 starts the worker as its child
and does nothing else.

Rules
1. Only process 1 does this, before it has a thread, a connection or a module of the app.
2. Its exit code is the worker's, or 128 + the signal that ended the worker.
3. A signal of the terminal (^C) reaches the worker without its help: the kernel sends it to the
   whole process group. It is not passed on a second time.

If process 1 dies, the kernel kills every process of the container; messages come back when their
leases end.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

FIRST: Final = 1
SIGNAL_EXIT: Final = 128
_FROM_KERNEL: Final = 0x80  # SI_KERNEL of siginfo_t, see sigaction(2)
_KEPT: Final = frozenset(
    # What cannot be caught, the end of a child, and what an error of this process raises.
    signal.Signals[name]
    for name in (
        "SIGKILL",
        "SIGSTOP",
        "SIGCHLD",
        "SIGSEGV",
        "SIGFPE",
        "SIGILL",
        "SIGBUS",
        "SIGTRAP",
    )
    if name in signal.Signals.__members__  # Windows has few of them
)


def stay_first(pid: int | None = None) -> None:
    """Return in a child if this is process 1, which then ends with the child's exit code.

    In any other process it does nothing. Standard streams, environment and terminal stay the same.

    * `pid`: this process's id, given in tests.
    """
    if (os.getpid() if pid is None else pid) != FIRST:
        return
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()  # or both processes would write what is buffered
    passed = signal.valid_signals() - _KEPT
    ignored = {each for each in passed if signal.getsignal(each) is signal.SIG_IGN}
    # Blocked before the fork: a signal that comes in between waits for `_serve`.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, passed | {signal.SIGCHLD})
    worker = os.fork()
    if worker == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    os._exit(_serve(worker, passed - ignored))


def _serve(worker: int, passed: set[signal.Signals]) -> int:
    """Pass signals on and reap until the worker ends; returns the exit code."""
    while True:
        found = signal.sigwaitinfo(passed | {signal.SIGCHLD})
        if found.si_signo != signal.SIGCHLD:
            if found.si_code != _FROM_KERNEL:
                with suppress(ProcessLookupError):
                    os.kill(worker, found.si_signo)
            continue
        for pid, status in _ended():  # several ends may arrive as one signal
            if pid == worker:
                code = os.waitstatus_to_exitcode(status)
                return code if code >= 0 else SIGNAL_EXIT - code


def _ended() -> Iterator[tuple[int, int]]:
    """Reap the children that have ended: (process id, status)."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, status
