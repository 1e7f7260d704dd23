"""A process that stays in front of the worker: the first one of a container, and on Windows the
one that has started another command.

The first process of a container passes signals on to the worker, and reaps orphans.

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
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from types import FrameType
from typing import Final, NoReturn

from aztask.worker.platform import HAS_GROUPS
from aztask.worker.pool.watcher import WatchingProcess, start_python
from aztask.worker.stopsignals import DRAIN, handle

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


# -- Going on as another command -------------------------------------------------------------------
#
# For a reload, and for Django's command that becomes a worker. Unix puts the new program into the
# same process. On Windows the functions of that name start another process and end the first one,
# so that a terminal or a service manager believes that the worker has ended. There the command runs
# as a child instead, and rules hold:
# 1. The first process waits for the child and ends with its exit code.
# 2. A child that wants to begin anew says so by its exit code (`AGAIN`), and the first process
#    starts it again: the processes do not pile up.
# 3. The child ends with the first process (`aztask.worker.pool.watcher`). Ctrl-C reaches both; the
#    child alone decides what it means.


CHILD: Final = "AZTASK_CHILD"
"""Set for the child of a process that waits for it."""

AGAIN: Final = 75
"""The exit code of a child that is to be started again (EX_TEMPFAIL of sysexits.h)."""

LOOK_SECONDS: Final = 0.2
"""A handler of a signal runs only between two waits, on Windows."""


def become(arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> NoReturn:
    """Go on as this interpreter with these arguments. Nothing of this process is used afterwards.

    environment: by default the one of this process.
    """
    given = os.environ if environment is None else environment
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    if HAS_GROUPS:
        command = [sys.executable, *arguments]
        os.execve(sys.executable, command, dict(given))  # noqa: S606  # without a shell
    elif CHILD in os.environ:
        sys.exit(AGAIN)
    else:
        sys.exit(_code_of_child(arguments, {**given, CHILD: "1"}))


def _code_of_child(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run the command until it does not ask to be started again; its exit code."""
    handle(_nothing, *DRAIN)
    watching = WatchingProcess()
    code = AGAIN
    while code == AGAIN:
        child = start_python(arguments, environment=environment)
        watching.watch(child)
        code = _wait(child)
        watching.forget(child.pid)
    watching.close()
    return code


def _wait(child: subprocess.Popen[bytes]) -> int:
    while True:
        with suppress(subprocess.TimeoutExpired):
            return child.wait(LOOK_SECONDS)


def _nothing(signum: int, frame: FrameType | None) -> None:
    """A handler, because a child would inherit that a signal is ignored."""
