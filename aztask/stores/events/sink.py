"""Event sinks: files of JSON lines, one directory for all workers and senders.

A worker appends to a file whose name begins with a dot, and renames it to
``date=YYYY-MM-DD/hour=HH/WORKER-SEQ.jsonl`` when it is large, old or its hour has ended. Readers
that skip names with a dot (Spark does) see only complete files.

Rules
1. Events never break or delay the work: an event that cannot be written is counted and dropped,
   with one line in the log, and the next flush tries again.
2. A flush is one write: a killed process loses at most the events it had not flushed, and a kill
   during the write leaves a damaged line at the file's end. The files are not synced: a power cut
   may leave damaged lines and blocks of NULs. Readers skip and count both.
3. An open file is locked by its writer (`aztask.stores.events.sink`), and only by it. A file
   whose lock is free belongs to a dead process, and the process that finds it publishes it.
4. SEQ contains a random part for each sink, so writers of one name, and a child after a fork, never
   write or rename to the same file.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import re
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final, Protocol, Self

from aztask.stores.events.event import EVENT_KINDS, Event, EventKind, from_line, quote, to_line
from aztask.stores.events.retention import OldFiles
from aztask.support.clock import SYSTEM_CLOCK, Clock
from aztask.support.display import mask
from aztask.support.forks import in_forked_child
from aztask.support.private import (
    BINARY,
    FILE_MODE,
    RENAMES_OPEN_FILES,
    make_directory,
    refuse_exposed,
    require_private,
    try_lock,
)

# -- Open files ------------------------------------------------------------------------------------
#
# The event files that writers have open: their names, their locks, and their publication.
#
# A writer locks the file that it writes, and publishes it by a rename. So a file whose lock is free
# has lost its writer, and any other writer publishes it. Windows renames no open file: there the
# lock ends just before the rename, and another process may be faster, which does no harm.

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


# -- Sinks -----------------------------------------------------------------------------------------


__all__ = [
    "Event",
    "EventKind",
    "EVENT_KINDS",
    "EventSink",
    "NullEventSink",
    "FileEventSink",
    "EventReader",
    "read_events",
    "recover",
]

_log = logging.getLogger(__name__)

BUFFER_LIMIT: Final = 4096
"""Events after which `emit` flushes by itself, so that memory stays bounded if no one flushes."""
LINE_LIMIT: Final = 1 << 20
"""Bytes of the longest line that a reader accepts; ours stay under 40,000."""
WARNING_INTERVAL: Final = 60.0
"""Seconds between two log lines about events that could not be written."""


class EventSink(Protocol):
    """Accepts events. Any thread may call; no disk error is raised."""

    @property
    def idle(self) -> bool:
        """True if events are discarded, so that callers need not make them."""
        ...

    def emit(self, event: Event) -> None:
        """Accept one event; the next flush writes it."""
        ...

    def flush(self) -> None:
        """Write the accepted events. The owner calls this regularly, also when it is idle."""
        ...

    def close(self) -> None:
        """Flush and publish the open file. Later events open another one."""
        ...


class NullEventSink:
    """A sink that discards events."""

    idle = True

    def emit(self, event: Event) -> None:
        """Discard the event: no file is written."""

    def flush(self) -> None:
        """Do nothing: no event was kept."""

    def close(self) -> None:
        """Do nothing: no file is open."""


class FileEventSink:
    """Appends events to files under `directory`, which is made with the first event.

    * `worker`: the writer's name, in the events and in the file names.
    * `max_bytes`, `max_age_seconds`: a file is published when it has that size or age, or when the
      hour (UTC) in which it was opened has ended.
    * `retention`: seconds after which published files are deleted, looked for once an hour; None
      keeps them.
    * `dropped`: how many events could not be written.

    Raises ConfigurationError if other users can change the directory.
    """

    idle = False

    def __init__(
        self,
        directory: str | os.PathLike[str],
        worker: str,
        *,
        clock: Clock = SYSTEM_CLOCK,
        max_bytes: int = 64 * 1024 * 1024,
        max_age_seconds: float = 300.0,
        retention: float | None = None,
    ) -> None:
        self.dropped = 0
        self._directory = Path(directory)
        require_private(self._directory, "the event directory")
        self._old_files = OldFiles(self._directory, retention, clock)
        self._worker = mask(worker)
        self._worker_json = quote(self._worker)
        self._clock = clock
        self._max_bytes = max_bytes
        self._max_age = max_age_seconds
        self._last_warning: float | None = None
        self._fd: int | None = None
        self._start_empty()
        _sinks.add(self)

    def _start_empty(self) -> None:
        """Take a new identity without events or file: at the start, and in a child after fork."""
        if self._fd is not None:
            # The parent's file: parent and child share its lock, which must end with the parent,
            # so the child closes its copy.
            os.close(self._fd)
        self._fd = None
        self._path = Path()
        self._size = 0
        self._opened_at = 0.0
        self._hour = -1
        self._files = 0
        self._numbers = itertools.count(1)
        self._nonce = os.urandom(6).hex()
        self._lines: deque[str] = deque()
        self._lock = threading.Lock()

    def emit(self, event: Event) -> None:
        """Accept one event; it stays in memory until the next flush."""
        self._lines.append(
            to_line(
                event,
                quote(event.id)[1:-1] if event.id else f"{self._nonce}-{next(self._numbers)}",
                event.ts or self._clock.wall(),
                quote(mask(event.worker)) if event.worker else self._worker_json,
            )
        )
        if len(self._lines) >= BUFFER_LIMIT:
            self.flush()

    def flush(self) -> None:
        """Write all accepted events at once, and publish the file if it is time."""
        if not self._lines and self._fd is None:
            return
        with self._lock:
            lines = [self._lines.popleft() for _ in range(len(self._lines))]
            try:
                self._publish_if_due()
                if lines:
                    self._write("".join(lines).encode("ascii"))
            except OSError as error:
                self._lost(len(lines), error)

    def close(self) -> None:
        """Flush and publish the open file."""
        self.flush()
        with self._lock:
            try:
                self._publish()
            except OSError as error:
                self._lost(0, error)

    def _publish_if_due(self) -> None:
        if self._fd is None:
            return
        age = self._clock.monotonic() - self._opened_at
        hour = int(self._clock.wall() // 3600)
        if self._size >= self._max_bytes or age >= self._max_age or hour != self._hour:
            self._publish()

    def _write(self, data: bytes) -> None:
        """Append `data` completely or not at all (a full disk may write only a part)."""
        fd = self._fd if self._fd is not None else self._open()
        written = os.write(fd, data)
        if written < len(data):
            with contextlib.suppress(OSError):
                os.ftruncate(fd, self._size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._size += written

    def _open(self) -> int:
        """Open and lock the next file, after publishing the files of dead writers.

        If the process dies between creating and locking, an empty file is left over: see `recover`.
        """
        make_directory(self._directory)
        refuse_exposed(self._directory)
        recover(self._directory)
        self._old_files.remove()
        self._hour = int(self._clock.wall() // 3600)
        utc = time.gmtime(self._hour * 3600)
        prefix = f".{utc.tm_year:04d}-{utc.tm_mon:02d}-{utc.tm_mday:02d}T{utc.tm_hour:02d}."
        worker = _file_name(self._worker)
        fd = None
        while fd is None:
            self._files += 1
            name = f"{prefix}{worker}-{self._nonce}{self._files:06d}.jsonl"
            self._path = self._directory / name
            fd = create_locked(self._path)
        self._fd, self._size, self._opened_at = fd, 0, self._clock.monotonic()
        return fd

    def _publish(self) -> None:
        """Rename the open file to its public name.

        If the process dies before the rename, the next writer that opens a file does it.
        """
        if self._fd is None:
            return
        fd, self._fd = self._fd, None
        publish_and_close(fd, self._path, empty=self._size == 0)

    def _lost(self, count: int, error: OSError) -> None:
        self.dropped += count
        now = self._clock.monotonic()
        if self._last_warning is None or now - self._last_warning >= WARNING_INTERVAL:
            self._last_warning = now
            _log.warning(
                "events cannot be written to %s (%s): %d dropped so far; work goes on. Free space "
                "or correct the permissions.",
                self._directory,
                error.strerror,
                self.dropped,
            )


_sinks: weakref.WeakSet[FileEventSink] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for sink in list(_sinks):
        sink._start_empty()


in_forked_child(_after_fork_in_child)


def _file_name(worker: str) -> str:
    """The worker's name as the start of a file name that readers do not treat as hidden.

    The events keep the name unchanged.
    """
    return re.sub(r"[^A-Za-z0-9_@.-]", "_", worker)[:80].lstrip("._") or "worker"


class EventReader(Iterator[Event]):
    """Iterates over the events under a directory; ``skipped`` counts damaged lines.

    Open files are read, too (their last line may be incomplete and is skipped then), unless
    ``published_only``. A file that is renamed during the iteration is read once.
    """

    def __init__(self, directory: str | os.PathLike[str], *, published_only: bool = False) -> None:
        self.skipped = 0
        self._directory = Path(directory)
        self._events = self._read(published_only)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Event:
        return next(self._events)

    def _read(self, published_only: bool) -> Iterator[Event]:
        # Open files are listed first: a file that is published between the listings is in both.
        still_open = [] if published_only else open_files(self._directory)
        complete = sorted(self._directory.glob("date=*/hour=*/[!._]*.jsonl"))
        candidates = {path: [path] for path in complete}
        for path in still_open:
            candidates[published(path)] = [path, published(path)]
        for paths in candidates.values():
            yield from self._read_first(paths)

    def _read_first(self, paths: list[Path]) -> Iterator[Event]:
        for path in paths:
            try:
                stream = path.open("rb")
            except OSError:
                continue
            with stream:
                yield from self._lines_of(stream)
            return

    def _lines_of(self, stream: BinaryIO) -> Iterator[Event]:
        while line := stream.readline(LINE_LIMIT):
            whole = line.endswith(b"\n")
            text = line.strip(b"\0\r\n ")  # a power cut leaves NULs before a later line
            event = from_line(text) if whole else None
            if event is not None:
                yield event
            if event is None or b"\0" in line:
                self.skipped += 1
            if not whole:
                _skip_line(stream)


def _skip_line(stream: BinaryIO) -> None:
    """Read to the end of a line that is too long, or of the file."""
    while (rest := stream.readline(LINE_LIMIT)) and not rest.endswith(b"\n"):
        pass


def read_events(directory: str | os.PathLike[str], *, published_only: bool = False) -> EventReader:
    """Iterate over the events under `directory` (see `EventReader`), if it exists."""
    return EventReader(directory, published_only=published_only)
