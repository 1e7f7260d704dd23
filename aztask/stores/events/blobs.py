"""Closed event files, uploaded as blobs.

Rules
1. A blob is written once: ``If-None-Match: *``. Uploading a file again, after a crash between
   upload and removal or by two workers with one directory, finds the blob there and does no harm.
2. A blob appears completely or not at all: one Put Blob, or blocks that are committed together.
3. The SDK retries nothing: the caller decides on pauses. Every request has a time-out.

Source: the Put Blob and Put Block List pages of the Blob service's REST reference.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from azure.core.exceptions import AzureError, ResourceExistsError, ResourceNotFoundError
from azure.storage.blob import ContentSettings

from aztask.address.addresses import BlobAddress
from aztask.azure.container import container_client, create, reason_of
from aztask.errors import BrokerUnavailable

CONTENT: Final = ContentSettings(content_type="application/x-ndjson")


class EventBlobs:
    """The event files of one container. Any thread may call, one at a time."""

    def __init__(self, address: BlobAddress) -> None:
        """Connects at the first upload. Raises ConfigurationError without a credential."""
        self.address = address
        self._container = container_client(address)

    def upload(self, name: str, path: Path) -> bool:
        """Store the file at `path` as the blob `name`; False if a blob of that name exists.

        Creates the container if it is missing. Raises BrokerUnavailable if the service does not
        answer or refuses, OSError if the file cannot be read.
        """
        try:
            try:
                return self._put(name, path)
            except ResourceNotFoundError:
                create(self._container)
                return self._put(name, path)
        except AzureError as error:
            raise BrokerUnavailable(reason_of(error)) from error

    def close(self) -> None:
        """Close idle connections to the blob service."""
        self._container.close()

    def _put(self, name: str, path: Path) -> bool:
        blob = self._container.get_blob_client(self.address.name_of(name))
        with path.open("rb") as stream:
            try:
                blob.upload_blob(stream, overwrite=False, content_settings=CONTENT)
            except ResourceExistsError:
                return blob.get_blob_properties().size == path.stat().st_size
        return True
