"""The Service Bus SDK's client, set up as the broker needs it.

Rules
1. The SDK's retries are off: its pauses are longer than a lease, and a silent retry of a send
   stores the message twice. The caller, which knows the lease, sets time-outs and retries.
2. Every sender and receiver has its own TCP connection. Connections are closed in the background,
   because the SDK waits up to a second for its keep-alive thread ([seen] azure-servicebus 7.15).
"""

from __future__ import annotations

import importlib.util
import logging
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final, Self

from azure.core.credentials import (
    AzureNamedKeyCredential,
    AzureSasCredential,
    TokenCredential,
)
from azure.servicebus import (
    NEXT_AVAILABLE_SESSION,
    ServiceBusClient,
    ServiceBusReceiveMode,
    ServiceBusReceiver,
    ServiceBusSender,
    ServiceBusSubQueue,
    TransportType,
)

from aztask.address.addresses import ServiceBusAddress
from aztask.address.connection_strings import host_and_port
from aztask.azure.access import default_credential, filter_secrets, quiet_sdk
from aztask.errors import ConfigurationError, did_you_mean
from aztask.queues.base import AnySession
from aztask.queues.servicebus import private
from aztask.queues.servicebus.errors import SDK_ERRORS
from aztask.queues.servicebus.reading import decode_answers
from aztask.queues.servicebus.symptoms import tell_apart
from aztask.support.display import printable
from aztask.support.late import install_command
from aztask.support.threadpool import ThreadPool

# -- How to connect to a namespace: the transport, the endpoint, and the trusted certificates.
#
# Rules
# 1. An argument wins over the environment, which wins over the default: AMQP over TLS to port 5671
#    of the namespace.
# 2. Certificates are trusted as in the process's HTTP clients: ``REQUESTS_CA_BUNDLE`` or
#    ``SSL_CERT_FILE`` name the file of authorities, if one is set.

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


logger = logging.getLogger(__name__)

REQUEST_SECONDS: Final = 10.0
"""How long one request may take if no lease requires less."""

SEND_SECONDS: Final = 30.0
CLOSE_SECONDS: Final = 3.0


class BusClient:
    """Makes senders and receivers of one namespace. Any thread may call."""

    def __init__(
        self,
        address: ServiceBusAddress,
        *,
        credential: TokenCredential | None = None,
        websockets: bool | None = None,
        endpoint: str | None = None,
    ) -> None:
        """credential: replaces azure-identity's default if the address has no key.

        websockets, endpoint: see the module `connecting`.
        """
        filter_secrets()
        quiet_sdk("azure.servicebus")
        private.keep_refusals()
        self.address = address
        self._credential = credential_of(address, credential)
        self._connection = ConnectionOptions.find(address, websockets, endpoint)
        self._closer = ThreadPool("closing", 64)
        self._closing: set[Future[None]] = set()

    def sender(self, queue: str) -> ServiceBusSender:
        """A sender, not connected yet. Raises ConfigurationError as `check_entity` does."""
        self.address.check_entity(queue)
        sender = self._client(SEND_SECONDS).get_queue_sender(queue)
        tell_apart(sender)
        return sender

    def receiver(
        self,
        queue: str,
        *,
        dead_letter: bool = False,
        delete: bool = False,
        session: str | AnySession | None = None,
        request_seconds: float = REQUEST_SECONDS,
        session_wait: float | None = None,
    ) -> ServiceBusReceiver:
        """A receiver, not connected yet. Only one thread may use it at a time.

        Raises ConfigurationError as `check_entity` does.
        """
        self.address.check_entity(queue)
        session_id: Any = NEXT_AVAILABLE_SESSION if isinstance(session, AnySession) else session
        receiver = self._client(request_seconds).get_queue_receiver(
            queue,
            session_id=session_id,
            sub_queue=ServiceBusSubQueue.DEAD_LETTER if dead_letter else None,
            receive_mode=(
                ServiceBusReceiveMode.RECEIVE_AND_DELETE
                if delete
                else ServiceBusReceiveMode.PEEK_LOCK
            ),
            max_wait_time=session_wait,
            prefetch_count=0,
        )
        tell_apart(receiver)
        return decode_answers(receiver)

    def _client(self, request_seconds: float) -> ServiceBusClient:
        """A new client. It opens no connection.

        A client keeps references to all its handlers, so each handler gets its own.
        """
        options: dict[str, Any] = {
            "retry_total": 0,
            "try_timeout": request_seconds,
            **self._connection.options(),
        }
        address = self.address
        if address.emulator:
            # Without EntityPath: the SDK compares it exactly, and answers with a ValueError.
            text = replace(address, entity=None).connection_string().reveal()
            return ServiceBusClient.from_connection_string(text, **options)
        return ServiceBusClient(address.host, self._credential, **options)

    def close(self, handler: ServiceBusReceiver | ServiceBusSender) -> None:
        """Close a sender or receiver in the background."""
        self._in_background(lambda: _close(handler))

    def drop(self, handler: ServiceBusReceiver | ServiceBusSender) -> None:
        """Give up a broken connection: it ends now and is cleaned up in the background."""
        private.end(handler)
        self._in_background(lambda: private.disconnect(handler))

    def _in_background(self, call: Callable[[], None]) -> None:
        try:
            future = self._closer.submit(call)
        except RuntimeError:  # `finish` was called, or no thread can be started: it is done here
            call()
        else:
            self._closing.add(future)
            future.add_done_callback(self._closing.discard)

    def finish(self) -> None:
        """Wait until everything is closed, for at most `CLOSE_SECONDS`."""
        give_up_at = time.monotonic() + CLOSE_SECONDS
        for future in list(self._closing):
            with suppress(TimeoutError):
                future.result(max(0.0, give_up_at - time.monotonic()))
        self._closer.close()


def _close(handler: ServiceBusReceiver | ServiceBusSender) -> None:
    try:
        private.close(handler)
    except SDK_ERRORS:
        pass  # the connection is gone already
    except Exception:  # no caller waits for this connection
        logger.warning("a connection was not closed properly", exc_info=True)


def credential_of(address: ServiceBusAddress, credential: TokenCredential | None) -> Any:
    if address.signature is not None:
        return AzureSasCredential(address.signature.reveal())
    if address.key is not None:
        return AzureNamedKeyCredential(address.key_name or "", address.key.reveal())
    return credential or default_credential()


Connect = Callable[[], ServiceBusReceiver]
