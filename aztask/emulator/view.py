"""What there is to see: entities with their counts, connections, and the whole in lines of text."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from aztask.emulator.emulator import Emulator
from aztask.errors import QueueNotFound

_HEADINGS = ("ENTITY", "ACTIVE", "LOCKED", "SCHEDULED", "DEFERRED", "DEAD", "RECEIVERS")


@dataclass(frozen=True, slots=True)
class EntityView:
    """One entity's counts."""

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
    """The emulator at one moment. links: of all connections."""

    entities: tuple[EntityView, ...]
    connections: int
    links: int

    def record(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "event": "stats",
            "connections": self.connections,
            "links": self.links,
            "entities": [asdict(entity) for entity in self.entities],
        }

    def lines(self, height: int) -> list[str]:
        """A table of at most `height` lines; what does not fit is counted in the last one."""
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
    """The emulator's state now."""
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
