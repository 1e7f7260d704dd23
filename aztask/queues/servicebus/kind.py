"""What Service Bus is: ``servicebus://``, its names, and what it can do.

Source: the service's documentation, "Naming rules and restrictions for Azure resources".
"""

from __future__ import annotations

import importlib
import re
from typing import Final

from aztask.address.addresses import ServiceBusAddress
from aztask.address.owner import service_name
from aztask.address.urls import service_bus_address
from aztask.errors import InvalidQueueName
from aztask.queues.base import Broker, Capabilities
from aztask.queues.kinds import BrokerKind, Opening
from aztask.support.display import printable

ADAPTER: Final = "aztask.queues.servicebus.broker"

MESSAGE_LIMIT: Final = 256 * 1024
"""Bytes of a message with its properties in the Standard tier (the service's documented quota)."""

CAPABILITIES: Final = Capabilities(
    name="servicebus",
    sessions=True,
    defer=True,
    release=True,
    fixed_lease=True,
    duplicate_detection=True,
    own_limits=True,
    native_dead_letter=True,
    paged_peek=True,
    cancel_scheduled=True,
    timer_numbers=True,
    remote=True,
    max_lease_seconds=300.0,
    max_message_bytes=MESSAGE_LIMIT,
    receive_limit=256,
    inline_bytes=192 * 1024,
    port=5671,
    lead=1.0,  # the service says only that a message is not there before its time
    telemetry_system="servicebus",
    azure_namespace="Microsoft.ServiceBus",
)

NAME_LIMIT: Final = 260

_NAME: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._/-]*[A-Za-z0-9])?", re.ASCII)


class ServiceBusKind(BrokerKind):
    """The queues of a namespace."""

    capabilities = CAPABILITIES

    def parse(self, rest: str) -> ServiceBusAddress:
        return service_bus_address(rest)

    def check_name(self, queue: str) -> None:
        """Raise InvalidQueueName unless Service Bus allows the name."""
        if (
            len(queue) > NAME_LIMIT
            or not _NAME.fullmatch(queue)
            or any(part in ("", ".", "..") for part in queue.split("/"))
        ):
            raise InvalidQueueName(
                f"{printable(queue, 80)} cannot name a queue: use 1 to {NAME_LIMIT} letters, "
                "digits, '.', '-', '_' and '/', a letter or digit first and last"
            )

    def open(self, address: ServiceBusAddress, opening: Opening) -> Broker:
        broker: Broker = importlib.import_module(ADAPTER).ServiceBusBroker(address)
        return broker

    def identity(self, address: ServiceBusAddress) -> str:
        return service_name(address)


KIND: Final = ServiceBusKind()
