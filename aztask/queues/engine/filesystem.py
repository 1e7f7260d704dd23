"""Checks the place of a database file, and prepares its directory.

SQLite's write-ahead log keeps its index in memory that all processes of the file share, so they
must run on one machine (sqlite.org/wal.html, "Disadvantages", 2). On a network file system this
fails silently, so network file systems are refused before the file is touched.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import Final, TypeAlias

from aztask.errors import (
    AztaskError,
    BrokerError,
    BrokerUnavailable,
    ConfigurationError,
    EncodeError,
    MessageTooLarge,
    QueueFull,
)
from aztask.support.private import make_directory, make_file, require_private

_NETWORK = """
nfs nfs4 cifs smb3 smbfs ncpfs afs 9p ceph glusterfs lustre beegfs gpfs ocfs2 gfs2 orangefs davfs
fuse.sshfs fuse.s3fs fuse.glusterfs fuse.rclone fuse.blobfuse fuse.blobfuse2 fuse.davfs2 fuse.ceph
fuse.ceph-fuse fuse.cifs fuse.smbnetfs fuse.gcsfuse fuse.juicefs
"""
NETWORK_FILE_SYSTEMS = frozenset(_NETWORK.split())
"""File system types, as /proc/self/mountinfo spells them, that several machines can mount."""

MOUNTINFO = Path("/proc/self/mountinfo")

PARTS = ("", "-wal", "-shm", "-journal")
"""What SQLite adds to the name of a database for its other files (sqlite.org/tempfiles.html)."""

_ESCAPES = (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\"))


def file_system(directory: str, mountinfo: Iterable[str]) -> str:
    """The type of the file system that holds `directory`, an absolute path without links.

    mountinfo: lines as in proc(5), ``/proc/[pid]/mountinfo``. If several file systems are mounted
    on one point, the last one counts. Returns "" if no line matches.
    """
    best, found = -1, ""
    for line in mountinfo:
        before, separator, after = line.partition(" - ")
        fields = before.split(" ")
        if not separator or len(fields) < 5:
            continue
        point = fields[4]
        for escape, character in _ESCAPES:
            point = point.replace(escape, character)
        inside = directory == point or directory.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= best:
            best, found = len(point), after.split(" ", 1)[0]
    return found


def refuse_network(directory: str) -> None:
    """Raise ConfigurationError if `directory` is on a network file system.

    If that cannot be found out (no /proc, an unknown type), the directory is accepted.
    """
    try:
        with MOUNTINFO.open(encoding="utf-8", errors="surrogateescape") as lines:
            kind = file_system(directory, lines)
    except OSError:
        return
    if kind in NETWORK_FILE_SYSTEMS:
        raise ConfigurationError(
            f"{directory} is on a network file system ({kind}), where the queue file would be "
            "damaged: its log needs memory shared by processes of one machine; "
            "choose a local directory"
        )


def prepare(path: str, group: str | None = None) -> str:
    """Create `path`, empty, and its directory; returns the absolute path without links.

    Both are private, or shared with `group`, the name of a group. SQLite gives its log files the
    owner and mode of the database file (sqlite.org/src, os_unix.c, findCreateFileMode).

    Raises ConfigurationError, in one line, if the path cannot be a queue file.
    """
    if not path or "\0" in path:
        raise ConfigurationError(f"{path!r} cannot be a file name; give the path of the queue file")
    try:
        number = None if group is None else group_id(group)
        target = Path(os.path.realpath(path))
        if target.is_dir():
            raise ConfigurationError(f"{path!r} is a directory; give the path of the queue file")
        if target.exists() and not target.is_file():
            raise ConfigurationError(
                f"{path!r} is a device, a pipe or a socket; give the path of the queue file"
            )
        require_private(Path(path).absolute(), "the queue file", number)  # it may be a link
        make_directory(target.parent, number)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigurationError(
            f"cannot use {path!r} as the queue file: {why}; choose a writable place"
        ) from error
    refuse_network(str(target.parent))
    with contextlib.suppress(OSError):  # SQLite's own error says more
        make_file(target, number)
    refuse_strangers(str(target), group)
    return str(target)


def refuse_strangers(path: str, group: str | None = None) -> None:
    """Raise ConfigurationError if other users can change the database or one of its other files.

    Call it before and after the database is opened. Before: SQLite would read a log that a stranger
    has put there. After: SQLite has made its files, and in a directory with the sticky bit, such as
    /tmp, no stranger can replace them. If one makes a log in between, it is read once, and then
    the database is closed.
    """
    number = None if group is None else group_id(group)
    for part in PARTS:
        require_private(Path(path + part), "the queue file", number)


def identity(path: str) -> tuple[int, int] | None:
    """The file's device and inode, which no other file gets while it is open; None if missing."""
    try:
        status = os.stat(path)  # noqa: PTH116  # a Path would cost more than the call, per use
    except OSError:
        return None
    return status.st_dev, status.st_ino


def group_id(group: str) -> int:
    """The number of a group of this machine. Raises ConfigurationError."""
    try:
        groups = importlib.import_module("grp")
    except ImportError:
        raise ConfigurationError(
            f"this system has no groups to share a file with; remove ?group={group}"
        ) from None
    try:
        return int(groups.getgrnam(group).gr_gid)
    except (KeyError, ValueError):
        raise ConfigurationError(
            f"this machine has no group {group!r}; create it, or name another with ?group=NAME"
        ) from None


def boot_id() -> str:
    """An id that changes with every boot of the machine; "" if the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def file_bytes(path: str) -> int | None:
    """The bytes of a database file and of its log; None if there is no file, as in memory."""
    sizes = []
    for name in (Path(path), Path(f"{path}-wal")):
        with contextlib.suppress(FileNotFoundError):
            sizes.append(name.stat().st_size)
    return sum(sizes) if sizes else None


# -- SQLite's errors -------------------------------------------------------------------------------
#
# Translates SQLite's errors into aztask's errors; no other module does.
#
# The names are SQLite's result codes (sqlite.org/rescode.html). A write that finds no room changes
# nothing: SQLite rolls back the whole transaction.

TRANSLATED = (sqlite3.Error, UnicodeEncodeError, OverflowError)
"""The errors for `translate`: SQLite's, and Python's for values that SQLite cannot hold."""

_Advice: TypeAlias = tuple[tuple[str, ...], type[AztaskError], str]

_MEANINGS: Final[tuple[_Advice, ...]] = (
    (
        (
            "SQLITE_FULL",
            "SQLITE_IOERR_WRITE",
            "SQLITE_IOERR_SHM",
            "SQLITE_IOERR_TRUNCATE",
            "SQLITE_IOERR_FSYNC",
        ),
        QueueFull,
        "no room to write {path} ({error}): nothing was stored; free some disk space",
    ),
    (
        ("SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_PROTOCOL"),
        BrokerUnavailable,
        "{path} was locked by another process for too long; try again, and find the process "
        "that keeps a transaction open",
    ),
    (
        ("SQLITE_NOTADB", "SQLITE_CORRUPT"),
        ConfigurationError,
        "{path} is not an aztask queue file, or is damaged ({error}); choose another file, or move "
        "this one to another place",
    ),
    (
        ("SQLITE_CANTOPEN", "SQLITE_READONLY", "SQLITE_PERM", "SQLITE_AUTH"),
        ConfigurationError,
        "{path} cannot be opened for writing ({error}); check the file, its directory and their "
        "permissions",
    ),
    (
        ("InterfaceError", "SQLITE_MISMATCH"),
        EncodeError,
        "{path} cannot hold a value of that type ({error})",
    ),
    (
        ("SQLITE_TOOBIG",),
        MessageTooLarge,
        "{path} cannot hold that many bytes in one message ({error}); store the data elsewhere",
    ),
    (
        ("SQLITE_IOERR",),
        BrokerUnavailable,
        "{path} cannot be read or written ({error}, {code}); check the disk",
    ),
    (("",), BrokerError, "{path}: {error} ({code})"),
)
"""Prefixes of result codes, the error class, and its text. The first match wins."""


def translate(error: BaseException, path: str) -> AztaskError:
    """The aztask error for `error`, which was raised while using the file `path`."""
    if isinstance(error, (UnicodeEncodeError, OverflowError)):
        return EncodeError(f"this cannot be stored: {error}; send plain text and 64-bit numbers")
    code = getattr(error, "sqlite_errorname", None) or type(error).__name__
    kind, advice = next((k, a) for begins, k, a in _MEANINGS if code.startswith(begins))
    return kind(advice.format(path=path, error=error, code=code))
