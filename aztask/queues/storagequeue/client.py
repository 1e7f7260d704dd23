"""The storage SDK's client, set up as the broker needs it.

Rules
1. The SDK's retries are off: a silent retry of a send stores the message twice, and its pauses of
   15 s and more are longer than a lease [measured]. The caller, which knows the lease, sets each
   request's time-outs.
2. If the environment sets an HTTP proxy, the SDK's own transport is used, otherwise the lean one.
"""

from __future__ import annotations

from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from azure.core.credentials import AzureSasCredential, TokenCredential
from azure.core.pipeline.transport import HttpTransport, RequestsTransport
from azure.storage.queue import QueueClient, QueueServiceClient

from aztask.address.addresses import StorageQueueAddress
from aztask.azure.access import default_credential, filter_secrets
from aztask.azure.transport import LeanTransport
from aztask.queues.storagequeue.messages import MessagePipeline, QueueMessages
from aztask.support.clock import SYSTEM_CLOCK, Clock
from aztask.version import __version__


class StorageClient:
    """The account's queues. Any thread may call; every process makes its own client."""

    def __init__(
        self,
        address: StorageQueueAddress,
        *,
        credential: TokenCredential | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """credential: replaces `default_credential` if the address has no key and no signature."""
        filter_secrets()
        self.address = address
        self.transport = _transport(address)
        self._service = QueueServiceClient(
            address.endpoint,
            credential=_credential_of(address, credential),
            transport=self.transport,
            retry_total=0,
            user_agent=f"aztask/{__version__}",
            message_encode_policy=None,
            message_decode_policy=None,
        )
        self._queues: dict[str, QueueClient] = {}
        self._pipeline = MessagePipeline(self._service, self.transport)
        self._clock = clock
        self._offset = 0.0

    @property
    def service(self) -> QueueServiceClient:
        """The SDK's client for requests that concern the account."""
        return self._service

    def queue(self, name: str) -> QueueClient:
        """The SDK's client for requests that concern one queue."""
        client = self._queues.get(name)
        if client is None:
            client = self._queues.setdefault(name, self._service.get_queue_client(name))
        return client

    def messages(self, name: str) -> QueueMessages:
        """Our own requests for the messages of one queue."""
        return QueueMessages(self._pipeline, self.queue(name).url)

    def learn_time(self, headers: Mapping[str, str]) -> None:
        """Learn the service's time from the ``Date`` header of an answer, if it has one."""
        date = headers.get("Date")
        if date:
            self._offset = parsedate_to_datetime(date).timestamp() - self._clock.wall()

    @property
    def offset(self) -> float:
        """Seconds that the service's clock is ahead of ours, to about a second."""
        return self._offset

    def close(self) -> None:
        """Close the idle connections; those in use are closed when they come back."""
        self.transport.close()


def _credential_of(address: StorageQueueAddress, given: TokenCredential | None) -> Any:
    if address.key is not None:
        return {"account_name": address.account, "account_key": address.key.reveal()}
    if address.signature is not None:
        return AzureSasCredential(address.signature.reveal().lstrip("?"))
    return given or default_credential()


def _transport(address: StorageQueueAddress) -> HttpTransport[Any, Any]:
    parts = urlsplit(address.endpoint)
    if parts.scheme in getproxies() and not proxy_bypass(parts.hostname or ""):
        transport: HttpTransport[Any, Any] = RequestsTransport()
        return transport
    return LeanTransport()
