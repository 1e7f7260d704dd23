"""What the local broker is: ``local://``, its names, and what it can do."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Final

from aztask.address.addresses import LocalAddress
from aztask.address.urls import local_address
from aztask.errors import InvalidQueueName
from aztask.message.bounds import MessageLimits
from aztask.queues.base import Broker, Capabilities
from aztask.queues.kinds import BrokerKind, Opening
from aztask.queues.local.payload import MESSAGE_LIMIT

ADAPTER: Final = "aztask.queues.local.broker"

CAPABILITIES: Final = Capabilities(
    name="local",
    sessions=True,
    defer=True,
    update=True,
    release=True,
    duplicate_detection=True,
    own_limits=True,
    atomic_resubmit=True,
    native_dead_letter=True,
    dead_by_position=True,
    paged_peek=True,
    cancel_scheduled=True,
    peeks_leases=True,
    remote=False,
    max_message_bytes=MESSAGE_LIMIT,
    receive_limit=1000,
    inline_bytes=MessageLimits().body_bytes,
    checkpoint_share=1,
    path_in_url=True,
)

_NAME: Final = re.compile(r"[a-z0-9._](?:-?[a-z0-9._])*", re.ASCII)
_NAME_LIMIT: Final = 63


class LocalKind(BrokerKind):
    """The queues of a file, or of this process's memory."""

    capabilities = CAPABILITIES

    def parse(self, rest: str) -> LocalAddress:
        return local_address(rest)

    def check_name(self, queue: str) -> None:
        """Raise InvalidQueueName unless the local broker allows the name."""
        if len(queue) > _NAME_LIMIT or not _NAME.fullmatch(queue):
            shown = queue if len(queue) <= 2 * _NAME_LIMIT else queue[:_NAME_LIMIT] + "..."
            raise InvalidQueueName(
                f"{shown!a} cannot name a queue: use 1 to {_NAME_LIMIT} lower-case letters, "
                "digits, '.', '_' and single hyphens between them"
            )

    def open(self, address: LocalAddress, opening: Opening) -> Broker:
        broker: Broker = importlib.import_module(ADAPTER).LocalBroker(opening.database(address))
        return broker

    def advice_place(self, address: LocalAddress, text: str, container: str) -> Path | None:
        """Beside the file of the queues."""
        return None if address.in_memory else Path(address.path)


KIND: Final = LocalKind()
