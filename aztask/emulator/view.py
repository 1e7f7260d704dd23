"""The state of an emulator: entities with their counts, and connections, as data and as text."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from aztask.emulator.emulator import Emulator
from aztask.errors import QueueNotFound

_HEADINGS = ("ENTITY", "ACTIVE", "LOCKED", "SCHEDULED", "DEFERRED", "DEAD", "RECEIVERS")


@dataclass(frozen=True, slots=True)
class EntityView:
    """One entity with the counts of its messages and receivers."""

    name: str
    kind: str
    active: int
    locked: int
    scheduled: int
    deferred: int
    dead: int
    receivers: int


@dataclass(frozen=True, slots=True)
class View:
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
    return (entity.name, *(str(count) for count in counts), str(entity.receivers))


def take_view(emulator: Emulator) -> View:
    """Return the current state of an emulator."""
    broker = emulator.broker
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
                len(broker.dispatcher.consumers(entity.path)),
            )
        )
    endpoints = emulator.server.endpoints
    return View(
        tuple(entities), len(endpoints), sum(endpoint.client.links for endpoint in endpoints)
    )
