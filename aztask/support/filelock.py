"""Locks on open files. The kernel ends a lock with the process that holds it.

Linux and macOS have flock(2). Windows locks bytes, and no other process can read a locked byte, so
one far behind the end of the file is locked. Python without either has no locks.
"""

from __future__ import annotations

import errno
import importlib
import os
import time
from types import ModuleType
from typing import Any, Final


def _module(name: str) -> Any:
    """A module of the standard library that some systems lack, or None."""
    try:
        found: ModuleType = importlib.import_module(name)
    except ImportError:
        return None
    return found


_fcntl: Final = _module("fcntl")
_msvcrt: Final = _module("msvcrt")
_LOCKED_BYTE: Final = 2**31 - 2  # the highest offset that every C library of Windows can lock
_PAUSE: Final = 0.05

RENAMES_OPEN_FILES: Final = _fcntl is not None
"""False on Windows, where an open file can be neither renamed nor removed."""


def try_lock(descriptor: int) -> bool:
    """Lock the open file; False if another process has locked it.

    Raises OSError if this system or this file system has no locks.
    """
    try:
        if _fcntl is not None:
            _fcntl.flock(descriptor, _fcntl.LOCK_EX | _fcntl.LOCK_NB)
        elif _msvcrt is not None:
            os.lseek(descriptor, _LOCKED_BYTE, os.SEEK_SET)
            _msvcrt.locking(descriptor, _msvcrt.LK_NBLCK, 1)
        else:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES, errno.EDEADLK):
            return False
        raise
    return True


def wait_for_lock(descriptor: int) -> None:
    """Lock the open file, after other processes. Does nothing on a system without locks.

    Raises OSError if this file system has none.
    """
    if _fcntl is not None:
        _fcntl.flock(descriptor, _fcntl.LOCK_EX)
    elif _msvcrt is not None:
        while not try_lock(descriptor):
            time.sleep(_PAUSE)  # the waiting lock of Windows gives up after ten seconds
