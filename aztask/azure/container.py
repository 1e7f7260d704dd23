"""Clients of blob containers, with the settings that aztask needs, and blobs that many processes
change (`TaggedBlob`).

Rule: the SDK's retries are off. The caller decides about retries, and every request has a time-out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from azure.core import MatchConditions
from azure.core.credentials import AzureSasCredential, TokenCredential
from azure.core.exceptions import (
    AzureError,
    HttpResponseError,
    ResourceExistsError,
    ResourceModifiedError,
    ResourceNotFoundError,
)
from azure.storage.blob import ContainerClient, ContentSettings

from aztask.address.addresses import BlobAddress
from aztask.azure.access import default_credential, filter_secrets
from aztask.errors import BrokerUnavailable
from aztask.support.display import mask
from aztask.version import __version__

CONNECT_SECONDS: Final = 5.0
READ_SECONDS: Final = 30.0
SINGLE_PUT_BYTES: Final = 256 << 20
"""A file up to this size is one request; event files are closed at 64 MiB."""


def container_client(
    address: BlobAddress, *, given: TokenCredential | None = None, **options: Any
) -> ContainerClient:
    """The SDK's client of a container: no retries, time-outs set, and no secrets in its logs.

    given: replaces `default_credential` if the address has no key and no signature.
    options: override the client's settings.
    """
    filter_secrets()
    return ContainerClient(
        address.endpoint,
        address.container,
        credential=credential_of(address, given),
        **settings_with(options),
    )


def credential_of(address: BlobAddress, given: TokenCredential | None = None) -> Any:
    """The account's key or signature; otherwise `given`, or `default_credential`."""
    if address.key is not None:
        return {"account_name": address.account, "account_key": address.key.reveal()}
    if address.signature is not None:
        return AzureSasCredential(address.signature.reveal().lstrip("?"))
    return given or default_credential()


def settings_with(options: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of every client, overridden by `options`."""
    return {
        "retry_total": 0,
        "connection_timeout": CONNECT_SECONDS,
        "read_timeout": READ_SECONDS,
        "max_single_put_size": SINGLE_PUT_BYTES,
        "user_agent": f"aztask/{__version__}",
        **options,
    }


def create(container: ContainerClient) -> None:
    """Create the container, unless another worker just did. Raises AzureError."""
    try:
        container.create_container()
    except ResourceExistsError:
        return


def reason_of(error: AzureError) -> str:
    """The error's code and first line, masked. The rest of its text is headers and XML."""
    code = getattr(error, "error_code", None)
    lines = (str(error.message) or type(error).__name__).splitlines()
    return mask(f"{getattr(code, 'value', code) or type(error).__name__}: {lines[0]}")[:300]


# -- A blob that many processes change -------------------------------------------------------------
#
# Its ETag proves which revision a writer has read.
#
# ``If-Match`` refuses a writer that read an older revision. ``If-None-Match: *`` refuses the second
# of two writers that both found no blob.
#
# Source: "Specifying conditional headers for Blob service operations" in the service's REST
# reference.


TAGGED_READ_SECONDS: Final = 10.0
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
        self._container = container_client(address, read_timeout=TAGGED_READ_SECONDS)
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
