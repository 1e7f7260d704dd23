"""Open the store of the lease document from the text of a setting.

* ``auto``: next to the queues. A file beside the local broker's database, or a blob container in
  the broker's storage account.
* ``blob://ACCOUNT/CONTAINER`` (Entra ID), or ``CONTAINER`` together with a storage connection
  string.
* Anything else is the path of a file.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Final

from aztask.address.addresses import BlobAddress
from aztask.address.owner import NO_OWNER, Owner
from aztask.address.urls import parse_broker, parse_container
from aztask.errors import ConfigurationError
from aztask.leaseadvice.document import NAME, LeaseStore
from aztask.leaseadvice.file import LeaseFile
from aztask.queues.kinds import kind_of
from aztask.support.late import install_command
from aztask.support.masking import printable

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
