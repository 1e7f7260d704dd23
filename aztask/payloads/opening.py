"""Open the store of payloads that the settings name, or the one beside the local queues."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

from aztask.address.addresses import (
    BlobAddress,
    LocalAddress,
    ServiceBusAddress,
    StorageQueueAddress,
)
from aztask.config import Settings
from aztask.engine.filesystem import group_id
from aztask.errors import ConfigurationError
from aztask.message.bounds import MessageLimits
from aztask.payloads.folder import FolderPayloads
from aztask.payloads.payloads import Payloads
from aztask.payloads.place import place_of
from aztask.payloads.store import PayloadStore
from aztask.support.extras import install_command

MODULE: Final = "aztask.payloads.blob"
"""Imported only when payloads are in blobs: its SDK is an extra."""

SUFFIX: Final = ".payloads"

INLINE_BYTES: Final[dict[type, int]] = {
    LocalAddress: MessageLimits().body_bytes,
    ServiceBusAddress: 192 * 1024,
    StorageQueueAddress: 32 * 1024,
}
"""What a message holds in itself by default: what fits beside headers, counters and reasons."""


CHECKPOINT_SHARE: Final = 8
"""In services whose messages are small, arguments and checkpoint share one message."""


def payloads_for(settings: Settings, broker: Any, *, testing: bool = False) -> Payloads | None:
    """The payloads of an app; None if it stores none.

    * `broker`: the broker's address, a `Broker`, or None.
    * `testing`: True to use the folder beside the queues, whatever the settings name.
    """
    make = _maker(settings, broker, testing=testing)
    if make is None:
        return None
    given = settings.payload_threshold
    inline = INLINE_BYTES.get(type(broker), INLINE_BYTES[StorageQueueAddress])
    threshold = given or inline
    shares = not isinstance(broker, LocalAddress)
    return Payloads(
        make,
        threshold=threshold,
        checkpoint_threshold=threshold // CHECKPOINT_SHARE if shares else threshold,
        result_threshold=given or MessageLimits().body_bytes,
    )


def _maker(settings: Settings, broker: Any, *, testing: bool) -> Callable[[], PayloadStore] | None:
    place = None if testing else place_of(settings.payloads, settings.payloads_account)
    if isinstance(place, BlobAddress):
        return partial(_blobs, place)
    if place is not None:
        return partial(FolderPayloads, Path(place).absolute())
    if settings.payloads == "off" or not isinstance(broker, LocalAddress) or broker.in_memory:
        return None
    return lambda: FolderPayloads(
        Path(broker.path + SUFFIX),
        group=group_id(broker.group) if broker.group else None,
        durable=broker.full_durability,
    )


def _blobs(address: BlobAddress) -> PayloadStore:
    try:
        module = importlib.import_module(MODULE)
    except ImportError:
        raise ConfigurationError(
            f"payloads in blobs need azure-storage-blob; install it with: {install_command('blob')}"
        ) from None
    store: PayloadStore = module.BlobPayloads(address)
    return store
