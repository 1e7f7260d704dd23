"""Files and directories that other users of the machine cannot read.

Queue files hold arguments, and a reader of an SQLite file can lock out every writer. So what aztask
creates is for its own user, mode 0600 and 0700, unless a group is named: then 0660 and 0770. The
process's umask plays no part, and what exists already keeps its mode.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import time
from pathlib import Path
from types import ModuleType
from typing import Any, Final

FILE_MODE: Final = 0o600
DIRECTORY_MODE: Final = 0o700
GROUP_FILE_MODE: Final = 0o660
GROUP_DIRECTORY_MODE: Final = 0o2770
"""With the set-group-id bit, files made in the directory belong to its group (inode(7))."""

BINARY: Final = getattr(os, "O_BINARY", 0)
"""The flag without which Windows changes the line ends of what is written."""


def make_directory(path: Path, group: int | None = None) -> None:
    """Create a directory and its missing parents, each private. group: the id of the group to share
    them with. Raises OSError.
    """
    if path.is_dir():
        return
    if not path.parent.exists():
        make_directory(path.parent, group)
    mode = DIRECTORY_MODE if group is None else GROUP_DIRECTORY_MODE
    try:
        path.mkdir(mode=DIRECTORY_MODE)
    except FileExistsError:
        if not path.is_dir():
            raise
        return  # another process was faster, and sets the mode
    _own(path, mode, group)


def make_file(path: Path, group: int | None = None) -> None:
    """Create an empty private file, unless it exists. Raises OSError."""
    flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | BINARY
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, flags, FILE_MODE))
        _own(path, FILE_MODE if group is None else GROUP_FILE_MODE, group)


def _own(path: Path, mode: int, group: int | None) -> None:
    """Set group and mode. The group comes first: changing it clears the set-group-id bit."""
    if group is not None:
        os.chown(path, -1, group)
    path.chmod(mode)


# -- locks on open files. The kernel ends a lock with the process that holds it ------------
#
# Linux and macOS have flock(2). Windows locks bytes, and no other process can read a locked byte,
# so one far behind the end of the file is locked. Python without either has no locks.


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
