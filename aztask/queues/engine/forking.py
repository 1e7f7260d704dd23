"""Forks: no thread of ours is inside SQLite at a fork, and a child opens a file as if alone.

Two things go wrong when a process forks beside a thread that uses SQLite:

* SQLite's own mutexes stay locked in the child if the thread held one: every later call hangs.
* SQLite remembers which files the process has open, and their locks. The child inherits what it
  remembers, but not the locks. A file that the child opens again has none, so the last other
  process to close it deletes its log. What the child writes from then on is lost.

Rules
1. Before a fork, all databases are locked, and no file is being opened or closed. A lock is never
   waited for while another one is held, so no thread that holds one of them can be blocked by this.
2. If that takes longer than `LONGEST_WAIT`, the process forks all the same. A thread may be inside
   SQLite then, so the child may use no database: it gets an error.
3. A child never uses a connection of its parent. It closes the connection when it opens the same
   file, and only if no transaction was open at the fork. That close changes nothing in the file: a
   lock of ours makes SQLite find others that use it.
4. In a child that opens no file nothing of SQLite is called: threads of other libraries may have
   held its mutexes, and that child must not hang.
5. The garbage collector may run in any line of any thread, so what it collects takes no lock and
   closes nothing: it leaves its connection, and the next file that is opened or closed closes it.
6. Some servers (uWSGI) fork without telling Python. The next file that is opened notices it, and
   tells by the locks which databases were in use.
"""

from __future__ import annotations

import ctypes
import os
import sqlite3
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from struct import pack
from typing import Any, Final, Protocol, TypeAlias

from aztask.errors import BrokerError
from aztask.queues.engine.filesystem import identity
from aztask.support.forks import around_fork

try:
    import fcntl
except ImportError:  # Windows, which never forks
    fcntl = None  # type: ignore[assignment]

LONGEST_WAIT: Final = 15.0  # seconds; longer than a statement waits for another process

# sqlite.org/fileformat2.html, "the lock-byte page": a read lock here says that the file is in use.
_SHARED_FIRST, _SHARED_SIZE = 0x40000002, 510


_File: TypeAlias = tuple[int, int]


class Forkable(Protocol):
    """A database, as a fork sees it. lock: every thread that is inside SQLite holds it."""

    path: str
    lock: Any

    def in_transaction(self) -> bool:
        """In a child: whether a transaction was open at the fork."""

    def disown(self) -> sqlite3.Connection | None:
        """In a child: give up the connection and return it; None if it was closed."""


class _Gate:
    """Lets threads open and close files, except during forks."""

    def __init__(self) -> None:
        self.inside = 0
        self._forks = 0
        self._changed = threading.Condition(threading.Lock())

    def enter(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._forks)
            self.inside += 1

    def leave(self) -> None:
        with self._changed:
            self.inside -= 1
            self._changed.notify_all()

    def shut(self) -> bool:
        """Let no thread in until `open`; True if none is inside."""
        with self._changed:
            self._forks += 1
            return not self.inside

    def open(self) -> None:
        with self._changed:
            self._forks -= 1
            self._changed.notify_all()

    def await_empty(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self.inside, seconds)


class _Forks:
    """The state of this process; `child` makes it that of a forked child."""

    def __init__(self) -> None:
        self.gate = _Gate()
        self.databases: weakref.WeakSet[Any] = weakref.WeakSet()
        self._collected: deque[tuple[str, sqlite3.Connection]] = deque()
        self._pid = os.getpid()
        self._held: dict[int, list[Any]] = {}  # by forking thread: the locks that it took
        self._inherited: dict[_File, list[sqlite3.Connection]] = {}
        self._broken: set[_File] = set()  # files with a transaction that was open at the fork
        self._unsafe = False  # a thread may have been inside SQLite at the fork

    def before(self) -> None:
        """Take all locks, or as many as are free after `LONGEST_WAIT` (rules 1 and 2)."""
        until = time.monotonic() + LONGEST_WAIT
        awaited: Any = None
        while True:
            left = max(0.0, until - time.monotonic())
            got = awaited is not None and awaited.acquire(timeout=left)
            empty = self.gate.shut()
            taken, busy = _take([each.lock for each in list(self.databases)])
            if got:
                awaited.release()  # `_take` has taken it once more
            self._held[threading.get_ident()] = taken
            if (empty and busy is None) or time.monotonic() >= until:
                return
            self.parent()  # a thread that is inside may need one of the locks to go on
            if not empty:
                self.gate.await_empty(max(0.0, until - time.monotonic()))
            awaited = busy

    def parent(self) -> None:
        """Release the locks and let files be opened again."""
        for lock in self._held.pop(threading.get_ident(), []):
            lock.release()
        self.gate.open()

    def child(self) -> None:
        """Take over what the parent had open. Calls nothing of SQLite (rule 4)."""
        self._pid = os.getpid()
        self._unsafe = self._unsafe or self.gate.inside > 0
        for database in list(self.databases):
            self._take_over(database)
        while self._collected:
            self._inherit(*self._collected.popleft())
        for lock in self._held.pop(threading.get_ident(), []):
            lock.release()
        self._held.clear()
        self.gate = _Gate()

    def notice(self) -> None:
        """Take over what the parent had open, unless that was done after the fork (rule 6)."""
        if self._pid != os.getpid():
            self.child()

    def _take_over(self, database: Forkable) -> None:
        free = database.lock.acquire(blocking=False)
        if free:
            database.lock.release()
        else:
            self._unsafe = True
        broken = database.in_transaction()
        connection = database.disown()
        if connection is not None:
            self._inherit(database.path, connection, broken=broken)

    def _inherit(self, path: str, connection: sqlite3.Connection, *, broken: bool = False) -> None:
        # Never freed unless it is closed on purpose, not even when the interpreter ends.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))
        file = identity(path)
        if file is not None:
            self._inherited.setdefault(file, []).append(connection)
            if broken:
                self._broken.add(file)

    def collect(self, path: str, connection: sqlite3.Connection) -> None:
        """Close it later: for the garbage collector, which may not wait (rule 5)."""
        self._collected.append((path, connection))

    def close_collected(self) -> None:
        """Close what the garbage collector has left. Call it while a file is opened or closed."""
        with suppress(IndexError):  # another thread took the last one
            while self._collected:
                self._collected.popleft()[1].close()

    def claim(self, path: str) -> None:
        """Prepare to open a file here. Raises BrokerError if this process cannot (rules 2 and 3).

        Closes what the parent had open of it, if anything.
        """
        file = identity(path)
        if self._unsafe:
            raise BrokerError(
                f"{path} cannot be opened: this process was forked while another thread used a "
                "database; start it with spawn, or fork before other threads send"
            )
        if file is None or file not in self._inherited:
            return
        if file in self._broken:
            raise BrokerError(
                f"{path} cannot be opened: this process was forked inside a transaction on it; "
                "start it with spawn, or fork outside the transaction"
            )
        with _used(path):
            for connection in self._inherited.pop(file):
                connection.close()


def _take(locks: list[Any]) -> tuple[list[Any], Any]:
    """Take the locks that are free; the second is the first that is not, or None."""
    taken, busy = [], None
    for lock in locks:
        if lock.acquire(blocking=False):
            taken.append(lock)
        elif busy is None:
            busy = lock
    return taken, busy


@contextmanager
def _used(path: str) -> Iterator[None]:
    """Make SQLite find that others use the file, so that a close leaves its log alone.

    Only on Linux. Elsewhere a close that finds no other user writes the log into the file and
    deletes it, which is right as well: the log of an inherited connection has nothing that is not
    in the file by then.
    """
    setting = getattr(fcntl, "F_OFD_SETLK", None) if fcntl else None
    if setting is None:
        yield
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        lock = pack("hhqqi0q", fcntl.F_RDLCK, os.SEEK_SET, _SHARED_FIRST, _SHARED_SIZE, 0)
        with suppress(OSError):  # another process is closing it, and will be found as well
            fcntl.fcntl(descriptor, setting, lock)
        yield
    finally:
        os.close(descriptor)


FORKS: Final = _Forks()
around_fork(FORKS.before, FORKS.parent, FORKS.child)


@contextmanager
def opening() -> Iterator[_Forks]:
    """While a file is opened or closed: no thread of this process forks."""
    FORKS.notice()
    gate = FORKS.gate
    gate.enter()
    try:
        FORKS.close_collected()
        yield FORKS
    finally:
        gate.leave()
