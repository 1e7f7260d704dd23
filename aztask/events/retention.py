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
from contextlib import suppress
from pathlib import Path
from typing import Final

logger = logging.getLogger(__name__)

MARK: Final = ".uploaded"


def mark_of(path: Path) -> Path:
    """The empty file that says that `path`, which is kept, has been uploaded."""
    return path.with_name(f".{path.name}{MARK}")


def remove_old(directory: Path, before: float, *, uploaded_only: bool) -> int:
    """Delete the event files that were last written before `before`; returns how many.

    * `before`: UTC epoch seconds.
    * `uploaded_only`: True if files are uploaded, so that only marked ones are deleted.
    """
    removed, size, refused = 0, 0, ""
    for path in directory.glob("date=*/hour=*/[!._]*.jsonl"):
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
