"""Open the store of the lease document from the text of a setting.

* ``auto``: next to the queues. A file beside the local broker's database, or a blob container in
  the broker's storage account.
* ``blob://ACCOUNT/CONTAINER`` (Entra ID), or ``CONTAINER`` together with a storage connection
  string.
* Anything else is the path of a file.
"""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from aztask.address.addresses import BlobAddress
from aztask.address.owner import NO_OWNER, Owner
from aztask.address.urls import parse_broker, parse_container
from aztask.errors import BrokerUnavailable, ConfigurationError, DecodeError
from aztask.leaseadvice.document import (
    ASIDE,
    NAME,
    SIZE_LIMIT,
    LeaseDocument,
    LeaseStore,
    Stored,
    from_json,
    is_damaged,
    to_json,
)
from aztask.queues.kinds import kind_of
from aztask.support.display import printable
from aztask.support.forks import fork_safe_lock
from aztask.support.late import install_command
from aztask.support.private import make_directory, make_file, refuse_exposed, wait_for_lock

# -- The lease document in a file, for workers and senders of one machine.
#
# Rules
# 1. The file is replaced by a rename, so a reader sees a complete document, old or new.
# 2. Writers take turns with a lock on a second file, which stays: removing it would let two writers
#    in at once.
# 3. Only the document's bytes are synced to disk, before the rename. After a power loss the
#    previous document may be back, which costs some counts and nothing else.


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
            refuse_exposed(self.path)
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
        refuse_exposed(lock)
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


AUTO: Final = "auto"
CONTAINER: Final = "aztask"
"""The container of ``auto``."""
BLOB_MODULE: Final = "aztask.leaseadvice.blob"
"""Imported only when the document is in a blob: its SDK is an extra."""


def open_lease_store(
    place: str,
    *,
    account: str | None = None,
    broker: str | None = None,
    owner: Owner = NO_OWNER,
) -> LeaseStore:
    """Make the store that `place` names; nothing is read yet.

    * `account`: the storage connection string that a bare container name needs.
    * `broker`: the URL or connection string from which ``auto`` is derived.
    * `owner`: `App.owner`: whose entries are read and written in a place that several brokers may
      share. A place beside the queues of ``auto`` belongs to their broker, and needs none.

    Raises ConfigurationError.
    """
    if place == AUTO:
        return _beside(broker, account, owner)
    if account is not None or place.startswith("blob://"):
        return _blob(place, account, owner)
    if not place or "\0" in place or "://" in place:
        raise ConfigurationError(
            f"{printable(place, 80)!r} is no place for lease advice; give auto, a file's path, or "
            "blob://ACCOUNT/CONTAINER"
        )
    return LeaseFile(Path(place), owner)


def _beside(broker: str | None, account: str | None, owner: Owner) -> LeaseStore:
    if account is not None:
        return _blob(CONTAINER, account, owner)
    address = parse_broker(broker) if broker is not None else None
    kind = kind_of(address)
    place = kind.advice_place(address, broker or "", CONTAINER) if kind is not None else None
    if isinstance(place, Path):
        return LeaseFile(Path(f"{place}.{NAME}"))
    if place is not None:
        return _in_container(place)
    raise ConfigurationError(
        "lease advice has no place of its own beside this broker; give a file's path, or "
        "blob://ACCOUNT/CONTAINER"
    )


def _blob(container: str, account: str | None, owner: Owner) -> LeaseStore:
    return _in_container(parse_container(container, account), owner)


def _in_container(address: BlobAddress, owner: Owner = NO_OWNER) -> LeaseStore:
    try:
        module = importlib.import_module(BLOB_MODULE)
    except ImportError:
        raise ConfigurationError(
            "lease advice in a blob needs azure-storage-blob; install it "
            f"with: {install_command('blob')}"
        ) from None
    store: LeaseStore = module.LeaseBlob(address, owner)
    return store
