"""Which shell a worker has on this system, and what the system cannot do.

Linux has the fork server (`aztask.worker.pool.forking`). Every other system has the portable
shell (`aztask.worker.pool.portablelink`), which needs nothing but what Python offers everywhere:
new interpreters, pairs of sockets and private temporary files. ``AZTASK_PORTABLE=1`` forces it on
Linux, to test it there and as a way out if a kernel or a sandbox refuses a call.
"""

from __future__ import annotations

import base64
import math
import mmap
import os
import signal
import socket
from pathlib import Path
from typing import Any, Final

VARIABLE: Final = "AZTASK_PORTABLE"

NEEDED: Final[tuple[tuple[Any, str], ...]] = (
    (os, "fork"),
    (os, "eventfd"),
    (os, "memfd_create"),
    (os, "pidfd_open"),
    (signal, "pidfd_send_signal"),
    (socket, "SOCK_SEQPACKET"),
    (socket, "send_fds"),
)
"""Modules, and what the fork server uses of each that only Linux has."""

CAN_SIGNAL_THREADS: Final = hasattr(signal, "pthread_kill") and hasattr(signal, "SIGUSR1")
"""Whether a signal can interrupt a blocking call of a thread; not on Windows."""

HAS_GROUPS: Final = hasattr(os, "killpg")
"""Whether processes have groups, which are killed as one; not on Windows."""

_PROCESSES: Final = Path("/proc")
_QUOTA: Final = Path("/sys/fs/cgroup/cpu.max")


def connected_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected stream sockets of this process alone. Raises OSError.

    On Windows they are a connection over the loopback. Some releases of Python do not check who has
    connected to it, which may be any process of the machine, faster than this one.
    """
    pair = left, right = socket.socketpair()
    if left.family != getattr(socket, "AF_UNIX", None):
        names = left.getsockname(), right.getsockname()
        if names != (right.getpeername(), left.getpeername()):
            left.close()
            right.close()
            raise ConnectionAbortedError("another process has connected to a socket of the worker")
    return pair


def shares_sockets() -> bool:
    """Whether sockets are given to a process by its id, as on Windows, instead of inherited."""
    return hasattr(socket.socket, "share")


def given_socket(end: socket.socket, pid: int) -> int | str:
    """How the process of this id gets the socket; see `taken_socket`."""
    if shares_sockets():
        shared: bytes = end.share(pid)  # type: ignore[attr-defined]
        return base64.b64encode(shared).decode()
    return end.fileno()


def taken_socket(given: int | str) -> socket.socket:
    """A socket of another process: an inherited descriptor, on Windows one that was shared."""
    if isinstance(given, str):
        end: socket.socket = socket.fromshare(base64.b64decode(given))  # type: ignore[attr-defined]
        return end
    # The lowest free number, because `select` takes none above 1,023.
    end = socket.socket(fileno=os.dup(given))
    os.close(given)
    return end


def cores() -> int:
    """The cores that this process may use: its container may have fewer than the machine."""
    if hasattr(os, "sched_getaffinity"):
        found = len(os.sched_getaffinity(0))
    else:
        found = os.cpu_count() or 1
    try:
        quota, period = map(int, _QUOTA.read_text().split())
    except (OSError, ValueError):  # no container, or one without a limit ("max")
        return found
    return max(1, min(found, math.ceil(quota / period)))


def memory_of(pid: int) -> int:
    """The bytes of memory that a process uses, shared ones included; 0 if it is not known."""
    try:
        pages = (_PROCESSES / str(pid) / "statm").read_text().split()[1]
    except (OSError, IndexError):  # it has ended, or this is not Linux
        return 0
    return int(pages) * mmap.PAGESIZE


def is_portable() -> bool:
    """Whether workers of this process have the portable shell."""
    if os.environ.get(VARIABLE, "") not in ("", "0"):
        return True
    return not all(hasattr(module, name) for module, name in NEEDED)


def lacks(*, memory_limit: bool) -> list[str]:
    """What this system cannot do for a worker, a sentence each. Said once, when a worker starts.

    * `memory_limit`: whether the worker is asked to limit the memory of its processes.
    """
    found = []
    if not CAN_SIGNAL_THREADS:
        found.append(
            "this system cannot interrupt a blocking call: a task that is told to stop (by a time "
            "limit, a lost lease or the end of the worker) stops when the call returns"
        )
    if not HAS_GROUPS:
        found.append(
            "this system has no process groups: programs that a task starts go on when its pool "
            "process is killed"
        )
    if memory_limit and not memory_of(os.getpid()):
        found.append(
            "this system does not tell a process's memory: --max-memory-per-child does nothing"
        )
    return found
