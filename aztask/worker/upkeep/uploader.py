"""Uploads closed event files to a container, on a thread of its own.

Rules
1. A store that is away never slows a task: the supervisor's loop does not wait for anything here.
2. A file is removed only after its upload is confirmed, or, where files are kept, marked by an
   empty file ``.NAME.uploaded`` beside it. A crash in between uploads it again: see
   `aztask.events.blobs`, rule 1.
3. Workers of one directory take turns under a lock file, so that each file is uploaded once.
4. What waits is bounded: beyond the bound the oldest files are dropped, counted, and told as an
   error in the log.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import logging
import os
import stat
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from aztask.app import App
from aztask.config import Settings
from aztask.errors import BrokerError, ConfigurationError
from aztask.events.event import Event
from aztask.events.sink import EventSink, recover
from aztask.support.clock import SYSTEM_CLOCK, Clock

logger = logging.getLogger(__name__)

ADAPTER: Final = "aztask.events.blobs"
LOCK_NAME: Final = ".upload.lock"
MARK: Final = ".uploaded"
LOOK_SECONDS: Final = 5.0
FIRST_PAUSE: Final = 1.0
LONGEST_PAUSE: Final = 60.0
WARNING_SECONDS: Final = 60.0
FAREWELL_SECONDS: Final = 10.0
"""What a worker that stops gives its last files; what is left then, the next worker uploads."""


class BlobTarget(Protocol):
    """Where files go."""

    def upload(self, name: str, path: Path) -> bool:
        """Store a file whole under a name that is new, or that holds the same file already."""
        ...

    def close(self) -> None:
        """Let go of connections."""
        ...


@dataclass(frozen=True, slots=True)
class Waiting:
    """A closed file that is not uploaded yet. name: relative to the directory, with slashes."""

    name: str
    path: Path
    size: int
    modified: float


def waiting_files(directory: Path) -> list[Waiting]:
    """The closed event files that wait for upload, oldest first. Links are not followed."""
    found = []
    for path in directory.glob("date=*/hour=*/[!._]*.jsonl"):
        try:
            status = path.lstat()
        except OSError:
            continue  # removed meanwhile
        if stat.S_ISREG(status.st_mode) and not _mark(path).exists():
            name = path.relative_to(directory).as_posix()
            found.append(Waiting(name, path, status.st_size, status.st_mtime))
    return sorted(found, key=lambda each: (each.modified, each.name))


class Uploader:
    """Uploads what waits in `directory`, again and again. dropped_files, dropped_bytes: what was
    given up because the store was away for too long; uploaded: files that are there.
    """

    def __init__(
        self,
        directory: Path,
        blobs: BlobTarget,
        *,
        keep: bool = False,
        max_bytes: int = 1 << 30,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.uploaded = 0
        self.dropped_files = 0
        self.dropped_bytes = 0
        self._directory = directory
        self._blobs = blobs
        self._keep = keep
        self._max_bytes = max_bytes
        self._clock = clock
        self._failures = 0
        self._next_try = 0.0
        self._warned_at: float | None = None
        self._refused: set[str] = set()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="aztask-event-upload", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self, patience: float = FAREWELL_SECONDS) -> None:
        """Upload what waits now, for `patience` seconds at most, and end."""
        self._stopping.set()
        self._thread.join(patience)
        if not self._thread.is_alive():
            self._blobs.close()
        if left := len(waiting_files(self._directory)):
            logger.warning("%d event files wait for upload; the next worker does it", left)

    def turn(self) -> None:
        """One look: upload what waits, unless the store is away, and keep to the bound."""
        with self._alone() as alone:
            if not alone:
                return
            recover(self._directory)
            for file in waiting_files(self._directory):
                if file.name in self._refused or self._clock.monotonic() < self._next_try:
                    continue
                self._guarded_upload(file)
            if self._failures:
                self._keep_to_bound()

    def _run(self) -> None:
        while not self._stopping.wait(LOOK_SECONDS):
            self._guarded_turn()
        self._next_try = 0.0  # a last try, however the earlier ones went
        self._guarded_turn()

    def _guarded_turn(self) -> None:
        try:
            self.turn()
        except OSError as error:
            self._warn("event files in %s cannot be uploaded: %s", self._directory, error.strerror)

    def _guarded_upload(self, file: Waiting) -> None:
        """A file that cannot be read, removed or marked keeps no other one waiting."""
        try:
            self._upload(file)
        except OSError as error:
            self._warn("the event file %s stays where it is: %s", file.path, error.strerror)

    def _upload(self, file: Waiting) -> None:
        """Upload one file, then remove or mark it. A crash between the two uploads it again."""
        try:
            stored = self._blobs.upload(file.name, file.path)
        except BrokerError as error:
            self._failures += 1
            pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (self._failures - 1))
            self._next_try = self._clock.monotonic() + pause
            self._warn(
                "event files cannot be uploaded (%s); they wait in %s, next try in %g s",
                error,
                self._directory,
                pause,
            )
            return
        except FileNotFoundError:
            return
        self._failures = 0
        if not stored:
            self._refused.add(file.name)
            logger.error(
                "another file is stored as %s; the one in %s stays there: rename or remove it",
                file.name,
                self._directory,
            )
            return
        self.uploaded += 1
        if self._keep:
            _mark(file.path).touch()
        else:
            file.path.unlink(missing_ok=True)

    def _keep_to_bound(self) -> None:
        """Drop the oldest files until what waits fits the bound."""
        files = waiting_files(self._directory)
        excess = sum(file.size for file in files) - self._max_bytes
        dropped = 0
        for file in files:
            if excess <= 0:
                break
            file.path.unlink(missing_ok=True)
            excess -= file.size
            dropped += 1
            self.dropped_bytes += file.size
        if dropped:
            self.dropped_files += dropped
            logger.error(
                "%d event files dropped, unsent: the container is away and more than %s bytes wait "
                "in %s (%d files, %s bytes dropped in all). Raise events_max_bytes or restore it.",
                dropped,
                f"{self._max_bytes:,}",
                self._directory,
                self.dropped_files,
                f"{self.dropped_bytes:,}",
            )

    def _warn(self, text: str, *values: object) -> None:
        now = self._clock.monotonic()
        if self._warned_at is None or now - self._warned_at >= WARNING_SECONDS:
            self._warned_at = now
            logger.warning(text, *values)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[bool]:
        """Whether it is our turn. The lock ends with the process; without locks everybody tries."""
        try:
            fd = os.open(
                self._directory / LOCK_NAME, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644
            )
        except FileNotFoundError:
            yield False  # nothing was ever written
            return
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            except OSError:
                pass  # a file system without locks
            yield True
        finally:
            os.close(fd)


class UploadingSink:
    """Writes events to files, and has the closed ones uploaded."""

    def __init__(self, sink: EventSink, uploader: Uploader) -> None:
        self._sink = sink
        self._uploader = uploader
        self._uploader.start()

    @property
    def idle(self) -> bool:
        """Whether events go nowhere: they go into files."""
        return self._sink.idle

    def emit(self, event: Event) -> None:
        """Take one event."""
        self._sink.emit(event)

    def flush(self) -> None:
        """Write what was taken."""
        self._sink.flush()

    def close(self) -> None:
        """Close the open file, and upload what waits."""
        self._sink.close()
        self._uploader.stop()


def worker_sink(app: App, worker: str) -> EventSink:
    """Where a worker's events go: nowhere, to files, or to files that are uploaded.

    Raises ConfigurationError where the container's address or its SDK is missing.
    """
    sink = app.open_events(worker)
    blobs = _open_blobs(app.settings)
    if blobs is None or app.settings.events is None:
        return sink
    uploader = Uploader(
        Path(app.settings.events),
        blobs,
        keep=app.settings.events_keep,
        max_bytes=app.settings.events_max_bytes,
    )
    return UploadingSink(sink, uploader)


def _open_blobs(settings: Settings) -> BlobTarget | None:
    address = settings.events_target
    if address is None:
        return None
    try:
        adapter = importlib.import_module(ADAPTER)
    except ImportError:
        raise ConfigurationError(
            "uploading events needs azure-storage-blob; install aztask[blob], or unset "
            "events_container and AZTASK_EVENTS_CONTAINER"
        ) from None
    blobs: BlobTarget = adapter.EventBlobs(address)
    return blobs


def _mark(path: Path) -> Path:
    return path.with_name(f".{path.name}{MARK}")
