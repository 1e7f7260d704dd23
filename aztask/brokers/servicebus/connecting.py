"""How a namespace is reached: the transport, another endpoint, and whose certificates count.

Rules
1. What the caller says wins, then the environment, then the service's usual way: AMQP over TLS to
   port 5671 of the namespace.
2. Certificates are judged as by every other HTTP client of the process: ``REQUESTS_CA_BUNDLE`` or
   ``SSL_CERT_FILE`` where they are set.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from azure.servicebus import TransportType

from aztask.address.addresses import ServiceBusAddress
from aztask.errors import ConfigurationError, did_you_mean
from aztask.support.masking import printable

TRANSPORT_VARIABLE: Final = "AZTASK_SERVICEBUS_TRANSPORT"
ENDPOINT_VARIABLE: Final = "AZTASK_SERVICEBUS_ENDPOINT"
TRANSPORTS: Final = ("amqp", "websockets")


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """websockets: AMQP over WebSockets, port 443. endpoint: ``host:port`` to connect to instead of
    the namespace's own host. certificates: a file of authorities, None for the usual ones.
    """

    websockets: bool = False
    endpoint: str | None = None
    certificates: str | None = None

    @classmethod
    def find(
        cls,
        address: ServiceBusAddress,
        websockets: bool | None,
        endpoint: str | None,
        environ: Mapping[str, str] = os.environ,
    ) -> Self:
        """Rule 1. Raises ConfigurationError."""
        if websockets is None:
            websockets = _transport(environ) == "websockets"
        endpoint = endpoint or environ.get(ENDPOINT_VARIABLE) or None
        if address.emulator and (websockets or endpoint):
            raise ConfigurationError(
                "the emulator is reached over plain AMQP, at the host and port of its connection "
                f"string; unset {TRANSPORT_VARIABLE} and {ENDPOINT_VARIABLE}"
            )
        if websockets and importlib.util.find_spec("websocket") is None:
            raise ConfigurationError(
                "AMQP over WebSockets needs websocket-client; install aztask[websockets]"
            )
        bundle = environ.get("REQUESTS_CA_BUNDLE") or environ.get("SSL_CERT_FILE")
        return cls(websockets, endpoint, bundle or None)

    def options(self) -> dict[str, Any]:
        """As the SDK's client takes it."""
        options: dict[str, Any] = {
            "transport_type": (
                TransportType.AmqpOverWebsocket if self.websockets else TransportType.Amqp
            )
        }
        if self.endpoint is not None:
            options["custom_endpoint_address"] = f"sb://{self.endpoint}"
        if self.certificates is not None:
            options["connection_verify"] = self.certificates
        return options


def _transport(environ: Mapping[str, str]) -> str:
    given = environ.get(TRANSPORT_VARIABLE) or TRANSPORTS[0]
    if given not in TRANSPORTS:
        raise ConfigurationError(
            f"{TRANSPORT_VARIABLE} is {printable(given, 40)}; it takes "
            f"{' or '.join(TRANSPORTS)}.{did_you_mean(given, TRANSPORTS)}"
        )
    return given
