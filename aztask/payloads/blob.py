"""Payloads as blobs of a container: the store for several machines.

Rules
1. One request writes a payload and one reads it, whatever its size: no blocks, no ranges of it.
2. Up to 256 removals share one request. Azure does not bill for deleting blobs.
3. A request that fails for a reason that may pass is repeated `TRIES` times. Repeating is safe,
   because names are unique and what they name never changes.

Source: the Put Blob, Get Blob and Blob Batch pages of the Blob service's REST reference.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeVar

from azure.core.exceptions import (
    AzureError,
    HttpResponseError,
    ResourceNotFoundError,
    ServiceRequestError,
    ServiceResponseError,
)
from azure.storage.blob import ContainerClient

from aztask.address.addresses import BlobAddress
from aztask.azure.container import container_client, create, reason_of
from aztask.azure.pieces import PiecewiseTransport
from aztask.errors import BrokerUnavailable, PayloadMissing
from aztask.message.payload import PAYLOAD_BYTES, StoredValue
from aztask.payloads.store import Listed, listed

logger = logging.getLogger(__name__)

READ_SECONDS: Final = 30.0
TRIES: Final = 3
PAUSE_SECONDS: Final = 0.5
BATCH: Final = 256
"""The most blobs that one request removes: the service's limit."""

_REMOVED: Final = frozenset({200, 202, 404})
_PASSING: Final = frozenset({408, 429, 500, 502, 503, 504})

Answer = TypeVar("Answer")


class BlobPayloads:
    """The blobs of one container, or of a folder in it; see `PayloadStore`."""

    remote = True

    def __init__(self, address: BlobAddress) -> None:
        """Connects at the first call. Raises ConfigurationError without a credential."""
        self.address = address
        self._container: ContainerClient = container_client(
            address,
            read_timeout=READ_SECONDS,
            transport=PiecewiseTransport(),
            max_single_put_size=PAYLOAD_BYTES,
            max_single_get_size=PAYLOAD_BYTES + 1,
        )

    def __repr__(self) -> str:
        return f"<BlobPayloads {self.address}>"

    def __str__(self) -> str:
        return str(self.address)

    def write(self, name: str, data: bytes) -> None:
        """Store `data` in one request; a missing container is created."""

        def put() -> None:
            try:
                self._container.upload_blob(self._full(name), data, overwrite=True)
            except ResourceNotFoundError:
                create(self._container)
                self._container.upload_blob(self._full(name), data, overwrite=True)

        self._patiently(put)

    def read(self, stored: StoredValue) -> bytes:
        """The blob's bytes, in one request. Raises PayloadMissing, PayloadDamaged."""

        def get() -> bytes:
            found = self._container.download_blob(
                self._full(stored.name), offset=0, length=stored.size + 1
            )
            return bytes(found.readall())

        try:
            data = self._patiently(get)
        except ResourceNotFoundError:
            raise PayloadMissing(
                f"the payload {stored.name} is not in {self.address}: it was removed, or a"
                " lifecycle rule removed it"
            ) from None
        stored.verify(data)
        return data

    def remove(self, names: Sequence[str]) -> None:
        """Remove the blobs, up to 256 in one request."""
        for start in range(0, len(names), BATCH):
            some = [self._full(name) for name in names[start : start + BATCH]]
            try:
                self._patiently(lambda some=some: self._delete(some))  # type: ignore[misc]
            except ResourceNotFoundError:
                continue

    def list(self) -> Iterator[Listed]:
        """All payloads of the container, one request for each 5,000."""
        start = self._full("")
        try:
            for blob in self._container.list_blobs(name_starts_with=start or None):
                if (found := listed(blob.name.removeprefix(start), blob.size)) is not None:
                    yield found
        except ResourceNotFoundError:
            return  # no container, no payloads
        except AzureError as error:
            raise self._unavailable(error) from error

    def close(self) -> None:
        """Close idle connections to the blob service."""
        self._container.close()

    def _delete(self, names: Sequence[str]) -> None:
        if len(names) == 1:
            self._container.delete_blob(names[0])
            return
        answers = self._container.delete_blobs(*names, raise_on_any_failure=False)
        failed = {each.status_code for each in answers} - _REMOVED
        if failed:
            logger.warning(
                "some of %d payloads could not be removed (HTTP %s); aztask doctor --collect"
                " removes them later",
                len(names),
                ", ".join(map(str, sorted(failed))),
            )

    def _full(self, name: str) -> str:
        return self.address.name_of(name)

    def _patiently(self, call: Callable[[], Answer]) -> Answer:
        """The answer of `call`, repeated after failures that may pass.

        Raises ResourceNotFoundError, BrokerUnavailable.
        """
        for tries_left in reversed(range(TRIES)):
            try:
                return call()
            except ResourceNotFoundError:
                raise
            except AzureError as error:
                if not tries_left or not _may_pass(error):
                    raise self._unavailable(error) from error
            time.sleep(PAUSE_SECONDS * 4 ** (TRIES - 1 - tries_left))
        raise AssertionError  # the last try returns or raises

    def _unavailable(self, error: AzureError) -> BrokerUnavailable:
        return BrokerUnavailable(
            f"the payloads' container, {self.address}, cannot be used: {reason_of(error)}"
        )


def _may_pass(error: AzureError) -> bool:
    if isinstance(error, ServiceRequestError | ServiceResponseError):
        return True
    return isinstance(error, HttpResponseError) and error.status_code in _PASSING
