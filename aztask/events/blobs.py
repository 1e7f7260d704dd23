"""Closed event files as blobs: what a worker leaves behind on Azure, beside its results.

It is here, and not with the worker, because the Azure SDKs stay inside the adapters; and among the
results, because it is what a worker records, not how it receives.

Rules
1. A blob is written once: ``If-None-Match: *``. Uploading a file again, after a crash between
   upload and removal or by two workers of one directory, finds the blob there and is harmless.
2. A blob appears whole or not at all: one Put Blob, or blocks that are committed together.
3. The SDK retries nothing: whoever calls owns the pauses. Every request has a time-out.

Source: the Put Blob and Put Block List pages of the Blob service's REST reference.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from azure.core.credentials import AzureSasCredential, TokenCredential
from azure.core.exceptions import AzureError, ResourceExistsError, ResourceNotFoundError
from azure.storage.blob import ContainerClient, ContentSettings

from aztask.address.addresses import BlobAddress
from aztask.azure.access import default_credential, filter_secrets
from aztask.errors import BrokerUnavailable
from aztask.support.masking import mask
from aztask.version import __version__

CONNECT_SECONDS: Final = 5.0
READ_SECONDS: Final = 30.0
SINGLE_PUT_BYTES: Final = 256 << 20
"""A file up to this size is one request; ours are closed at 64 MiB."""
CONTENT: Final = ContentSettings(content_type="application/x-ndjson")


def container_client(
    address: BlobAddress, *, given: TokenCredential | None = None, **options: Any
) -> ContainerClient:
    """The SDK's client of a container: no retries of its own, time-outs, no secrets in its logs.

    given: instead of `default_credential` where the address has no key.
    """
    filter_secrets()
    credential: Any = None
    if address.key is not None:
        credential = {"account_name": address.account, "account_key": address.key.reveal()}
    elif address.signature is not None:
        credential = AzureSasCredential(address.signature.reveal().lstrip("?"))
    else:
        credential = given or default_credential()
    settings: Mapping[str, Any] = {
        "retry_total": 0,
        "connection_timeout": CONNECT_SECONDS,
        "read_timeout": READ_SECONDS,
        "max_single_put_size": SINGLE_PUT_BYTES,
        "user_agent": f"aztask/{__version__}",
        **options,
    }
    return ContainerClient(address.endpoint, address.container, credential=credential, **settings)


class EventBlobs:
    """One container's event files. Any thread may call, one at a time."""

    def __init__(self, address: BlobAddress) -> None:
        """Connects with the first upload. Raises ConfigurationError without a credential."""
        self.address = address
        self._container = container_client(address)

    def upload(self, name: str, path: Path) -> bool:
        """Store the file at `path` as the blob `name`; False: another blob has that name.

        Creates the container where it is missing. Raises BrokerUnavailable where the service does
        not answer or refuses, OSError where the file cannot be read.
        """
        try:
            try:
                return self._put(name, path)
            except ResourceNotFoundError:
                self._create()
                return self._put(name, path)
        except AzureError as error:
            raise BrokerUnavailable(told(error)) from error

    def close(self) -> None:
        """Close idle connections."""
        self._container.close()

    def _put(self, name: str, path: Path) -> bool:
        blob = self._container.get_blob_client(self.address.name_of(name))
        with path.open("rb") as stream:
            try:
                blob.upload_blob(stream, overwrite=False, content_settings=CONTENT)
            except ResourceExistsError:
                return blob.get_blob_properties().size == path.stat().st_size
        return True

    def _create(self) -> None:
        try:
            self._container.create_container()
        except ResourceExistsError:
            return  # by another worker, at the same time


def told(error: AzureError) -> str:
    """The error's code and first line: the rest is headers and XML."""
    code = getattr(error, "error_code", None)
    lines = (str(error.message) or type(error).__name__).splitlines()
    return mask(f"{getattr(code, 'value', code) or type(error).__name__}: {lines[0]}")[:300]
