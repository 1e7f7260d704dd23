"""Makes the SDK encode each message of a batch once.

`ServiceBusMessageBatch.add_message` encodes a message to learn its size, and encodes it again to
add it ([seen] in azure-servicebus 7.10 to 7.15). Encoding is most of what a send costs. The batch
asks its transport for both; this transport keeps the bytes of the first answer for the second.

An SDK without these two calls gets its own transport, and encodes twice.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

from azure.servicebus import ServiceBusMessageBatch
from azure.servicebus._pyamqp._encode import encode_payload
from azure.servicebus._transport._pyamqp_transport import PyamqpTransport


class OnceEncoding(PyamqpTransport):  # type: ignore[misc, unused-ignore]  # the SDK has no types here
    """The transport of one batch, which only one thread fills."""

    def __init__(self) -> None:
        self._message: Any = None
        self._encoded = bytearray()

    def get_message_encoded_size(self, message: Any) -> int:  # type: ignore[override]
        """The size of an encoded message, in bytes."""
        self._message, self._encoded = message, bytearray()
        encode_payload(self._encoded, message)
        return len(self._encoded)

    def add_batch(self, sb_message_batch: Any, outgoing_sb_message: Any) -> None:  # type: ignore[override]
        """Add the message whose size was asked for last; another one is encoded now."""
        if outgoing_sb_message._message is not self._message:
            self.get_message_encoded_size(outgoing_sb_message._message)
        sb_message_batch._message[5].append(self._encoded)


@cache
def _supported() -> bool:
    """True if the SDK's batch asks its transport in the way that `OnceEncoding` answers."""
    calls = {
        "get_message_encoded_size": ["message"],
        "add_batch": ["sb_message_batch", "outgoing_sb_message"],
    }
    for name, parameters in calls.items():
        function = getattr(PyamqpTransport, name, None)
        if function is None or list(inspect.signature(function).parameters) != parameters:
            return False
    return True


def encode_once(batch: ServiceBusMessageBatch) -> ServiceBusMessageBatch:
    """Have this new batch encode its messages once; returns it."""
    own: Any = batch
    if _supported() and getattr(own, "_amqp_transport", None) is PyamqpTransport:
        own._amqp_transport = OnceEncoding()
    return batch
