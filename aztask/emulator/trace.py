"""One readable line per frame, for ``aztask emulator --trace``.

Secrets are never shown: of a message's body only the length is, and tokens travel in bodies.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from aztask.emulator.amqp.decode import decode
from aztask.emulator.amqp.errors import AmqpError
from aztask.emulator.amqp.performatives import Transfer
from aztask.emulator.amqp.types import Described

_NAMES = {
    0x10: "open",
    0x11: "begin",
    0x12: "attach",
    0x13: "flow",
    0x14: "transfer",
    0x15: "disposition",
    0x16: "detach",
    0x17: "end",
    0x18: "close",
}
_STATES = {
    0x1D: "error",
    0x23: "received",
    0x24: "accepted",
    0x25: "rejected",
    0x26: "released",
    0x27: "modified",
    0x28: "source",
    0x29: "target",
}
_MAX_TEXT = 200


def tracer(write: Callable[[str], None]) -> Callable[[str, str, int, Any], None]:
    """Return a function for `aztask.emulator.server.Server` that writes one line per frame."""

    def trace(remote: str, direction: str, channel: int, frame: Any) -> None:
        text = _incoming(frame) if direction == "->" else _outgoing(frame)
        write(f"{remote} {direction} {channel} {text}")

    return trace


def _incoming(performative: Any) -> str:
    parts = []
    for item in dataclasses.fields(performative):
        value = getattr(performative, item.name)
        if item.name == "payload":
            parts.append(f"payload={len(value)} bytes")
        elif value is not None and value != item.default and value not in ({}, []):
            parts.append(f"{item.name}={shown(value)}")
    return f"{type(performative).__name__.lower()} {' '.join(parts)}"


def _outgoing(body: bytes) -> str:
    try:
        described, end = decode(body)
    except AmqpError as error:
        return str(error)
    name = _NAMES.get(described.descriptor, hex(described.descriptor))
    fields = list(described.value)
    while fields and fields[-1] is None:
        fields.pop()  # trailing nulls tell a reader nothing
    values = " ".join("-" if value is None else shown(value) for value in fields)
    rest = f" payload={len(body) - end} bytes" if name == Transfer.__name__.lower() else ""
    return f"{name} {values}{rest}"


def shown(value: Any) -> str:
    """Return a value as printable text of at most `_MAX_TEXT` characters."""
    if isinstance(value, Described):
        name = _STATES.get(value.descriptor, str(value.descriptor))
        inner = value.value if isinstance(value.value, list) else [value.value]
        text = f"{name}({', '.join('-' if item is None else shown(item) for item in inner)})"
    elif isinstance(value, bytes):
        text = value.hex()
    elif isinstance(value, dict):
        text = "{" + ", ".join(f"{key}: {shown(item)}" for key, item in value.items()) + "}"
    else:
        text = str(value) if isinstance(value, (bool, int, float)) else repr(str(value))
    text = text if text.isprintable() else ascii(text)
    return text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 1] + "…"
