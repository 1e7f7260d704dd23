"""A blob that many processes change: its ETag proves which revision a writer has read.

``If-Match`` refuses a writer that read an older revision. ``If-None-Match: *`` refuses the second
of two writers that both found no blob.

Source: "Specifying conditional headers for Blob service operations" in the service's REST
reference.
"""

from __future__ import annotations

from typing import Any, Final

from azure.core import MatchConditions
from azure.core.exceptions import (
    AzureError,
    HttpResponseError,
    ResourceExistsError,
    ResourceModifiedError,
    ResourceNotFoundError,
)
from azure.storage.blob import ContentSettings

from aztask.address.addresses import BlobAddress
from aztask.azure.container import container_client, create, reason_of
from aztask.errors import BrokerUnavailable

READ_SECONDS: Final = 10.0
NO_SUCH_RANGE: Final = 416


class TaggedBlob:
    """One blob of a container, or of a folder in it. Any thread may call, one at a time."""

    def __init__(self, address: BlobAddress, name: str, *, what: str, content_type: str) -> None:
        """what: the name for error texts. Nothing connects before the first call.

        Raises ConfigurationError without a credential.
        """
        self._name = address.name_of(name)
        self._what = what
        self._content = ContentSettings(content_type=content_type, cache_control="no-cache")
        self._container = container_client(address, read_timeout=READ_SECONDS)
        self._blob = self._container.get_blob_client(self._name)

    def read(self, limit: int) -> tuple[bytes, str | None]:
        """At most `limit` bytes and the ETag; ``b""`` and None if there is no blob.

        Needs the permission to read blobs. Raises BrokerUnavailable.
        """
        try:
            found = self._download(limit)
            return found.readall(), str(found.properties.etag)
        except ResourceNotFoundError:
            return b"", None
        except AzureError as error:
            raise self._unavailable(error) from error

    def write(self, data: bytes, tag: str | None) -> bool:
        """Store `data` if the blob still has the ETag `tag` (None: if there is no blob).

        Returns False if another writer was faster. Creates a missing container. Needs the
        permission to write blobs. Raises BrokerUnavailable. If the reply is lost, `data` may be
        stored; then the next attempt is refused.
        """
        try:
            try:
                return self._put(data, tag)
            except ResourceNotFoundError:
                if tag is not None:  # the blob was deleted in between
                    return False
                create(self._container)
                return self._put(data, None)
        except AzureError as error:
            raise self._unavailable(error) from error

    def move(self, data: bytes, tag: str, suffix: str) -> str | None:
        """Move the blob to a name that ends in `suffix`; returns the new name.

        data, tag: as they were read. Returns None if the blob has changed since. The blob is
        copied, then deleted. Crash window: if the process dies in between, both exist, and moving
        it again does no harm. Raises BrokerUnavailable.
        """
        target = self._name + suffix
        try:
            self._container.upload_blob(
                target, data, overwrite=True, content_settings=self._content
            )
            self._blob.delete_blob(etag=tag, match_condition=MatchConditions.IfNotModified)
        except (ResourceModifiedError, ResourceNotFoundError):
            return None
        except AzureError as error:
            raise self._unavailable(error) from error
        return target

    def close(self) -> None:
        """Close the idle connections of the client."""
        self._container.close()

    def _download(self, limit: int) -> Any:
        try:
            return self._blob.download_blob(offset=0, length=limit)
        except HttpResponseError as error:
            if error.status_code != NO_SUCH_RANGE:
                raise
            return self._blob.download_blob()  # an empty blob has no first byte to request

    def _put(self, data: bytes, tag: str | None) -> bool:
        conditions: dict[str, Any] = {"overwrite": False}
        if tag is not None:
            conditions = {
                "overwrite": True,
                "etag": tag,
                "match_condition": MatchConditions.IfNotModified,
            }
        try:
            self._blob.upload_blob(data, content_settings=self._content, **conditions)
        except (ResourceExistsError, ResourceModifiedError):
            return False
        return True

    def _unavailable(self, error: AzureError) -> BrokerUnavailable:
        return BrokerUnavailable(f"{self._what}: {reason_of(error)}")
