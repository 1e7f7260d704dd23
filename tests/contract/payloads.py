"""The stores of payloads under test.

To put another store under the contract, add a factory to `FACTORIES`: a context manager that takes
a temporary directory and gives a `PayloadSubject`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import azurite
from services import Blobs, blob_payloads
from simulated import line

from aztask.address.urls import parse_container
from aztask.stores.payloads.blob import BlobPayloads
from aztask.stores.payloads.opening import FolderPayloads
from aztask.stores.payloads.store import MemoryPayloads, PayloadStore
from aztask.support.clock import SYSTEM_CLOCK

_names = itertools.count(1)


@dataclass
class PayloadSubject:
    """One store under test. damage: replaces the bytes of a payload, past the store."""

    name: str
    store: PayloadStore
    damage: Callable[[str, bytes], None]


@contextmanager
def folder(directory: Path) -> Iterator[PayloadSubject]:
    """Files of a folder."""
    store = FolderPayloads(directory / "payloads")

    def damage(name: str, data: bytes) -> None:
        (directory / "payloads" / name).write_bytes(data)

    yield PayloadSubject("folder", store, damage)


@contextmanager
def memory(directory: Path) -> Iterator[PayloadSubject]:
    """The store of inline mode."""
    store = MemoryPayloads()

    def damage(name: str, data: bytes) -> None:
        store.stored[name] = data

    yield PayloadSubject("memory", store, damage)


@contextmanager
def blob(directory: Path) -> Iterator[PayloadSubject]:
    """A folder of a container on Azurite, which does not exist yet."""
    server = azurite.kept("blob")
    address = parse_container(f"contract-{next(_names)}/large", azurite.account_of(server))
    store = BlobPayloads(address)

    def damage(name: str, data: bytes) -> None:
        store._container.upload_blob(address.name_of(name), data, overwrite=True)

    yield PayloadSubject("blob", store, damage)
    store.close()


@contextmanager
def simulated_blob(directory: Path) -> Iterator[PayloadSubject]:
    """The real store over the modelled blob service of the simulation."""
    service = Blobs(SYSTEM_CLOCK)
    store = blob_payloads(service, line())

    def damage(name: str, data: bytes) -> None:
        service.put(store.address.container, store.address.name_of(name), data)

    yield PayloadSubject("simulated-blob", store, damage)
    store.close()


FACTORIES: dict[str, Callable[[Path], AbstractContextManager[PayloadSubject]]] = {
    "blob": blob,
    "folder": folder,
    "memory": memory,
    "simulated-blob": simulated_blob,
}
