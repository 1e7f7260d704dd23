"""Open the store of payloads that the settings name, or the one beside the local queues."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

from aztask.address.addresses import BlobAddress, LocalAddress
from aztask.address.owner import NO_OWNER, Owner
from aztask.address.urls import parse_payloads
from aztask.config import Settings
from aztask.errors import BrokerUnavailable, ConfigurationError, PayloadMissing
from aztask.message.bounds import MessageLimits
from aztask.message.encryption import NO_CIPHER, Cipher
from aztask.message.payload import StoredValue
from aztask.queues.base import Capabilities
from aztask.queues.engine.filesystem import group_id
from aztask.queues.kinds import kind_of
from aztask.stores.payloads.payloads import Payloads
from aztask.stores.payloads.store import NAME, ListedPayload, PayloadStore, listed
from aztask.support.late import install_command
from aztask.support.private import make_directory, make_file, refuse_exposed, require_private

# Payloads as files of a folder: the default of ``local://``, beside the file of the queues.
#
# Rules
# 1. A file is written under a name that ends in ``.part``, then renamed: it is complete or not
#    there.
# 2. Files and folders are private to the user, or shared with the group of the queues' file. A
#    folder that a stranger can change is refused at the start, and counts as unreachable later.


PART: Final = ".part"
_TRIES: Final = 3


class FolderPayloads:
    """The files of one folder; see `aztask.stores.payloads.store.PayloadStore`."""

    remote = False

    def __init__(self, folder: Path, *, group: int | None = None, durable: bool = False) -> None:
        """group: the id of the group to share with. durable: survive a power loss, too.

        Raises ConfigurationError if other users can change the folder.
        """
        require_private(folder, "the folder of the payloads", group)
        self.folder = folder
        self.group = group
        self._durable = durable

    def __repr__(self) -> str:
        return f"<FolderPayloads {self.folder}>"

    def __str__(self) -> str:
        return str(self.folder)

    def write(self, name: str, data: bytes) -> None:
        """Store `data` in a file. If the process dies in between, a ``.part`` file is left over."""
        path = self._path(name)
        for tries_left in reversed(range(_TRIES)):
            try:
                make_directory(self.folder, self.group)
                refuse_exposed(self.folder, self.group)
                make_directory(path.parent, self.group)
                self._write(path, data)
                return
            except FileNotFoundError as error:  # another process removed the empty folder
                if not tries_left:
                    raise self._unavailable(error) from None
            except OSError as error:
                raise self._unavailable(error) from None

    def read(self, stored: StoredValue) -> bytes:
        """The file's bytes. Raises PayloadMissing, PayloadDamaged, BrokerUnavailable."""
        try:
            refuse_exposed(self.folder, self.group)
            with self._path(stored.name).open("rb") as file:
                data = file.read(stored.size + 1)
        except FileNotFoundError:
            raise PayloadMissing(
                f"the payload {stored.name} is not in {self.folder}: it was removed, or this"
                " machine has another folder"
            ) from None
        except OSError as error:
            raise self._unavailable(error) from None
        stored.verify(data)
        return data

    def copy(self, listed: ListedPayload) -> bytes | None:
        """The file's bytes, None if it is gone."""
        try:
            refuse_exposed(self.folder, self.group)
            return self._path(listed.name).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._unavailable(error) from None

    def remove(self, names: Sequence[str]) -> None:
        """Remove the files, and the folder of their hour once it is empty."""
        for name in names:
            path = self._path(name)
            try:
                refuse_exposed(self.folder, self.group)
                path.unlink(missing_ok=True)
            except OSError as error:
                raise self._unavailable(error) from None
            with suppress(OSError):  # not empty, or gone
                path.parent.rmdir()

    def list(self) -> Iterator[ListedPayload]:
        """All payloads, and the ``.part`` files of processes that died."""
        try:
            for path in self.folder.glob("*/*/*"):
                try:
                    size = path.stat().st_size
                except FileNotFoundError:
                    continue
                if (found := listed(str(path.relative_to(self.folder)), size)) is not None:
                    yield found
        except OSError as error:
            raise self._unavailable(error) from None

    def close(self) -> None:
        """Do nothing: no file stays open."""

    def _write(self, path: Path, data: bytes) -> None:
        part = path.with_name(path.name + PART)
        make_file(part, self.group)
        try:
            with part.open("wb", buffering=0) as file:
                left = memoryview(data)
                while left:
                    left = left[file.write(left) :]
                if self._durable:
                    os.fsync(file.fileno())
            part.replace(path)
        except OSError:  # the disk is full, for example
            part.unlink(missing_ok=True)
            raise
        if self._durable:
            _sync_directory(path.parent)

    def _path(self, name: str) -> Path:
        if not NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not the name of a payload")
        return self.folder / name

    def _unavailable(self, error: OSError) -> BrokerUnavailable:
        return BrokerUnavailable(
            f"the folder of the payloads, {self.folder}, cannot be used:"
            f" {error.strerror or type(error).__name__}"
        )


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


MODULE: Final = "aztask.stores.payloads.blob"
"""Imported only when payloads are in blobs: its SDK is an extra."""

SUFFIX: Final = ".payloads"

UNKNOWN: Final = Capabilities("unknown")
"""Of an app that names no broker yet, or gives an object: as careful as can be."""


def payloads_for(
    settings: Settings,
    broker: Any,
    *,
    testing: bool = False,
    owner: Callable[[], Owner] = lambda: NO_OWNER,
    cipher: Cipher = NO_CIPHER,
) -> Payloads | None:
    """The payloads of an app; None if it stores none.

    * `broker`: the broker's address, a tuple of several, a `Broker`, or None. Beside several files
      there is no folder, for each of them may leave.
    * `testing`: True to use the folder beside the queues, whatever the settings name.
    * `owner`: whose payloads these are.
    * `cipher`: encrypts and decrypts them.
    """
    make = _maker(settings, broker, testing=testing)
    if make is None:
        return None
    given = settings.payload_threshold
    kind = kind_of(broker[0] if isinstance(broker, tuple) else broker)
    can = kind.capabilities if kind else UNKNOWN
    threshold = given or can.inline_bytes - cipher.added_bytes
    return Payloads(
        make,
        threshold=threshold,
        checkpoint_threshold=threshold // can.checkpoint_share,
        result_threshold=given or MessageLimits().body_bytes,
        owner=owner,
        cipher=cipher,
    )


def _maker(settings: Settings, broker: Any, *, testing: bool) -> Callable[[], PayloadStore] | None:
    place = None if testing else parse_payloads(settings.payloads, settings.payloads_account)
    if isinstance(place, BlobAddress):
        return partial(_blobs, place)
    if place is not None:
        return partial(FolderPayloads, Path(place).absolute())
    if settings.payloads == "off" or not isinstance(broker, LocalAddress) or broker.in_memory:
        return None
    return lambda: FolderPayloads(
        Path(broker.path + SUFFIX),
        group=group_id(broker.group) if broker.group else None,
        durable=broker.full_durability,
    )


def _blobs(address: BlobAddress) -> PayloadStore:
    try:
        module = importlib.import_module(MODULE)
    except ImportError:
        raise ConfigurationError(
            f"payloads in blobs need azure-storage-blob; install it with: {install_command('blob')}"
        ) from None
    store: PayloadStore = module.BlobPayloads(address)
    return store
