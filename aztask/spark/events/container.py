"""Event files in a blob container, read with azure-storage-blob: no jars.

Rules
1. A `Container` travels to executors, so it holds the *name* of the environment variable with the
   account's connection string, never the string. Each process reads its own environment.
2. A blob is published with ``If-None-Match: *``: atomically, and never over an existing one.
"""

from __future__ import annotations

import io
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, BinaryIO, Final

from azure.core.exceptions import ResourceExistsError, ResourceNotFoundError
from azure.storage.blob import ContainerClient

from aztask.address.addresses import BlobAddress
from aztask.address.urls import parse_container
from aztask.azure.container import container_client
from aztask.config import read_environment
from aztask.errors import ConfigurationError
from aztask.spark.events.files import FileListing

ACCOUNT_VARIABLE: Final = "AZTASK_EVENTS_ACCOUNT"
PIECE: Final = 4 << 20
"""Bytes of a blob that one request fetches."""
FOOTER: Final = 64 << 10
"""Bytes per request where only the end of a file is read."""


@dataclass(frozen=True, slots=True)
class Container:
    """A blob container, or a folder in it, to which workers upload.

    text: as in ``AZTASK_EVENTS_CONTAINER``. account_variable: the environment variable with the
    account's connection string, which each process reads; unused with ``blob://`` (Entra ID).
    """

    text: str
    account_variable: str = ACCOUNT_VARIABLE

    def __str__(self) -> str:
        return str(self.address())

    def address(self) -> BlobAddress:
        """The container with its credential, in this process. Raises ConfigurationError."""
        if "://" in self.text:
            return parse_container(self.text)
        account = read_environment(self.account_variable)
        if account is None:
            raise ConfigurationError(
                f"{self.account_variable} is not set here; set it to the storage connection string "
                "on the driver and on every executor, or write blob://ACCOUNT/CONTAINER"
            )
        return parse_container(self.text, account)

    def list(self) -> FileListing:
        """List the blobs in the container or folder."""
        listing = FileListing()
        prefix = self.address().name_of("")
        with self._client() as client:
            for blob in client.list_blobs(name_starts_with=prefix or None):
                name = blob.name.removeprefix(prefix)
                listing.add(name, blob.size, blob.last_modified.timestamp())
        return listing

    def clock(self) -> float:
        """The service's time in seconds since 1970, to a second."""
        dates: list[str] = []
        with self._client() as client:
            client.get_container_properties(
                raw_response_hook=lambda answer: dates.append(answer.http_response.headers["Date"])
            )
        return parsedate_to_datetime(dates[0]).timestamp()

    def open(self, name: str) -> BinaryIO:
        """A stream of the blob's bytes, fetched in pieces of `PIECE` bytes."""
        return io.BufferedReader(self._stream(name), PIECE)

    def open_seekable(self, name: str) -> BinaryIO:
        """A seekable stream that fetches what is read: a footer costs two small requests."""
        return io.BufferedReader(self._stream(name), FOOTER)

    def _stream(self, name: str) -> _BlobStream:
        client = self._client()
        try:
            size = self._blob(client, name).get_blob_properties().size
        except ResourceNotFoundError:
            client.close()
            raise FileNotFoundError(name) from None
        return _BlobStream(client, self.address().name_of(name), size)

    @contextmanager
    def local_copy(self, name: str) -> Iterator[Path]:
        """Yield a temporary copy of the blob on this machine."""
        with tempfile.TemporaryDirectory(prefix="aztask-events-") as folder:
            path = Path(folder, "copy")
            with self.open(name) as blob, path.open("wb") as copy:
                shutil.copyfileobj(blob, copy, PIECE)
            yield path

    @contextmanager
    def scratch(self, name: str) -> Iterator[Path]:
        """Yield the path of a temporary file on this machine."""
        with tempfile.TemporaryDirectory(prefix="aztask-events-") as folder:
            yield Path(folder, "part")

    def publish(self, path: Path, name: str) -> bool:
        """Upload the file with ``If-None-Match: *``; False if the blob exists already."""
        with self._client() as client, path.open("rb") as stream:
            try:
                self._blob(client, name).upload_blob(stream, overwrite=False)
            except ResourceExistsError:
                return False
        return True

    def remove(self, name: str) -> None:
        """Delete the blob; a missing one is fine."""
        with self._client() as client:
            try:
                self._blob(client, name).delete_blob()
            except ResourceNotFoundError:
                return

    def waits(self, name: str) -> bool:
        """False: what is in a container was uploaded."""
        return False

    def _client(self) -> ContainerClient:
        return container_client(self.address(), retry_total=3)

    def _blob(self, client: ContainerClient, name: str) -> Any:
        return client.get_blob_client(self.address().name_of(name))


class _BlobStream(io.RawIOBase):
    """A blob as a raw stream of range reads."""

    def __init__(self, client: ContainerClient, name: str, size: int) -> None:
        self._client = client
        self._blob = client.get_blob_client(name)
        self._size = size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        """The offset of the next read."""
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move the offset of the next read; costs no request."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Fetch the next bytes into `buffer`; 0 at the end."""
        count = min(len(buffer), self._size - self._at)
        if count <= 0:
            return 0
        data = self._blob.download_blob(offset=self._at, length=count).readall()
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def close(self) -> None:
        """Close the stream and its connection."""
        if not self.closed:
            self._client.close()
        super().close()
