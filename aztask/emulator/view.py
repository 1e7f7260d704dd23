"""The state of an emulator: entities with their counts, and connections, as data and as text."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from typing import Any

from aztask.emulator.amqp import AmqpError
from aztask.emulator.amqp.decode import decode
from aztask.emulator.amqp.encode import Described
from aztask.emulator.amqp.performatives import Transfer
from aztask.emulator.broker.broker import Service
from aztask.emulator.server import Endpoint
from aztask.errors import QueueNotFound

_HEADINGS = ("ENTITY", "ACTIVE", "LOCKED", "SCHEDULED", "DEFERRED", "DEAD", "TRANSFER", "RECEIVERS")


@dataclass(frozen=True, slots=True)
class EntityView:
    """One entity with the counts of its messages and receivers.

    transfer_dead: what its forwarding target refused (the column TRANSFER).
    """

    name: str
    kind: str
    active: int
    locked: int
    scheduled: int
    deferred: int
    dead: int
    transfer_dead: int
    receivers: int


@dataclass(frozen=True, slots=True)
class EmulatorView:
    """The emulator at one moment. links: the number over all connections."""

    entities: tuple[EntityView, ...]
    connections: int
    links: int

    def record(self) -> dict[str, Any]:
        """Return plain data, ready for JSON."""
        return {
            "event": "stats",
            "connections": self.connections,
            "links": self.links,
            "entities": [asdict(entity) for entity in self.entities],
        }

    def lines(self, height: int) -> list[str]:
        """Return a table of at most `height` lines; the last one counts the omitted entities."""
        rows = [_HEADINGS, *(_row(entity) for entity in self.entities)]
        name = max(len(row[0]) for row in rows)
        lines = [
            row[0].ljust(name) + "".join(column.rjust(11) for column in row[1:]) for row in rows
        ]
        room = max(2, height - 2)
        if len(lines) > room:
            lines = [*lines[: room - 1], f"... and {len(lines) - room + 1} more"]
        return [*lines, "", f"{self.connections} connections, {self.links} links"]


def _row(entity: EntityView) -> tuple[str, ...]:
    counts = (entity.active, entity.locked, entity.scheduled, entity.deferred, entity.dead)
    others = (entity.transfer_dead, entity.receivers)
    return (entity.name, *(str(count) for count in (*counts, *others)))


def view_of(broker: Service, endpoints: Collection[Endpoint]) -> EmulatorView:
    """Return the current state of an emulator. endpoints: its connections."""
    entities = []
    for entity in broker.namespace.all():
        try:
            counts = broker.engine.stats(entity.path)
        except QueueNotFound:
            continue
        entities.append(
            EntityView(
                entity.path,
                entity.kind.value,
                counts.active,
                counts.leased,
                counts.scheduled,
                counts.deferred,
                counts.dead,
                broker.namespace.transfer_dead(entity),
                len(broker.dispatcher.consumers(entity.path)),
            )
        )
    return EmulatorView(
        tuple(entities), len(endpoints), sum(endpoint.client.links for endpoint in endpoints)
    )


# -- one readable line per frame, for ``aztask emulator --trace`` --------------------------
#
# Secrets are never shown: of a message's body only the length is, and tokens travel in bodies.


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


# Output that may stay unread: the newest text is written, and the caller never waits for it.


class LatestWriter:
    """Writes texts to a descriptor in a thread of its own.

    A pipe that is full and a terminal that is stopped (Ctrl-S) block that thread alone. A text that
    still waits when the next one comes is dropped. When the reader has gone, nothing is written.
    """

    def __init__(self, descriptor: int) -> None:
        """`descriptor`: stays open. The thread starts with the first text."""
        self._descriptor = descriptor
        self._changed = threading.Condition()
        self._text: str | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="aztask-output", daemon=True)

    def write(self, text: str) -> None:
        """Write `text` as soon as the text before it is written; returns at once."""
        with self._changed:
            self._text = text
            self._changed.notify()
        if not self._thread.ident:
            self._thread.start()

    def close(self, seconds: float = 1.0) -> None:
        """Wait until the last text is written, for `seconds` at most."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread.ident:
            self._thread.join(seconds)

    def _run(self) -> None:
        while (text := self._next()) is not None:
            data = memoryview(text.encode("utf-8", "replace"))
            try:
                while data:
                    # not through sys.stdout: its lock would be held when the interpreter ends
                    data = data[os.write(self._descriptor, data) :]
            except OSError:  # the reader has gone
                return

    def _next(self) -> str | None:
        with self._changed:
            self._changed.wait_for(lambda: self._text is not None or self._closed)
            text, self._text = self._text, None
            return text
