"""Deletes old event files, so that a directory that nothing else empties stays bounded.

Rules
1. Only closed files are deleted, by the time of their last write; an open one belongs to its
   writer.
2. A file that waits for its upload stays, however old it is: the uploader has a bound of its own.
3. A file that cannot be deleted does not keep the others.
"""

from __future__ import annotations

import logging
import stat
import time
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Final

from aztask.support.clock import Clock

logger = logging.getLogger(__name__)

LOOK_SECONDS: Final = 3600.0
MARK: Final = ".uploaded"
UPLOAD_LOCK: Final = ".upload.lock"
"""A file in each directory that a worker uploads: the workers take turns with it."""


class OldFiles:
    """The old files of one directory: on a machine that only sends, no worker deletes them."""

    def __init__(self, directory: Path, retention: float | None, clock: Clock) -> None:
        """retention: seconds; None keeps all files."""
        self._directory = directory
        self._retention = retention
        self._clock = clock
        self._next_at = clock.monotonic()

    def remove(self) -> None:
        """Delete them, once an hour."""
        now = self._clock.monotonic()
        if self._retention is not None and now >= self._next_at:
            self._next_at = now + LOOK_SECONDS
            before = self._clock.wall() - self._retention
            remove_old(self._directory, before, uploaded_only=False)


def mark_of(path: Path) -> Path:
    """The empty file that says that `path`, which is kept, has been uploaded."""
    return path.with_name(f".{path.name}{MARK}")


def waits_for_upload(directory: Path, path: Path) -> bool:
    """Whether a closed file of `directory` must stay: workers upload it, and have not yet."""
    return (directory / UPLOAD_LOCK).exists() and not mark_of(path).exists()


def remove_old(directory: Path, before: float, *, uploaded_only: bool) -> int:
    """Delete the event files that were last written before `before`; returns how many.

    * `before`: UTC epoch seconds.
    * `uploaded_only`: True if files are uploaded, so that only marked ones are deleted.
    """
    removed, size, refused = 0, 0, ""
    last_day = time.strftime("date=%Y-%m-%d", time.gmtime(max(0.0, before)))
    days = [
        day for day in directory.glob("date=*") if day.name <= last_day
    ]  # few, where all is well
    for path in chain.from_iterable(day.glob("hour=*/[!._]*.jsonl") for day in days):
        try:
            status = path.lstat()
            if not stat.S_ISREG(status.st_mode) or status.st_mtime >= before:
                continue
            if uploaded_only and not mark_of(path).exists():
                continue
            path.unlink()
            mark_of(path).unlink(missing_ok=True)
        except FileNotFoundError:
            continue  # another worker has deleted it
        except OSError as error:
            refused = f"{path.name}: {error.strerror}"
            continue
        removed += 1
        size += status.st_size
        with suppress(OSError):  # until they are empty
            path.parent.rmdir()
            path.parent.parent.rmdir()
    if removed:
        logger.info("deleted %d old event files (%s bytes) in %s", removed, f"{size:,}", directory)
    if refused:
        logger.warning("old event files in %s cannot be deleted: %s", directory, refused)
    return removed
