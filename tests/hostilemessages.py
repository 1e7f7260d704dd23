"""Messages that no client of aztask would send: odd types, and bytes that are no AMQP.

The emulator checks what it takes, as strictly as a broker can. `taken_as_it_is` makes the one that
runs in this process take everything, as a broker would that looks at less.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

import pytest
from azure.servicebus._pyamqp._encode import encode_payload
from azure.servicebus._transport._pyamqp_transport import PyamqpTransport
from rawclient import RawClient, transfer_frame

from aztask.emulator.amqp import AmqpError, encode, sections
from aztask.emulator.broker import producer, stored
from aztask.emulator.broker.stored import NO_TTL, StoredMessage
from aztask.message.codec import Codec
from aztask.message.envelope import Envelope
from aztask.message.message import TaskMessage
from aztask.queues.engine import NewMessage
from aztask.queues.servicebus.wire import message_of

ACCEPTED = 0x24

ODD: dict[str, tuple[bytes, str]] = {
    "char": (b"\x73\x00\x01\xf6\x00", "\N{GRINNING FACE}"),
    "decimal32": (bytes.fromhex("74 6CB8967F"), "9999999"),
    "decimal64": (bytes.fromhex("84 31800000000002EE"), "7.50"),
    "decimal128": (bytes.fromhex("94 303E000000000000 0000000000000001"), "0.1"),
    "decimal": (bytes.fromhex("94 0C380000 0000000000000000 1425D829"), "33802.4489"),
    "uuid": (b"\x98" + bytes(range(16)), "00010203-0405-0607-0809-0a0b0c0d0e0f"),
    "infinity": (bytes.fromhex("94 F800000000000000 0000000000000000"), "-Infinity"),
}
"""Values of types that the SDK's decoder does not know, or reads wrongly, and how headers show
them. "decimal" is what .NET sent until 2026."""


def _with_property(value: bytes) -> Callable[[bytes], bytes]:
    return lambda raw: with_properties(raw, {"hostile": value})


MALFORMED: dict[str, Callable[[bytes], bytes]] = {
    "no type": _with_property(b"\x2f"),
    "no text": _with_property(b"\xa1\x04ab\xff\xfe"),
    "no character": _with_property(b"\x73\x00\x00\xd8\x00"),
    "no boolean": _with_property(b"\x56\x07"),
    "a size that lies": lambda raw: raw + b"\x00\x53\x75\xa0\xff",
    "a count that lies": _with_property(b"\xd0\x00\x00\x00\x04\xff\xff\xff\xff"),
    "a list of itself": _with_property(b"\x00" * 300),
    "a bomb": _with_property(b"\xf0\x00\x00\x00\x05\x00\x00\xff\xff\x40"),
    "cut off": lambda raw: raw[:-3],
    "no section": lambda raw: raw + b"\x01\x02\x03",
    "properties of a wrong type": lambda raw: b"\x00\x53\x73\xa1\x02no" + raw,
}
"""What makes a message one that cannot be read."""


def encoded(envelope: Envelope) -> bytes:
    """The envelope as our own broker sends it."""
    message = message_of(envelope, time.time()).raw_amqp_message
    return bytes(encode_payload(bytearray(), PyamqpTransport.to_outgoing_amqp_message(message)))


def task_payload(
    codec: Codec,
    task: str,
    arguments: Sequence[object],
    task_id: str,
    session: str | None = None,
) -> bytes:
    """A task's message as our own sender encodes it."""
    body, content_type, encoding = codec.encode_arguments(list(arguments), {})
    message = TaskMessage(task_id, task, "default", body, content_type, encoding, session=session)
    return encoded(codec.to_envelope(message))


def with_properties(raw: bytes, more: Mapping[str, bytes]) -> bytes:
    """An encoded message with further application properties, whose values are encoded."""
    cut = sections.cut(raw)
    start, end = cut.application_start, cut.application_end
    pairs = [pair for _, pair in sections.pairs_of(sections.map_body(raw, start))] if end else []
    if not end:
        start = end = cut.bare
    pairs += [encode.string(name) + value for name, value in more.items()]
    whole = encode.compound(0xC1, 2 * len(pairs), b"".join(pairs))
    section = encode.described(sections.APPLICATION_PROPERTIES, whole)
    return raw[:start] + section + raw[end:]


_sessions: dict[bytes, str] = {}
"""Which session a malformed message belongs to, which does not say it."""


def send_raw(
    port: int, queue: str, payloads: Sequence[bytes], *, session: str | None = None
) -> None:
    """Send these to the emulator, each as one message; AssertionError if it refuses one.

    session: the one that malformed messages belong to.
    """
    if session is not None:
        _sessions.update(dict.fromkeys(payloads, session))
    with RawClient(port) as client:
        client.attach(queue)
        for number, payload in enumerate(payloads):
            client.write(transfer_frame(number, payload))
            state = client.until("Disposition").state
            assert state.descriptor == ACCEPTED, state


@contextmanager
def taken_as_it_is() -> Iterator[None]:
    """The emulator of this process takes and hands out messages that are malformed."""
    checked, complete = producer.new_message, stored.with_properties

    def taken(entity: Any, raw: bytes, now: float) -> NewMessage:
        try:
            return checked(entity, raw, now)
        except AmqpError:
            kept = StoredMessage(0, 255, NO_TTL, 0, 0, b"", raw)
            return NewMessage(kept.pack(), uuid4().hex, _sessions.get(raw), None, None)

    def completed(bare: bytes, changed: Mapping[str, object]) -> bytes:
        try:
            return complete(bare, changed)
        except AmqpError:
            pairs = [(encode.string(name), encode.simple(text)) for name, text in changed.items()]
            return encode.described(sections.APPLICATION_PROPERTIES, encode.map_of(pairs)) + bare

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(producer, "new_message", taken)
        patch.setattr(stored, "with_properties", completed)
        yield
