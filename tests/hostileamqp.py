"""Hostile messages for Service Bus: every AMQP type in every place, and bytes that are no AMQP."""

from __future__ import annotations

import base64
import random
from typing import Any

import msgpack
from hostilestream import Hostile, garbled, packed

from aztask.emulator.amqp import encode, sections
from aztask.queues.servicebus.values import _READERS
from aztask.queues.servicebus.wire import EXPIRES_AT, PACKED

WIDTHS = {4: 0, 5: 1, 6: 2, 7: 4, 8: 8, 9: 16}
CODES = sorted({code for code, reader in enumerate(_READERS) if "_unknown" not in repr(reader)})
"""The constructor of every type of the specification."""
ANNOTATIONS = (
    *("x-opt-partition-key", "x-opt-via-partition-key", "x-opt-lock-token", "x-opt-locked-until"),
    *("x-opt-enqueued-time", "x-opt-sequence-number", "x-opt-message-state", "x-unknown"),
)


def any_amqp(dice: random.Random, depth: int = 0) -> bytes:
    """An encoded value of any type. Some are malformed: lying sizes, wrong texts, no such type."""
    if dice.random() < 0.03:
        return bytes((dice.randrange(256),)) + dice.randbytes(dice.randrange(20))
    code = dice.choice(CODES)
    if code == 0:
        return b"\x00" + any_amqp(dice, 4) + any_amqp(dice, depth + 1)
    kind = code >> 4
    if kind in WIDTHS:
        return bytes((code,)) + dice.choice(
            (dice.randbytes(WIDTHS[kind]), bytes(WIDTHS[kind]), b"\xff" * WIDTHS[kind])
        )
    wide = 4 if kind & 1 else 1
    if kind in (0xA, 0xB):
        texts = (b"", b"text", dice.randbytes(9), b"\xed\xa0\x80", b"\x1b[2J", b"x" * 99)
        data = dice.choice(texts)
        size = len(data)
        body = data
    else:
        count = dice.randrange(4) * (2 if code in (0xC1, 0xD1) else 1)
        if kind in (0xE, 0xF):
            item = any_amqp(dice, 4)
            data = item + item[1:] * max(count - 1, 0)
        else:
            data = b"".join(
                any_amqp(dice, depth + 1) if depth < 4 else encode.NULL for _ in range(count)
            )
        count = dice.choice((count, count, count, count + 1, 2 ** (8 * wide) - 1))
        body, size = count.to_bytes(wide) + data, len(data) + wide
    most = 2 ** (8 * wide) - 1
    if dice.random() < 0.05:
        size = dice.choice((0, size + 1, most))
    return bytes((code,)) + min(size, most).to_bytes(wide) + body


def amqp(value: Any) -> bytes:
    """The encoded value, whatever its type."""
    match value:
        case str():
            data = value.encode("utf-8", "surrogatepass")
            encoded = b"\xb1" + len(data).to_bytes(4) + data
        case msgpack.ExtType(data=data):
            encoded = encode.binary(data)
        case list():
            encoded = encode.list_of([amqp(each) for each in value])
        case dict():
            encoded = encode.map_of([(amqp(name), amqp(item)) for name, item in value.items()])
        case int() if value >= 2**63:
            encoded = b"\x80" + value.to_bytes(8)
        case _:
            encoded = encode.simple(value)
    return encoded


def _properties(of: dict[str, Any], dice: random.Random) -> bytes:
    properties = of["properties"] if isinstance(of["properties"], dict) else {}
    items = [
        *(of["message_id"] or None, None, None, of["subject"], properties.get("reply_to")),
        *(of["correlation_id"], of["content_type"], of["content_encoding"], None, None, None),
    ]
    encoded = [amqp(item) for item in items]
    if dice.random() < 0.1:
        at = dice.choice((1, 2, 8, 9, 10, 11, 12))
        encoded += [encode.NULL] * (13 - len(encoded))
        encoded[at] = any_amqp(dice)
    return encode.fields(sections.PROPERTIES, encoded)


def _application(of: dict[str, Any], dice: random.Random) -> bytes:
    headers = of["headers"]
    if not isinstance(headers, dict):
        return encode.described(sections.APPLICATION_PROPERTIES, amqp(headers))
    pairs, inside = [], {}
    for name, value in headers.items():
        if isinstance(value, list | dict | bytes | msgpack.ExtType) and dice.random() < 0.7:
            inside[name] = value
        else:
            pairs.append((amqp(name), amqp(value)))
    properties = of["properties"]
    if inside or properties:
        coded = base64.b64encode(packed({"headers": inside, "properties": properties}))
        if dice.random() < 0.1:
            coded = dice.choice((coded[:-2], b"%%", b"", base64.b64encode(packed([1])), coded * 2))
        pairs.append((encode.string(PACKED), encode.string(coded.decode())))
    if of["expires_at"] is not None:
        pairs.append((encode.string(EXPIRES_AT), amqp(of["expires_at"])))
    if dice.random() < 0.3:
        name = dice.choice(("x-odd", "x-odd", PACKED, EXPIRES_AT, *list(headers)[:3]))
        pairs.append((amqp(name), any_amqp(dice)))
    return encode.described(sections.APPLICATION_PROPERTIES, encode.map_of(pairs))


def _body(of: dict[str, Any], dice: random.Random) -> list[bytes]:
    body = of["body"]
    if isinstance(body, bytes) and dice.random() < 0.85:
        return [encode.described(sections.DATA, encode.binary(body))]
    return dice.choice(
        (
            [],
            [encode.described(sections.DATA, encode.binary(b"\x93\x90"))] * 3,
            [encode.described(sections.DATA, any_amqp(dice))],
            [encode.described(sections.AMQP_VALUE, any_amqp(dice))],
            [encode.described(sections.AMQP_SEQUENCE, any_amqp(dice))],
            [encode.described(sections.AMQP_VALUE, amqp(body))],
        )
    )


def payload_of(made: Hostile, dice: random.Random) -> bytes:
    """The message as an attacker encodes it; most are well formed, and some are not."""
    parts = [_properties(made.fields, dice), _application(made.fields, dice)]
    parts += _body(made.fields, dice)
    if dice.random() < 0.1:
        header = encode.fields(sections.HEADER, [any_amqp(dice), any_amqp(dice)])
        parts.insert(0, header)
    if dice.random() < 0.1:
        pair = (encode.symbol(dice.choice(ANNOTATIONS)), any_amqp(dice))
        at = 1 if parts[0].startswith(encode.described(sections.HEADER, b"")) else 0
        parts.insert(at, encode.described(sections.MESSAGE_ANNOTATIONS, encode.map_of([pair])))
    if dice.random() < 0.05:
        parts.append(encode.described(dice.choice((0x71, 0x78, 0x70, 0x79)), any_amqp(dice)))
    if dice.random() < 0.03:
        dice.shuffle(parts)
    raw = b"".join(parts)
    return garbled(dice, raw) if dice.random() < 0.1 else raw
