"""The event files that writers have open: their names, their locks, and their publication.

A writer locks the file that it writes, and publishes it by a rename. So a file whose lock is free
has lost its writer, and any other writer publishes it. Windows renames no open file: there the lock
ends just before the rename, and another process may be faster, which does no harm.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Final

from aztask.support.private import BINARY, FILE_MODE, RENAMES_OPEN_FILES, make_directory, try_lock

_OPEN_NAME: Final = re.compile(r"\.(\d{4,}-\d\d-\d\d)T(\d\d)\.(.+\.jsonl)")


def recover(directory: str | os.PathLike[str]) -> int:
    """Publish the files that dead writers left open in `directory`; returns how many.

    Files of living writers are not touched, nor any file on a file system without locks.
    """
    recovered = 0
    for path in open_files(Path(directory)):
        try:
            fd = os.open(path, os.O_RDWR)
        except OSError:
            continue  # another process published it, or we have no permission
        try:
            recovered += _recover_file(path, fd)
        except OSError:
            continue  # another process publishes it, or this file system has no locks
    return recovered


def _recover_file(path: Path, fd: int) -> bool:
    """Publish an open file whose writer is dead, and close `fd`. Returns whether it held events."""
    status = os.fstat(fd)
    try:
        dead = try_lock(fd) and os.path.samestat(status, path.stat())
    except OSError:
        dead = False
    if not dead:
        os.close(fd)
        return False
    publish_and_close(fd, path, empty=status.st_size == 0)
    return status.st_size > 0


def open_files(directory: Path) -> list[Path]:
    """The files in `directory` that writers have open, or left open when they died."""
    try:
        return sorted(path for path in directory.iterdir() if _OPEN_NAME.fullmatch(path.name))
    except OSError:
        return []


def published(path: Path) -> Path:
    """The public path of an open file."""
    match = _OPEN_NAME.fullmatch(path.name)
    if match is None:
        raise ValueError(f"{path.name} is not the name of an open event file")
    return path.parent / f"date={match[1]}" / f"hour={match[2]}" / match[3]


def publish_and_close(fd: int, path: Path, *, empty: bool) -> None:
    """Publish a file under its lock. Windows renames no open file, so the lock ends before."""
    try:
        if RENAMES_OPEN_FILES:
            _publish_file(path, empty=empty)
    finally:
        os.close(fd)
    if not RENAMES_OPEN_FILES:
        with contextlib.suppress(FileNotFoundError):  # another process found it unlocked
            _publish_file(path, empty=empty)


def _publish_file(path: Path, *, empty: bool) -> None:
    if empty:
        path.unlink()
        return
    target = published(path)
    make_directory(target.parent)
    path.rename(target)


def create_locked(path: Path) -> int | None:
    """The descriptor of a new, locked file; None if another process took the file before that."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | BINARY
    fd = os.open(path, flags, FILE_MODE)
    try:
        if try_lock(fd) and os.path.samestat(os.fstat(fd), path.stat()):
            return fd
    except FileNotFoundError:
        pass
    except OSError:
        return fd  # this file system has no locks, so no process can take the file
    os.close(fd)
    return None
