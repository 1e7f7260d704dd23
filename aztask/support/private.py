"""Files and directories that other users of the machine can neither read nor change.

Rules
1. Queue files hold arguments, and a reader of an SQLite file can lock out every writer. So what
   aztask creates is for its own user, mode 0600 and 0700, unless a group is named: then 0660 and
   0770. The process's umask plays no part, and what exists already keeps its mode.
2. What exists already is used only if no stranger can write to it: it belongs to this user or to
   root, and neither other users nor a group may write. With a named group, files of its members are
   used, too. A folder may be writable for a group of this process, as Kubernetes makes it
   (``fsGroup``).
3. Until the next release, what this user or root already uses and others may write to is used, with
   a warning that has the command to correct it. What belongs to a stranger is refused at once.
4. Windows has no such modes: there, nothing is checked.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import logging
import os
import shlex
import stat
import time
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NamedTuple

from aztask.errors import ConfigurationError

logger = logging.getLogger(__name__)

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


# -- what exists already: who owns it, and who may write to it ----------------------------------

ROOT: Final = 0
_NOT_OURS: Final = frozenset({"lost+found"})
"""Entries of a new file system, which say nothing about who uses it."""

_UNSAFE_GROUP: Final = stat.S_ISGID | stat.S_IWOTH
"""In such a directory, any user can make files that belong to the directory's group."""

_warned: set[Path] = set()


class Exposure(NamedTuple):
    """Why a file or folder must not be used.

    * `why`: what is wrong, such as "other users may write to it (mode 0666)".
    * `advice`: what to do about it.
    * `foreign`: it belongs to a stranger, who can change its mode at any time.
    """

    path: Path
    why: str
    advice: str
    foreign: bool = False

    def __str__(self) -> str:
        return f"{self.path} {self.why}; {self.advice}"


def exposure(path: Path, group: int | None = None) -> Exposure | None:
    """Why other users can change what is at `path` (rule 2); None if they cannot, or if nothing is
    there.

    group: the id of the group that it is shared with. Raises OSError if it cannot be looked at.
    """
    if (user := _user()) is None:
        return None
    try:
        link = path.lstat()
        if link.st_uid not in (user, ROOT) and stat.S_ISLNK(link.st_mode):
            return Exposure(path, f"is a link of user {link.st_uid}", "remove it", foreign=True)
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    shared = group is not None and status.st_gid == group
    if status.st_uid not in (user, ROOT) and not (shared and _only_members_create(path)):
        why = f"belongs to user {status.st_uid}, neither to this user ({user}) nor to root"
        return Exposure(path, why, "choose another place, or run this as its owner", foreign=True)
    return _open_to_others(path, status, shared=shared)


def _open_to_others(path: Path, status: os.stat_result, *, shared: bool) -> Exposure | None:
    """What the mode lets others do. shared: the group is the one that was named."""
    folder = stat.S_ISDIR(status.st_mode)
    private = (GROUP_DIRECTORY_MODE if shared else DIRECTORY_MODE) & 0o777
    if not folder:
        private = GROUP_FILE_MODE if shared else FILE_MODE
    advice = f"run: chmod {private:04o} {shlex.quote(str(path))}"
    if folder:
        advice += ", or choose a folder inside it, which aztask makes private"
    mode = f"(mode {stat.S_IMODE(status.st_mode):04o})"
    if status.st_mode & stat.S_IWOTH:
        return Exposure(path, f"can be written by every user {mode}", advice)
    ours = shared or (folder and status.st_gid in _groups())
    if status.st_mode & stat.S_IWGRP and not ours:
        return Exposure(path, f"can be written by the group {status.st_gid} {mode}", advice)
    return None


def refuse_exposed(path: Path, group: int | None = None) -> None:
    """Raise PermissionError if other users can change what is at `path` (rules 2 and 3)."""
    if (found := _refused(path, group)) is not None:
        raise PermissionError(errno.EPERM, f"it {found.why}; {found.advice}", str(path))


def require_private(path: Path, what: str, group: int | None = None) -> None:
    """As `refuse_exposed`, for a place that a setting names: raises ConfigurationError.

    what: names the place, such as "the queue file". A place that cannot be looked at is accepted:
    whatever uses it then says why.
    """
    try:
        found = _refused(path, group)
    except OSError:
        return
    if found is not None:
        raise ConfigurationError(f"{what} {found}")


def _refused(path: Path, group: int | None) -> Exposure | None:
    """Why `path` is refused; what is still used is logged, once in each process (rule 3)."""
    found = exposure(path, group)
    if found is None or found.foreign or not in_use(path):
        return found
    if path not in _warned:
        _warned.add(path)
        logger.warning("%s. The next release refuses it.", found)
    return None


def in_use(path: Path) -> bool:
    """Whether this user or root has data at `path`, a file or a folder of theirs (rule 3)."""
    if not path.is_dir():
        return path.stat().st_size > 0
    with os.scandir(path) as entries:
        return any(
            entry.name not in _NOT_OURS
            and entry.stat(follow_symlinks=False).st_uid in (_user(), ROOT)
            for entry in entries
        )


def has_users() -> bool:
    """Whether files of this system have an owner and a mode."""
    return _user() is not None


def _user() -> int | None:
    """The user that this process acts as; None on a system without users."""
    return os.geteuid() if hasattr(os, "geteuid") else None


def _groups() -> set[int]:
    return {os.getegid(), *os.getgroups()}


def _only_members_create(path: Path) -> bool:
    """Whether only members of a group can make files of that group where `path` is."""
    return path.parent.stat().st_mode & _UNSAFE_GROUP != _UNSAFE_GROUP


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
