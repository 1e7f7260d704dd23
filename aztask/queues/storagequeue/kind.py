"""What Storage queues are: ``storagequeue://``, their names, and what they can do.

Names leave room for the suffix of our dead-letter queues.

Source: the service's documentation, "Naming queues and metadata".
"""

from __future__ import annotations

import importlib
import re
from typing import Final

from aztask.address.addresses import BlobAddress, StorageQueueAddress
from aztask.address.owner import service_name
from aztask.address.urls import parse_container, storage_queue_address
from aztask.errors import InvalidQueueName
from aztask.queues.base import Broker, Capabilities
from aztask.queues.kinds import BrokerKind, Opening
from aztask.queues.storagequeue.wire import ENVELOPE_LIMIT, FREE, LONGEST_DELAY

ADAPTER: Final = "aztask.queues.storagequeue.broker"

RECEIVE_LIMIT: Final = 32
PEEK_LIMIT: Final = 32

CAPABILITIES: Final = Capabilities(
    name="storagequeue",
    update=True,
    atomic_resubmit=True,
    resubmit_in_place=True,
    peek_limit=PEEK_LIMIT,
    purges_leased=True,
    remote=True,
    max_lease_seconds=float(LONGEST_DELAY),
    max_message_bytes=ENVELOPE_LIMIT,
    receive_limit=RECEIVE_LIMIT,
    receives_at_once=2,
    default_lease_seconds=300.0,
    inline_bytes=32 * 1024,
    headroom=FREE // 4 * 3,
    lead=2.2,  # messages are hidden for whole seconds, and polled each second at least
    telemetry_system="azure_storage_queue",
    azure_namespace="Microsoft.Storage",
)

POISON_SUFFIX: Final = "-poison"
LONGEST_NAME: Final = 63 - len(POISON_SUFFIX)

_NAME: Final = re.compile(r"[a-z0-9](?:-?[a-z0-9])+", re.ASCII)


def poison_name(queue: str) -> str:
    """The name of the queue that holds the dead letters."""
    return queue + POISON_SUFFIX


class StorageQueueKind(BrokerKind):
    """The queues of a storage account."""

    capabilities = CAPABILITIES

    def parse(self, rest: str) -> StorageQueueAddress:
        return storage_queue_address(rest)

    def check_name(self, queue: str) -> None:
        """Raise InvalidQueueName unless the service allows the name and its dead-letter queue's."""
        shown = ascii(queue if len(queue) <= 2 * LONGEST_NAME else queue[:LONGEST_NAME] + "...")
        if not 3 <= len(queue) <= LONGEST_NAME or not _NAME.fullmatch(queue):
            raise InvalidQueueName(
                f"{shown} cannot name a Storage queue: use 3 to {LONGEST_NAME} characters, "
                "lower-case letters, digits and single hyphens between them"
            )
        if queue.endswith(POISON_SUFFIX):
            raise InvalidQueueName(
                f"{shown} looks like a dead-letter queue, because it ends in {POISON_SUFFIX}: "
                f"choose a name of 3 to {LONGEST_NAME} characters with another ending"
            )

    def open(self, address: StorageQueueAddress, opening: Opening) -> Broker:
        make = importlib.import_module(ADAPTER).StorageQueueBroker
        broker: Broker = make(address, poll_ceiling=opening.poll_ceiling)
        return broker

    def identity(self, address: StorageQueueAddress) -> str:
        return service_name(address)

    def advice_place(self, address: StorageQueueAddress, text: str, container: str) -> BlobAddress:
        """In a container of the same account, with the same credentials."""
        if not address.uses_entra:
            return parse_container(container, text)
        host = address.endpoint.partition("://")[2].replace(".queue.", ".blob.", 1)
        return parse_container(f"blob://{host}/{container}")


KIND: Final = StorageQueueKind()
