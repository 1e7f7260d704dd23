"""A container that a trial makes or fills, and removes again what it made; what is left is found.

Rule: a refused credential is told apart from a service that does not answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

from azure.core import MatchConditions
from azure.core.credentials import TokenCredential
from azure.core.exceptions import (
    AzureError,
    HttpResponseError,
    ResourceExistsError,
    ResourceNotFoundError,
)
from azure.storage.blob import BlobServiceClient, StorageErrorCode

from aztask.address.addresses import BlobAddress
from aztask.azure.container import container_client, credential_of, reason_of, settings_with
from aztask.errors import BrokerUnavailable, ConfigurationError, QueueNotFound

ROLE: Final = "Storage Blob Data Contributor"
REFUSED: Final = (401, 403)
CONDITION_NOT_MET: Final = 412

Answer = TypeVar("Answer")


class TrialContainer:
    """A container, and blobs of a trial in it.

    Raises ConfigurationError if refused, QueueNotFound without the container or blob, else
    BrokerUnavailable.
    """

    def __init__(self, address: BlobAddress, *, given: TokenCredential | None = None) -> None:
        """Connects at the first call.

        * `given`: replaces the default credential if the address has no key and no signature.
        """
        self._container = container_client(address, given=given)

    def create(self) -> None:
        """Create the container, which must not exist."""
        _asked(self._container.create_container)

    def append(self, name: str, data: bytes, at: int) -> bool:
        """Append `data` to a blob if it has `at` bytes now; False if it has not.

        With `at` 0, a missing blob is created.
        """
        blob = self._container.get_blob_client(name)

        def make() -> None:
            try:
                blob.create_append_blob(match_condition=MatchConditions.IfMissing)
            except ResourceExistsError:
                return

        def append() -> bool:
            try:
                blob.append_block(data, appendpos_condition=at)
            except HttpResponseError as error:
                if error.status_code != CONDITION_NOT_MET:
                    raise
                return False
            return True

        if not at:
            _asked(make)
        return _asked(append)

    def read(self, name: str) -> bytes:
        """The whole of a blob."""
        return _asked(lambda: bytes(self._container.download_blob(name).readall()))

    def write(self, name: str, data: bytes, *, new: bool) -> bool:
        """Store a blob; false if it is to be new, and there is one of this name."""

        def put() -> bool:
            try:
                self._container.upload_blob(name, data, overwrite=not new)
            except ResourceExistsError:
                return False
            return True

        return _asked(put)

    def names(self, beginning: str) -> list[str]:
        """The blobs whose names begin like this."""
        return _asked(lambda: [str(each.name) for each in self._container.list_blobs(beginning)])

    def remove(self, name: str) -> None:
        """Delete a blob, unless it is gone."""

        def remove() -> None:
            try:
                self._container.delete_blob(name)
            except ResourceNotFoundError as error:
                if getattr(error, "error_code", None) != StorageErrorCode.BLOB_NOT_FOUND:
                    raise

        _asked(remove)

    def close(self) -> None:
        """Close the connections; the container stays."""
        self._container.close()

    def delete(self) -> None:
        """Delete the container with its blobs, unless it is gone, and close the connections."""

        def delete() -> None:
            try:
                self._container.delete_container()
            except ResourceNotFoundError:
                return

        try:
            _asked(delete)
        finally:
            self._container.close()


def containers_of(address: BlobAddress, beginning: str) -> list[str]:
    """The containers of the account whose names begin like this."""
    options = settings_with({})
    with BlobServiceClient(
        address.endpoint, credential=credential_of(address), **options
    ) as service:
        found = service.list_containers(name_starts_with=beginning)
        return _asked(lambda: [str(each.name) for each in found])


def _asked(ask: Callable[[], Answer]) -> Answer:
    try:
        return ask()
    except ResourceNotFoundError as error:
        raise QueueNotFound(reason_of(error)) from error
    except AzureError as error:
        if getattr(error, "status_code", None) in REFUSED:
            raise ConfigurationError(
                f"the service refused the credential ({reason_of(error)}): check the key or "
                f"signature and its expiry, or assign the role {ROLE}"
            ) from error
        raise BrokerUnavailable(reason_of(error)) from error
