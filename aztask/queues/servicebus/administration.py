"""Administration clients for a local Service Bus, which speaks plain HTTP.

The SDK uses https in every URL, also in emulator mode ([seen] azure-servicebus 7.15,
management/_management_client.py). The transport in this module changes it back to http.
"""

from __future__ import annotations

from typing import Any

from azure.core.pipeline.transport import HttpTransport, RequestsTransport
from azure.servicebus.management import ServiceBusAdministrationClient


class PlainTransport(HttpTransport[Any, Any]):
    """Sends requests with an https URL over http instead."""

    def __init__(self) -> None:
        self._inner: Any = RequestsTransport()

    def send(self, request: Any, **kwargs: Any) -> Any:
        """Send one request over http; returns the response."""
        request.url = request.url.replace("https://", "http://", 1)
        return self._inner.send(request, **kwargs)

    def open(self) -> None:
        self._inner.open()

    def close(self) -> None:
        self._inner.close()

    def __enter__(self) -> HttpTransport[Any, Any]:
        self.open()
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


def administration_client(
    connection_string: str, *, certificate: str | None = None
) -> ServiceBusAdministrationClient:
    """An administration client for the emulator.

    connection_string: for the emulator's administration port, as ``aztask emulator --json`` prints
    it and `aztask.testing.RunningEmulator.admin_connection_string` holds it.
    certificate: the certificate file to trust if the emulator serves TLS; None uses plain HTTP.
    """
    options: dict[str, Any] = (
        {"connection_verify": certificate} if certificate else {"transport": PlainTransport()}
    )
    return ServiceBusAdministrationClient.from_connection_string(connection_string, **options)
