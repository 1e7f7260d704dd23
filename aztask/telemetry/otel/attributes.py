"""Attributes of spans and metrics, by OpenTelemetry's messaging conventions.

Source: OpenTelemetry, "Semantic conventions for messaging systems" and "... for Azure Messaging",
version 1.44 (in development). ``az.namespace`` and the link's ``enqueuedTime`` are what Azure
Monitor's exporter reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Final, TypeAlias

from aztask.app import App
from aztask.brokers.base import Networked

Attributes: TypeAlias = dict[str, str | bool | int | float]

SYSTEMS: Final = {"servicebus": "servicebus", "storagequeue": "azure_storage_queue"}
"""``messaging.system`` by broker; only the first one is a value of the conventions."""

LOCAL_SYSTEM: Final = "aztask"
"""``messaging.system`` of the embedded queue and of brokers that an app brings along."""

SETTLEMENTS: Final = {
    "complete": "complete",
    "abandon": "abandon",
    "release": "abandon",
    "defer": "defer",
    "dead-letter": "dead_letter",
    "resubmit": "complete",
}
"""``messaging.servicebus.disposition_status`` by settlement. A resubmission sends a clone and
completes the original."""


class MessagingAttributes:
    """The attributes that an app's spans and metrics share, made once for each queue."""

    def __init__(self, app: App) -> None:
        """Ask for no connection: the broker's name is read with the first span."""
        self._app = app
        self._known: dict[tuple[str, str, str], Mapping[str, str | int]] = {}

    @cached_property
    def is_service_bus(self) -> bool:
        """True if the app's broker is Service Bus."""
        return self._app.broker.capabilities.name == "servicebus"

    def of(self, queue: str, name: str, kind: str) -> Mapping[str, str | int]:
        """The attributes of an operation on a queue. Do not change them.

        * `name`: the operation's name, such as "dead_letter".
        * `kind`: its type: "create", "send", "receive", "process" or "settle".
        """
        key = (queue, name, kind)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._made(queue, name, kind)
        return known

    def _made(self, queue: str, name: str, kind: str) -> Mapping[str, str | int]:
        service = self._app.broker.capabilities.name
        made: dict[str, str | int] = {
            "messaging.system": SYSTEMS.get(service, LOCAL_SYSTEM),
            "messaging.destination.name": queue,
            "messaging.operation.name": name,
            "messaging.operation.type": kind,
        }
        broker = self._app.broker
        if isinstance(broker, Networked):
            host, port = broker.server
            made["server.address"] = host
            if port is not None:
                made["server.port"] = port
        if service == "servicebus":
            made["az.namespace"] = "Microsoft.ServiceBus"
        elif service == "storagequeue":
            made["az.namespace"] = "Microsoft.Storage"
        return made
