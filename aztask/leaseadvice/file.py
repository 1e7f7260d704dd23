"""The lease document in a file, for workers and senders of one machine.

Rules
1. The file is replaced by a rename, so a reader sees a complete document, old or new.
2. Writers take turns with a lock on a second file, which stays: removing it would let two writers
   in at once.
3. Only the document's bytes are synced to disk, before the rename. After a power loss the previous
   document may be back, which costs some counts and nothing else.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from aztask.address.owner import NO_OWNER, Owner
from aztask.errors import BrokerUnavailable, DecodeError
from aztask.leaseadvice.document import (
    ASIDE,
    SIZE_LIMIT,
    LeaseDocument,
    Stored,
    from_json,
    is_damaged,
    to_json,
)
from aztask.support.forks import fork_safe_lock
from aztask.support.private import make_directory, make_file, wait_for_lock


class LeaseFile:
    """A file with the document. Safe between threads and processes."""

    remote = False

    def __init__(self, path: Path, owner: Owner = NO_OWNER) -> None:
        """`path`: the document's file. Its directory is made with the first publication."""
        self.path = path
        self.owner = owner.of_broker
        self._lock = fork_safe_lock()

    def __repr__(self) -> str:
        return f"<LeaseFile {self.path}>"

    def load(self) -> Stored:
        """Read the file, see `LeaseStore.load`."""
        data = self._read()
        if data is None:
            return Stored(LeaseDocument(owner=self.owner), None)
        document = from_json(data, self.owner)
        return Stored(document, str(document.revision))

    def publish(self, document: LeaseDocument, based_on: Stored) -> bool:
        """Replace the file, see `LeaseStore.publish`.

        If the process dies before the rename, nothing has changed, and a temporary file is left
        over.
        """
        data = to_json(replace(document, revision=based_on.document.revision + 1))
        try:
            with self._turn():
                if self._tag() != based_on.tag:
                    return False
                self._replace(data)
        except OSError as error:
            raise BrokerUnavailable(f"the lease document {self.path}: {error.strerror}") from None
        return True

    def set_aside(self) -> str | None:
        """Rename the file, see `LeaseStore.set_aside`."""
        aside = Path(f"{self.path}{ASIDE}")
        try:
            with self._turn():
                data = self._read()
                if data is None or not is_damaged(data):
                    return None
                self.path.replace(aside)
        except OSError as error:
            raise BrokerUnavailable(f"the lease document {self.path}: {error.strerror}") from None
        return str(aside)

    def close(self) -> None:
        """Does nothing: no file is held open."""

    def _read(self) -> bytes | None:
        try:
            with self.path.open("rb") as file:
                return file.read(SIZE_LIMIT + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise BrokerUnavailable(f"the lease document {self.path}: {error.strerror}") from None

    def _tag(self) -> str | None:
        try:
            return self.load().tag
        except DecodeError:
            return "not a document"

    @contextmanager
    def _turn(self) -> Iterator[None]:
        make_directory(self.path.parent)
        make_file(lock := Path(f"{self.path}.lock"))
        with self._lock, lock.open("wb") as file:
            wait_for_lock(file.fileno())
            yield

    def _replace(self, data: bytes) -> None:
        number, name = tempfile.mkstemp(dir=self.path.parent, prefix=f".{self.path.name}.")
        try:
            with os.fdopen(number, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            Path(name).replace(self.path)
        except BaseException:
            with suppress(OSError):
                Path(name).unlink()
            raise
