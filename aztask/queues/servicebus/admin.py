"""Creates, deletes, lists and counts queues: the operations that need the permission to manage.

Rules
1. All other parts of the adapter need only Send and Listen. Without the permission to manage, the
   error says so, and callers that can continue without the answer do.
2. A queue that aztask creates gets a delivery limit far above aztask's own, which gives a clearer
   reason. Its expired messages become dead letters.
3. The emulator's administration has its own port: `ADMIN_VARIABLE` names it, or the usual one is
   used. Of several emulators, the variable ends with the port of each, as in
   ``AZTASK_SERVICEBUS_ADMIN_5673``.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final

from azure.core.credentials import TokenCredential
from azure.core.exceptions import AzureError, ResourceExistsError
from azure.core.pipeline.transport import HttpTransport, RequestsTransport
from azure.servicebus.management import QueueProperties, ServiceBusAdministrationClient

from aztask.address.addresses import ServiceBusAddress
from aztask.address.connection_strings import service_bus_endpoint, split
from aztask.errors import AztaskError, BrokerUnavailable, ConfigurationError
from aztask.queues.base import QueueOptions, QueueStats
from aztask.queues.servicebus.client import credential_of
from aztask.queues.servicebus.errors import SDK_ERRORS, error_of
from aztask.support.clock import monotonic

# -- Clients ---------------------------------------------------------------------------------------
#
# Administration clients for a local Service Bus, which speaks plain HTTP.
#
# The SDK uses https in every URL, also in emulator mode ([seen] azure-servicebus 7.15,
# management/_management_client.py). The transport in this module changes it back to http.


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


# -- Queues ----------------------------------------------------------------------------------------


ADMIN_VARIABLE: Final = "AZTASK_SERVICEBUS_ADMIN"
ADMIN_PORT: Final = 5300
DELIVERY_LIMIT: Final = 1000
SHORTEST_WINDOW: Final = 20.0
LONGEST_WINDOW: Final = 7 * 86400.0
RECENT_SECONDS: Final = 10.0


class Administration:
    """Manages the queues of one namespace. Any thread may call."""

    def __init__(
        self,
        address: ServiceBusAddress,
        *,
        credential: TokenCredential | None = None,
        admin: str | None = None,
    ) -> None:
        """admin: the connection string of an emulator's administration port."""
        self._address = address
        self._credential = credential
        self._admin = admin
        self._client: ServiceBusAdministrationClient | None = None
        self._lock = threading.Lock()
        self._recent: dict[str, tuple[float, QueueProperties | AztaskError | None]] = {}
        self._silent: tuple[float, BrokerUnavailable] | None = None

    def declare(self, queue: str, options: QueueOptions) -> None:
        """Create the queue, or apply the explicit options to the existing one.

        Raises ConfigurationError if the service cannot change a setting after creation.
        """
        self._recent.pop(queue, None)
        try:
            self._open().create_queue(
                queue,
                **{
                    "max_delivery_count": DELIVERY_LIMIT,
                    "dead_lettering_on_message_expiration": True,
                    **_settings(options),
                    "requires_session": bool(options.sessions),
                    "requires_duplicate_detection": bool(options.duplicate_window),
                },
            )
        except ResourceExistsError:
            self._update(queue, options.explicit())
        except AzureError as error:
            raise self.error(error, queue) from None

    def _update(self, queue: str, options: QueueOptions) -> None:
        known = self.properties(queue)
        for name, value in (
            ("requires_session", options.sessions),
            ("requires_duplicate_detection", options.duplicate_window),
        ):
            actual = bool(getattr(known, name))
            if value is not None and bool(value) != actual:
                raise ConfigurationError(
                    f"queue {queue!r} exists with {name}={actual}, which the service cannot "
                    "change; delete the queue and create it again, or choose another name"
                )
        changes = {k: v for k, v in _settings(options).items() if getattr(known, k) != v}
        if changes:
            for name, value in changes.items():
                setattr(known, name, value)
            self._do("update_queue", queue, known)

    def delete(self, queue: str) -> None:
        """Delete the queue and everything in it. Raises QueueNotFound."""
        self._recent.pop(queue, None)
        self._do("delete_queue", queue, queue)

    def queues(self) -> list[str]:
        """The sorted names of all queues of the namespace."""
        try:
            return sorted(each.name for each in self._open().list_queues())
        except AzureError as error:
            raise self.error(error, None) from None

    def stats(self, queue: str) -> QueueStats:
        """The queue's counts. The service counts leased messages as active."""
        found = self._do("get_queue_runtime_properties", queue, queue)
        return QueueStats(
            queue,
            active=found.active_message_count,
            leased=None,
            scheduled=found.scheduled_message_count,
            deferred=None,
            dead=found.dead_letter_message_count,
        )

    def properties(self, queue: str) -> QueueProperties:
        """The queue's settings. Raises QueueNotFound, ConfigurationError (no permission)."""
        properties: QueueProperties = self._do("get_queue", queue, queue)
        return properties

    def tier(self) -> str:
        """Basic, Standard or Premium.

        Raises ConfigurationError (no permission), BrokerUnavailable.
        """
        try:
            return str(self._open().get_namespace_properties().messaging_sku)
        except AzureError as error:
            raise self.error(error, None) from None

    def recent(self, queue: str) -> QueueProperties:
        """As `properties`, but remembers the answer for `RECENT_SECONDS`.

        A starting worker asks twice, and an unreachable administration takes long to fail.
        """
        now = monotonic()
        at, known = self._recent.get(queue, (0.0, None))
        if known is None or now - at > RECENT_SECONDS:
            at, known = now, self._read(queue, now)
            self._recent[queue] = (at, known)
        if isinstance(known, AztaskError):
            raise known
        return known

    def _read(self, queue: str, now: float) -> QueueProperties | AztaskError:
        if self._silent is not None and now - self._silent[0] < RECENT_SECONDS:
            return self._silent[1]
        try:
            return self.properties(queue)
        except BrokerUnavailable as error:
            self._silent = (monotonic(), error)
            return error
        except AztaskError as error:
            return error

    def lock_seconds(self, queue: str, *, anew: bool = False) -> float | None:
        """The queue's lock duration in seconds; None if it cannot be read.

        anew: do not use a remembered answer.
        """
        if anew:
            self._recent.pop(queue, None)
        with suppress(AztaskError):
            found = self.recent(queue).lock_duration
            if isinstance(found, timedelta):
                return found.total_seconds()
        return None

    def client(self) -> ServiceBusAdministrationClient:
        """The SDK's client, for entities other than queues. Raises ConfigurationError."""
        return self._open()

    def close(self) -> None:
        """Close the connections of the management client."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def _do(self, call: str, queue: str, *arguments: Any) -> Any:
        try:
            return getattr(self._open(), call)(*arguments)
        except SDK_ERRORS as error:
            raise self.error(error, queue) from None

    def error(self, error: Exception, name: str | None) -> AztaskError:
        """`error_of` a request to the administration: it may listen elsewhere than we think."""
        found = error_of(error, name)
        if isinstance(found, BrokerUnavailable):
            found.args = (f"{found}{self.hint()}",)
        return found

    def hint(self) -> str:
        """How to name an emulator's administration, to append; "" for a namespace in Azure."""
        if not self._address.emulator:
            return ""
        if self._admin or self._named():
            return f"; the emulator's administration is where {ADMIN_VARIABLE} says"
        return (
            f"; if the emulator's administration has another port than {ADMIN_PORT}, set "
            f"{ADMIN_VARIABLE} as aztask emulator prints it"
        )

    def _named(self) -> str | None:
        """What the environment says of this emulator."""
        own = os.environ.get(f"{ADMIN_VARIABLE}_{self._address.port}")
        return own or os.environ.get(ADMIN_VARIABLE)

    def _open(self) -> ServiceBusAdministrationClient:
        with self._lock:
            if self._client is None:
                self._client = self._new_client()
            return self._client

    def _new_client(self) -> ServiceBusAdministrationClient:
        address = self._address
        options: dict[str, Any] = {"retry_total": 1, "connection_timeout": 5}
        if address.emulator:
            return _emulators_client(self._admin or self._named() or _usual_admin(address))
        if address.uses_entra:
            credential = credential_of(address, self._credential)
            return ServiceBusAdministrationClient(address.host, credential, **options)
        text = address.connection_string().reveal()
        return ServiceBusAdministrationClient.from_connection_string(text, **options)


def _emulators_client(text: str) -> ServiceBusAdministrationClient:
    """The client of an emulator's administration port. Raises ConfigurationError."""
    try:
        service_bus_endpoint(split(text).get("Endpoint", ""))
        return administration_client(text)
    except (ConfigurationError, ValueError) as error:
        raise ConfigurationError(
            f"{ADMIN_VARIABLE} is not the connection string of the emulator's administration port: "
            f"{error}"
        ) from None


def _usual_admin(address: ServiceBusAddress) -> str:
    """The connection string of the emulator's usual administration port, with the same key."""
    text = address.connection_string().reveal()
    netloc = address.host if address.port is None else f"{address.host}:{address.port}"
    return text.replace(f"sb://{netloc}", f"sb://{address.host}:{ADMIN_PORT}", 1)


def _settings(options: QueueOptions) -> dict[str, Any]:
    """The options as settings of the service: those that can be changed after creation."""
    settings: dict[str, Any] = {}
    if options.lease is not None:
        settings["lock_duration"] = timedelta(seconds=options.lease)
    if options.max_deliveries is not None:
        settings["max_delivery_count"] = options.max_deliveries
    if options.time_to_live is not None:
        settings["default_message_time_to_live"] = timedelta(seconds=options.time_to_live)
    window = options.duplicate_window
    if window:
        if not SHORTEST_WINDOW <= window <= LONGEST_WINDOW:
            raise ConfigurationError(
                f"a duplicate window of {window:g} s is not possible; Service Bus accepts "
                f"{SHORTEST_WINDOW:.0f} s to 7 days"
            )
        settings["duplicate_detection_history_time_window"] = timedelta(seconds=window)
    return settings
