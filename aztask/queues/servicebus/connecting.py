"""How to connect to a namespace: the transport, the endpoint, and the trusted certificates.

Rules
1. An argument wins over the environment, which wins over the default: AMQP over TLS to port 5671 of
   the namespace.
2. Certificates are trusted as in the process's HTTP clients: ``REQUESTS_CA_BUNDLE`` or
   ``SSL_CERT_FILE`` name the file of authorities, if one is set.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from azure.servicebus import TransportType

from aztask.address.addresses import ServiceBusAddress
from aztask.address.connection_strings import host_and_port
from aztask.errors import ConfigurationError, did_you_mean
from aztask.support.late import install_command
from aztask.support.masking import printable

TRANSPORT_VARIABLE: Final = "AZTASK_SERVICEBUS_TRANSPORT"
ENDPOINT_VARIABLE: Final = "AZTASK_SERVICEBUS_ENDPOINT"
TRANSPORTS: Final = ("amqp", "websockets")


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """How to connect.

    websockets: use AMQP over WebSockets, port 443.
    endpoint: ``host:port`` to connect to instead of the namespace's own host.
    certificates: a file of certificate authorities; None for the system's.
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
        """The options by rule 1, for this address and environment.

        Raises ConfigurationError if they do not fit the address, or a package is missing.
        """
        if websockets is None:
            websockets = _transport(environ) == "websockets"
        endpoint = endpoint or environ.get(ENDPOINT_VARIABLE) or None
        if endpoint is not None:
            host_and_port(endpoint, ENDPOINT_VARIABLE)
        if address.emulator and (websockets or endpoint):
            raise ConfigurationError(
                "the emulator is reached over plain AMQP, at the host and port of its connection "
                f"string; unset {TRANSPORT_VARIABLE} and {ENDPOINT_VARIABLE}"
            )
        if websockets and importlib.util.find_spec("websocket") is None:
            raise ConfigurationError(
                "AMQP over WebSockets needs websocket-client; install it "
                f"with: {install_command('websockets')}"
            )
        bundle = environ.get("REQUESTS_CA_BUNDLE") or environ.get("SSL_CERT_FILE")
        return cls(websockets, endpoint, bundle or None)

    def options(self) -> dict[str, Any]:
        """The keyword arguments for the SDK's client."""
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
            f"{TRANSPORT_VARIABLE} is {printable(given, 40)}; it accepts "
            f"{' or '.join(TRANSPORTS)}.{did_you_mean(given, TRANSPORTS)}"
        )
    return given
