"""A listing of event files, and counts of the files that are skipped."""

from __future__ import annotations

import io
import os
import re
import stat
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final

from aztask.errors import ConfigurationError
from aztask.stores.events.retention import mark_of, waits_for_upload
from aztask.support.display import printable
from aztask.support.private import FILE_MODE, make_directory, refuse_exposed

LINES: Final = ".jsonl"
PARQUET: Final = ".parquet"

_FOLDER: Final = re.compile(r"date=\d{4,}-\d\d-\d\d/hour=\d\d")


@dataclass(frozen=True, slots=True)
class EventFile:
    """One file with events.

    name: relative to the place, with slashes. size: bytes. appeared: when it got this name, in
    seconds since 1970 by the place's clock: a blob's last modification, a file's status change.
    rows: for streams, the ranges (first row, number of rows) of a compacted file; None: all rows.
    """

    name: str
    size: int
    appeared: float
    rows: tuple[tuple[int, int], ...] | None = None

    @property
    def moment(self) -> int:
        """When it appeared, in microseconds since 1970."""
        return int(self.appeared * 1e6)

    @property
    def folder(self) -> str:
        """The folder of its hour, ``date=.../hour=..``."""
        return self.name.rpartition("/")[0]

    @property
    def compacted(self) -> bool:
        """Whether it is a compacted file, in Parquet format."""
        return self.name.endswith(PARQUET)


@dataclass(slots=True)
class FileListing:
    """files: those to read. skipped: how many others were found, by reason."""

    files: list[EventFile] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)

    def add(self, name: str, size: int, appeared: float) -> None:
        """Add one regular file or blob, or count it as skipped."""
        folder, _, base = name.rpartition("/")
        if base.startswith((".", "_")) or "/." in f"/{folder}":
            self.skipped["hidden name"] += 1
        elif not (_FOLDER.fullmatch(folder) and base.endswith((LINES, PARQUET)) and _is_utf8(name)):
            self.skipped["not an event file"] += 1
        else:
            self.files.append(EventFile(name, size, appeared))


def _is_utf8(name: str) -> bool:
    """Whether Spark and Arrow can handle the name: Linux allows any bytes in one."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


# -- A directory -----------------------------------------------------------------------------------
#
# Event files in a directory.
#
# Rules
# 1. Listing follows no links and goes two levels deep, ``date=*/hour=*/``, so it cannot loop.
# 2. A file is synced, then hard-linked to its name: it appears atomically, and never over another.
# 3. A new file is private, as those of workers are. Users who may list its directory may read it,
#    too: that is what opening the directory to them is for.

READ_BY_OTHERS: Final = stat.S_IRGRP | stat.S_IROTH


@dataclass(frozen=True, slots=True)
class Directory:
    """A directory that has the same path on every executor."""

    path: str

    def __str__(self) -> str:
        return self.path

    def list(self) -> FileListing:
        """List the files, sorted by name. Raises ConfigurationError if that fails."""
        listing = FileListing()
        try:
            self._list(Path(self.path), "", listing)
        except OSError as error:
            raise ConfigurationError(
                f"the events in {printable(self.path)} cannot be listed: {error.strerror}"
            ) from None
        listing.files.sort(key=lambda file: file.name)
        return listing

    def clock(self) -> float:
        """This machine's time. A stream waits longer than a network share's clock may differ."""
        return time.time()

    def _list(self, folder: Path, prefix: str, listing: FileListing) -> None:
        with os.scandir(folder) as entries:
            for entry in entries:
                name = prefix + entry.name
                if entry.is_symlink():
                    listing.skipped["link"] += 1
                elif entry.is_dir(follow_symlinks=False):
                    if name.count("/") < 2 and not entry.name.startswith((".", "_")):
                        self._list(Path(entry.path), f"{name}/", listing)
                    else:
                        listing.skipped["folder"] += 1
                elif entry.is_file(follow_symlinks=False):
                    _add_entry(listing, name, entry)
                else:
                    listing.skipped["not a file"] += 1

    def open(self, name: str) -> BinaryIO:
        """A stream of the file's bytes."""
        return self._path(name).open("rb")

    def open_seekable(self, name: str) -> BinaryIO:
        """As `open`: every file is seekable."""
        return self.open(name)

    @contextmanager
    def local_copy(self, name: str) -> Iterator[Path]:
        """Yield the path of the file itself; nothing is copied."""
        yield self._path(name)

    @contextmanager
    def scratch(self, name: str) -> Iterator[Path]:
        """Yield a hidden file in the same folder. If a crash leaves it there, readers ignore it."""
        path = self._path(name)
        make_directory(Path(self.path))
        refuse_exposed(Path(self.path))
        make_directory(path.parent)
        handle, scratch = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
        os.close(handle)
        try:
            yield Path(scratch)
        finally:
            Path(scratch).unlink(missing_ok=True)

    def publish(self, path: Path, name: str) -> bool:
        """Sync the file and link it to its name, atomically; False if the name is taken."""
        target = self._path(name)
        path.chmod(FILE_MODE | target.parent.stat().st_mode & READ_BY_OTHERS)
        handle = os.open(path, os.O_RDWR)  # Windows syncs only what is open for writing
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
        if not _link(path, target):
            return False
        _sync_folder(target.parent)
        return True

    def remove(self, name: str) -> None:
        """Remove the file; a missing one is fine. If it was uploaded, its mark goes too."""
        path = self._path(name)
        path.unlink(missing_ok=True)
        mark_of(path).unlink(missing_ok=True)

    def waits(self, name: str) -> bool:
        """Whether a worker uploads this directory, and has not uploaded the file yet."""
        return waits_for_upload(Path(self.path), self._path(name))

    def _path(self, name: str) -> Path:
        return Path(self.path, name)


def _link(path: Path, target: Path) -> bool:
    """Link the file to its name; False if the name is taken.

    Without hard links (some network shares) the file is renamed, which is atomic too. Two processes
    that publish at the same time then overwrite each other, with the same content.
    """
    try:
        os.link(path, target)
    except FileExistsError:
        return False
    except OSError:
        if target.exists():
            return False
        path.rename(target)
    return True


def _sync_folder(path: Path) -> None:
    """Write the folder's entries to the disk. Windows opens no folders and does it by itself."""
    try:
        folder = os.open(path, os.O_RDONLY)
    except PermissionError:
        return
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _add_entry(listing: FileListing, name: str, entry: os.DirEntry[str]) -> None:
    try:
        status = entry.stat(follow_symlinks=False)
    except OSError:
        return  # removed since the folder was read
    if stat.S_ISREG(status.st_mode):
        listing.add(name, status.st_size, status.st_ctime)


# -- One file that Spark has fetched ---------------------------------------------------------------


@dataclass(frozen=True)
class Fetched:
    """One file that Spark has fetched, with a place's operations for reading."""

    place: str
    content: bytes

    def __str__(self) -> str:
        return self.place

    def open(self, name: str) -> BinaryIO:
        """A stream of the content."""
        return io.BytesIO(self.content)

    open_seekable = open

    @contextmanager
    def local_copy(self, name: str) -> Iterator[Path]:
        """Yield a temporary copy on this machine."""
        with tempfile.TemporaryDirectory(prefix="aztask-events-") as folder:
            path = Path(folder, "copy")
            path.write_bytes(self.content)
            yield path
