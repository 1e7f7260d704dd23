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
from collections.abc import Callable, Iterator, Sequence
from io import BytesIO
from typing import Any, Final, TypeVar

from azure.core.exceptions import (
    AzureError,
    HttpResponseError,
    ResourceNotFoundError,
    ServiceRequestError,
    ServiceResponseError,
)
from azure.core.pipeline.transport import RequestsTransport
from azure.storage.blob import ContainerClient

from aztask.address.addresses import BlobAddress
from aztask.azure.container import container_client, create, reason_of
from aztask.errors import BrokerUnavailable, PayloadMissing
from aztask.message.payload import PAYLOAD_BYTES, StoredValue
from aztask.stores.payloads.store import ListedPayload, listed
from aztask.support import clock

logger = logging.getLogger(__name__)

# -- an HTTP transport for the SDK that sends long bodies in pieces ------------------------
#
# Why: the connection's time-out counts for the whole of a body that is given as bytes, because it
# is one ``socket.sendall`` (Python's documentation, since 3.5). So 100 MB would have to be sent
# within the five seconds that a connection may take. A body that is read from a stream is sent in
# blocks of 32 KiB, and each block has that time. The stream shares the memory of the bytes.


WHOLE_BYTES: Final = 256 * 1024
"""A body up to this size is sent as a whole: that costs less CPU time."""


class PiecewiseTransport(RequestsTransport):  # type: ignore[misc]  # the SDK gives it no type
    """The SDK's own transport, but for bodies of more than `WHOLE_BYTES`."""

    def open(self) -> None:
        """Open the session, whose requests then send long bodies as streams."""
        super().open()
        session: Any = self.session
        if isinstance(session.request, PiecewiseRequest):
            return
        session.request = PiecewiseRequest(session.request)


class PiecewiseRequest:
    """``Session.request`` with long bytes as a stream."""

    def __init__(self, request: Any) -> None:
        self._request = request

    def __call__(self, method: str, url: str, **options: Any) -> Any:
        """Send the request; the parameters are those of ``requests.Session.request``."""
        data = options.get("data")
        if isinstance(data, bytes) and len(data) > WHOLE_BYTES:
            options["data"] = BytesIO(data)
        return self._request(method, url, **options)


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

    def copy(self, listed: ListedPayload) -> bytes | None:
        """The blob's bytes, in one request; None if it is gone."""

        def get() -> bytes:
            return bytes(self._container.download_blob(self._full(listed.name)).readall())

        try:
            return self._patiently(get)
        except ResourceNotFoundError:
            return None

    def remove(self, names: Sequence[str]) -> None:
        """Remove the blobs, up to 256 in one request."""
        for start in range(0, len(names), BATCH):
            some = [self._full(name) for name in names[start : start + BATCH]]
            try:
                self._patiently(lambda some=some: self._delete(some))  # type: ignore[misc]
            except ResourceNotFoundError:
                continue

    def list(self) -> Iterator[ListedPayload]:
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
            clock.sleep(PAUSE_SECONDS * 4 ** (TRIES - 1 - tries_left))
        raise AssertionError  # the last try returns or raises

    def _unavailable(self, error: AzureError) -> BrokerUnavailable:
        return BrokerUnavailable(
            f"the payloads' container, {self.address}, cannot be used: {reason_of(error)}"
        )


def _may_pass(error: AzureError) -> bool:
    if isinstance(error, ServiceRequestError | ServiceResponseError):
        return True
    return isinstance(error, HttpResponseError) and error.status_code in _PASSING
