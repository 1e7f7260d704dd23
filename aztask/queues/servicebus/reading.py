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
from typing import Any, Final

from azure.servicebus import ServiceBusReceivedMessage, ServiceBusReceiver
from azure.servicebus._common.constants import REQUEST_RESPONSE_RECEIVE_BY_SEQUENCE_NUMBER
from azure.servicebus._pyamqp.message import Header, Message, Properties
from azure.servicebus._pyamqp.receiver import ReceiverLink

from aztask.queues.servicebus.values import (
    ERRORS,
    UnreadableValue,
    check_items,
    end_of,
    pairs_of,
    read_value,
    reason_of,
)
from aztask.support.display import one_line

# -- Reads AMQP 1.0 messages in place of the SDK's decoder, and never raises.
#
# Why not the SDK's decoder: one message that it cannot read makes it lose the whole batch ([seen]).
#
# The decoder of azure-servicebus 7.15 lacks three types of the specification (char, decimal32 and
# decimal64), reads decimal128 wrongly, does not compare sizes with the available bytes, and raises
# in the middle of a receive.
#
# If a message cannot be read, the result is `DamagedMessage`: it holds the sections that can be
# read, the reason why another one cannot, and all bytes. The receiver decides what to do with it.
#
# The service writes header and annotations in front of the sender's bytes. So if one of these
# sections comes twice, the first one counts: a sender cannot replace a lock token or a time.
#
# Source: OASIS AMQP 1.0, part 3, section 3.2 (messages).

_Sections = dict[str, Any]

MOST_ITEMS: Final = 262_144
"""Values in one section of a message, in all levels: at most about 20 MB of memory."""


class DamagedMessage(Message):
    """A message with an unreadable section. problem: why it is unreadable. raw: all its bytes."""

    problem: str = ""
    raw: bytes = b""


def damaged(raw: bytes, problem: str, **sections: Any) -> DamagedMessage:
    """A message that cannot be read, with the sections that can."""
    message = DamagedMessage(**sections)
    message.problem, message.raw = one_line(problem, 300), raw
    return message


def read_message(payload: bytes | bytearray | memoryview) -> Message:
    """The message in `payload`; `DamagedMessage` if it cannot be read."""
    raw = bytes(payload)
    sections: _Sections = {}
    problem, position = "", 0
    while position < len(raw):
        name, start, begin = "section", len(raw), position
        try:
            code, start = _descriptor(raw, position)
            name, keep = _SECTIONS.get(code, (f"section 0x{code:02x}", _ignore))
            if len(raw) > MOST_ITEMS:  # fewer bytes hold fewer values
                check_items(raw, start, MOST_ITEMS)
            value, position = read_value(raw, start)
            keep(sections, value)
        except ERRORS as error:
            problem = problem or f"the {name} at byte {begin} cannot be read: {reason_of(error)}"
            position = end_of(raw, start)
            if (
                name == _APPLICATION and len(raw) <= MOST_ITEMS
            ):  # they may hold the service's dead-letter reason
                sections.setdefault("application_properties", {}).update(pairs_of(raw, start))
    return damaged(raw, problem, **sections) if problem else Message(**sections)


# -- sections -------------------------------------------------------------------------------------


def _descriptor(raw: bytes, position: int) -> tuple[int, int]:
    """(code of the section, position of its value): the descriptor is a number or a symbol."""
    if raw[position] != 0:
        raise UnreadableValue(f"0x{raw[position]:02x} is not the start of a section")
    if raw[position + 1] == 0x53:
        return raw[position + 2], position + 3
    descriptor, end = read_value(raw, position + 1)
    if isinstance(descriptor, bytes):
        descriptor = _CODES.get(descriptor)
    if not isinstance(descriptor, int):
        raise UnreadableValue("its descriptor is unknown")
    return descriptor, end


def _ignore(sections: _Sections, value: Any) -> None:
    """Skip a section that the specification does not define, as the SDK does."""


def _keep_header(sections: _Sections, value: Any) -> None:
    fields = _fields(value, 5)
    if any(field is not None and not isinstance(field, int) for field in fields):
        raise UnreadableValue("one of its fields has a wrong type")
    sections.setdefault("header", Header(*fields))


def _keep_properties(sections: _Sections, value: Any) -> None:
    sections["properties"] = Properties(*_fields(value, 13))


def _fields(value: Any, limit: int) -> list[Any]:
    if not isinstance(value, list) or len(value) > limit:
        raise UnreadableValue(f"it is not a list of at most {limit} fields")
    return value


def _keep_map(name: str) -> Callable[[_Sections, Any], None]:
    def keep(sections: _Sections, value: Any) -> None:
        if not isinstance(value, dict):
            raise UnreadableValue("it is not a map")
        sections.setdefault(name, {}).update(value)

    return keep


def _keep_first(name: str) -> Callable[[_Sections, Any], None]:
    """Keep a map whose values come from the service where an earlier section has the same key."""

    def keep(sections: _Sections, value: Any) -> None:
        if not isinstance(value, dict):
            raise UnreadableValue("it is not a map")
        sections[name] = value | sections.get(name, {})

    return keep


def _keep_each(name: str, kind: type) -> Callable[[_Sections, Any], None]:
    def keep(sections: _Sections, value: Any) -> None:
        if not isinstance(value, kind):
            raise UnreadableValue(f"it is not of the type {kind.__name__}")
        sections.setdefault(name, []).append(value)

    return keep


def _keep_value(sections: _Sections, value: Any) -> None:
    sections["value"] = value


_APPLICATION: Final = "application properties"
_SECTIONS: Final[dict[int, tuple[str, Callable[[_Sections, Any], None]]]] = {
    0x70: ("header", _keep_header),
    0x71: ("delivery annotations", _keep_first("delivery_annotations")),
    0x72: ("message annotations", _keep_first("message_annotations")),
    0x73: ("properties", _keep_properties),
    0x74: (_APPLICATION, _keep_map("application_properties")),
    0x75: ("data", _keep_each("data", bytes)),
    0x76: ("sequence", _keep_each("sequence", list)),
    0x77: ("value", _keep_value),
    0x78: ("footer", _keep_map("footer")),
}
_CODES: Final = {
    b"amqp:header:list": 0x70,
    b"amqp:delivery-annotations:map": 0x71,
    b"amqp:message-annotations:map": 0x72,
    b"amqp:properties:list": 0x73,
    b"amqp:application-properties:map": 0x74,
    b"amqp:data:binary": 0x75,
    b"amqp:amqp-sequence:list": 0x76,
    b"amqp:amqp-value:*": 0x77,
    b"amqp:footer:map": 0x78,
}


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


def damage_of(message: ServiceBusReceivedMessage) -> DamagedMessage | None:
    """The damage of a message that could not be read; None for a readable message."""
    inner = getattr(message, "_message", None)
    return inner if isinstance(inner, DamagedMessage) else None


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
