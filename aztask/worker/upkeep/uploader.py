"""Uploads closed event files to a container, on a thread of its own.

Rules
1. An unreachable store never slows a task: the supervisor's loop waits for nothing here.
2. A file is removed only after its upload is confirmed. If files are kept, an empty file
   ``.NAME.uploaded`` beside it marks it instead. A crash in between uploads it again: see
   `aztask.stores.events.blobs`, rule 1.
3. Workers of one directory take turns under a lock file, so that each file is uploaded once.
4. Waiting files are bounded: beyond the bound the oldest are dropped, counted, and logged as an
   error.
"""

from __future__ import annotations

import contextlib
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
from aztask.stores.events.event import Event
from aztask.stores.events.retention import UPLOAD_LOCK, mark_of
from aztask.stores.events.sink import EventSink, recover
from aztask.support.clock import SYSTEM_CLOCK, Clock
from aztask.support.late import install_command
from aztask.support.parts import Part
from aztask.support.private import FILE_MODE, refuse_exposed, try_lock

logger = logging.getLogger(__name__)

ADAPTER: Final = "aztask.stores.events.blobs"
LOOK_SECONDS: Final = 5.0
FIRST_PAUSE: Final = 1.0
LONGEST_PAUSE: Final = 60.0
WARNING_SECONDS: Final = 60.0
LONGEST_TURN: Final = 600.0
"""Seconds that one look may take: it may upload many files."""

FAREWELL_SECONDS: Final = 10.0
"""How long a stopping worker uploads its last files; the next worker uploads the rest."""


class BlobTarget(Protocol):
    """The container to which files are uploaded."""

    def upload(self, name: str, path: Path) -> bool:
        """Store a file; False if the name holds another file. The same file again is True."""
        ...

    def close(self) -> None:
        """Close the connections to the container."""
        ...


@dataclass(frozen=True, slots=True)
class WaitingFile:
    """A closed file that waits for its upload. name: relative to the directory, with slashes."""

    name: str
    path: Path
    size: int
    modified: float


def waiting_files(directory: Path) -> list[WaitingFile]:
    """The closed event files that wait for upload, oldest first. Links are not followed."""
    found = []
    for path in directory.glob("date=*/hour=*/[!._]*.jsonl"):
        try:
            status = path.lstat()
        except OSError:
            continue  # another worker has removed it
        if stat.S_ISREG(status.st_mode) and not mark_of(path).exists():
            name = path.relative_to(directory).as_posix()
            found.append(WaitingFile(name, path, status.st_size, status.st_mtime))
    return sorted(found, key=lambda each: (each.modified, each.name))


class Uploader:
    """Uploads the closed files of `directory` until it is stopped.

    uploaded: files that were uploaded. dropped_files, dropped_bytes: what was given up because the
    store was unreachable for too long.
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
        self.part = Part("event upload", longest=LONGEST_TURN)
        self._thread = self.part.thread(self._run, "aztask-event-upload")

    def start(self) -> None:
        """Start the thread, which looks every `LOOK_SECONDS`."""
        self._thread.start()

    def stop(self, patience: float = FAREWELL_SECONDS) -> None:
        """Upload what waits, for `patience` seconds at most, and end the thread."""
        self._stopping.set()
        self.part.stop()
        self._thread.join(patience)
        if not self._thread.is_alive():
            self._blobs.close()
        if left := len(waiting_files(self._directory)):
            logger.warning("%d event files were not uploaded; the next worker uploads them", left)

    def turn(self) -> None:
        """Upload what waits, unless the store is unreachable, and keep to the bound."""
        refuse_exposed(self._directory)
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
        self._next_try = 0.0  # a last try, even if the store was unreachable
        self._guarded_turn()

    def _guarded_turn(self) -> None:
        self.part.begin()
        try:
            self.turn()
        except OSError as error:
            self.part.trouble(error)
            self._warn(
                "event files in %s cannot be uploaded, retry follows: %s",
                self._directory,
                error.strerror,
            )
        else:
            if not self._failures:
                self.part.rest()
        finally:
            self.part.idle()

    def _guarded_upload(self, file: WaitingFile) -> None:
        """Upload one file; if it cannot be read, removed or marked, the others still are."""
        try:
            self._upload(file)
        except Exception as error:  # noqa: BLE001  # the other files are uploaded
            if not isinstance(error, OSError):
                self.part.failed(error, f"the event file {file.path} is kept")
                return
            self._warn(
                "the event file %s could not be uploaded, it is kept: %s", file.path, error.strerror
            )

    def _upload(self, file: WaitingFile) -> None:
        """Upload one file, then remove or mark it.

        Crash window: if the process dies between the two, the file is uploaded again.
        """
        try:
            stored = self._blobs.upload(file.name, file.path)
        except BrokerError as error:
            self._failures += 1
            self.part.trouble(error)
            pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (self._failures - 1))
            self._next_try = self._clock.monotonic() + pause
            self._warn(
                "event files cannot be uploaded: %s; they are kept in %s, retry in %g s",
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
                "event file %s not uploaded: the container has another file of that name; "
                "rename or remove the one in %s",
                file.name,
                self._directory,
            )
            return
        self.uploaded += 1
        if self._keep:
            mark_of(file.path).touch()
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
                "dropped %d event files: the container is unreachable and more than %s bytes wait "
                "in %s (%d files, %s bytes dropped so far). Restore it, or raise events_max_bytes.",
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
        """Whether it is our turn. The lock ends with the process; without locks all workers try."""
        try:
            fd = os.open(self._directory / UPLOAD_LOCK, os.O_WRONLY | os.O_CREAT, FILE_MODE)
        except FileNotFoundError:
            yield False  # the directory does not exist: no event was written yet
            return
        try:
            try:
                alone = try_lock(fd)
            except OSError:
                alone = True  # a file system without locks
            yield alone
        finally:
            os.close(fd)


class UploadingSink:
    """Writes events to files; an uploader uploads the closed ones."""

    def __init__(self, sink: EventSink, uploader: Uploader) -> None:
        self._sink = sink
        self._uploader = uploader
        self._uploader.start()

    @property
    def idle(self) -> bool:
        """Whether events are discarded, as `EventSink.idle` says; files keep them."""
        return self._sink.idle

    def emit(self, event: Event) -> None:
        """Write one event, at the next flush."""
        self._sink.emit(event)

    def flush(self) -> None:
        """Write the emitted events to the open file."""
        self._sink.flush()

    def close(self) -> None:
        """Close the open file and upload what waits."""
        self._sink.close()
        self._uploader.stop()


def worker_sink(app: App, worker: str) -> EventSink:
    """A worker's sink: none, files, or files that are uploaded.

    Raises ConfigurationError if the container's address or its SDK is missing.
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
            "uploading events needs azure-storage-blob; install it "
            f"with: {install_command('blob')}, or unset "
            "events_container and AZTASK_EVENTS_CONTAINER"
        ) from None
    blobs: BlobTarget = adapter.EventBlobs(address)
    return blobs
