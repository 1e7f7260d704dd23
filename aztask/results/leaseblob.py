"""The lease document in a blob, for workers and senders of many machines.

The blob's ETag proves which revision a writer read: ``If-Match`` refuses a stale writer, and
``If-None-Match: *`` the second of two first ones.

Source: "Specifying conditional headers for Blob service operations" in the service's REST
reference.
"""

from __future__ import annotations

from dataclasses import replace
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

from aztask.adaptive.document import (
    ASIDE,
    NAME,
    SIZE_LIMIT,
    LeaseDocument,
    Stored,
    from_json,
    is_damaged,
    to_json,
)
from aztask.address.addresses import BlobAddress
from aztask.errors import BrokerUnavailable
from aztask.events.blobs import container_client, told

READ_SECONDS: Final = 10.0
NO_SUCH_RANGE: Final = 416
CONTENT: Final = ContentSettings(content_type="application/json", cache_control="no-cache")


class LeaseBlob:
    """The blob ``leases.json`` of a container or of a folder in it."""

    remote = True

    def __init__(self, address: BlobAddress) -> None:
        """Connects with the first call. Raises ConfigurationError without a credential."""
        self.address = address
        self._container = container_client(address, read_timeout=READ_SECONDS)
        self._blob = self._container.get_blob_client(address.name_of(NAME))

    def __repr__(self) -> str:
        return f"<LeaseBlob {self.address}>"

    def load(self) -> Stored:
        """See `LeaseStore.load`. Needs the right to read blobs."""
        data, tag = self._read()
        return Stored(LeaseDocument() if tag is None else from_json(data), tag)

    def _read(self) -> tuple[bytes, str | None]:
        """The bytes and the ETag; None where there is no blob. One byte more than a document may
        have: so one that is too long is known for it.
        """
        try:
            found = self._download()
            return found.readall(), str(found.properties.etag)
        except ResourceNotFoundError:
            return b"", None
        except AzureError as error:
            raise BrokerUnavailable(f"the lease document: {told(error)}") from error

    def _download(self) -> Any:
        try:
            return self._blob.download_blob(offset=0, length=SIZE_LIMIT + 1)
        except HttpResponseError as error:
            if error.status_code != NO_SUCH_RANGE:
                raise
            return self._blob.download_blob()  # it is empty: no byte of it can be asked for

    def publish(self, document: LeaseDocument, based_on: Stored) -> bool:
        """See `LeaseStore.publish`. Needs the right to write blobs; creates a missing container.

        If the reply is lost the document may be stored; then the next try is refused, and reads it.
        """
        data = to_json(replace(document, revision=based_on.document.revision + 1))
        try:
            try:
                return self._put(data, based_on.tag)
            except ResourceNotFoundError:
                if based_on.tag is not None:  # somebody deleted the blob
                    return False
                self._create()
                return self._put(data, None)
        except AzureError as error:
            raise BrokerUnavailable(f"the lease document: {told(error)}") from error

    def set_aside(self) -> str | None:
        """See `LeaseStore.set_aside`: it is copied, then deleted as it was read.

        If the process dies in between, the next worker does it again.
        """
        data, tag = self._read()
        if tag is None or not is_damaged(data):
            return None
        aside = self.address.name_of(NAME) + ASIDE
        try:
            self._container.upload_blob(aside, data, overwrite=True, content_settings=CONTENT)
            self._blob.delete_blob(etag=tag, match_condition=MatchConditions.IfNotModified)
        except (ResourceModifiedError, ResourceNotFoundError):
            return None  # another worker was faster
        except AzureError as error:
            raise BrokerUnavailable(f"the lease document: {told(error)}") from error
        return aside

    def close(self) -> None:
        """Close idle connections."""
        self._container.close()

    def _put(self, data: bytes, tag: str | None) -> bool:
        conditions: dict[str, Any] = {"overwrite": False}
        if tag is not None:
            conditions = {
                "overwrite": True,
                "etag": tag,
                "match_condition": MatchConditions.IfNotModified,
            }
        try:
            self._blob.upload_blob(data, content_settings=CONTENT, **conditions)
        except (ResourceExistsError, ResourceModifiedError):
            return False
        return True

    def _create(self) -> None:
        try:
            self._container.create_container()
        except ResourceExistsError:
            return  # by somebody else, at the same time
