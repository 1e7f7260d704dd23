"""Makes the SDK's receivers decode messages with our decoder, one message at a time.

Rules
1. Only our own links and requests are changed. Other users of the SDK in this process are not
   affected.
2. No message content raises an error. A damaged message arrives together with the other messages;
   `damage_of` returns its problem.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from types import FunctionType, MethodType
from typing import Any

from azure.servicebus import ServiceBusReceivedMessage, ServiceBusReceiver
from azure.servicebus._common.constants import REQUEST_RESPONSE_RECEIVE_BY_SEQUENCE_NUMBER
from azure.servicebus._pyamqp.receiver import ReceiverLink

from aztask.queues.servicebus.amqp import Damaged, damaged, read_message


@cache
def supported() -> bool:
    """Whether this SDK decodes messages in the place that this module replaces."""
    method = getattr(ReceiverLink, "_incoming_transfer", None)
    return (
        isinstance(method, FunctionType)
        and "decode_payload" in method.__code__.co_names
        and hasattr(ServiceBusReceiver, "_mgmt_request_response_with_retry")
    )


def built(receiver: Any, frame: Any, message: Any) -> ServiceBusReceivedMessage:
    """The SDK's message object for a message that arrived on a link."""

    def make(message: Any) -> ServiceBusReceivedMessage:
        made: ServiceBusReceivedMessage = receiver._build_received_message((frame, message))
        return made

    return _build(make, message)


def _build(
    make: Callable[[Any], ServiceBusReceivedMessage], message: Any
) -> ServiceBusReceivedMessage:
    """Build the SDK's message object. If the SDK fails, build a damaged one (rule 2)."""
    try:
        return make(message)
    except Exception as error:  # noqa: BLE001  # any content: the other messages must arrive
        return make(damaged(b"", f"the SDK cannot read it: {type(error).__name__}: {error}"))


def damage_of(message: ServiceBusReceivedMessage) -> Damaged | None:
    """The damage of a message that could not be read; None for a readable message."""
    inner = getattr(message, "_message", None)
    return inner if isinstance(inner, Damaged) else None


def decode_here(link: Any) -> None:
    """Make this receiver's link decode its messages with our decoder.

    The SDK's own method stays in use, because it also counts credit and joins frames. A copy of it
    is bound to the link, with our decoder under the global name `decode_payload`.
    """
    if supported() and isinstance(link, ReceiverLink):
        method: Any = ReceiverLink._incoming_transfer
        names = {**method.__globals__, "decode_payload": read_message}
        function = FunctionType(method.__code__, names, method.__name__, method.__defaults__)
        target: Any = link
        target._incoming_transfer = MethodType(function, link)


def decode_answers(receiver: ServiceBusReceiver, request: Any = None) -> ServiceBusReceiver:
    """Make our decoder decode the messages that this receiver peeks at, or receives as deferred.

    request: a function that sends the requests over another connection. Returns the receiver.
    """
    ours: Any = receiver
    send: Any = request or getattr(ours, "_mgmt_request_response_with_retry", None)

    def request_decoded(mgmt_operation: bytes, message: Any, callback: Any, **options: Any) -> Any:
        deferred = mgmt_operation == REQUEST_RESPONSE_RECEIVE_BY_SEQUENCE_NUMBER
        handle = partial(_answered, ours, callback, deferred) if supported() else callback
        return send(mgmt_operation, message, handle, **options)

    if send is not None:
        ours._mgmt_request_response_with_retry = request_decoded
    return receiver


def _answered(
    receiver: Any,
    callback: Any,
    deferred: bool,
    status: int,
    answer: Any,
    description: Any,
    **options: Any,
) -> Any:
    """The messages in an answer; an answer without messages goes to the SDK."""
    value = answer.value
    if status != 200 or not isinstance(value, dict) or b"messages" not in value:
        return callback(status, answer, description, **options)
    return [
        _build(
            partial(
                ServiceBusReceivedMessage,
                receive_mode=receiver._receive_mode,
                receiver=receiver,
                lock_token=each.get(b"lock-token"),
                is_deferred_message=deferred,
                is_peeked_message=not deferred,
            ),
            read_message(each[b"message"]),
        )
        for each in value[b"messages"]
    ]
