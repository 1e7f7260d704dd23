"""Forwarding: topics to their subscriptions, queues to queues, dead letters to queues.

Rules
1. A message is moved in one transaction: it is in the old place or in the new one, never in both.
2. A message is forwarded at most `MAX_HOPS` times (the service's limit), then dead-lettered.
3. If the target was deleted or accepts no messages, they stay in the source until it does.
"""

from __future__ import annotations

from dataclasses import dataclass

from aztask.emulator.amqp import sections
from aztask.emulator.amqp.sections import Sections
from aztask.emulator.broker import stored
from aztask.emulator.broker.entities import Entity, Kind
from aztask.emulator.broker.namespace import Namespace
from aztask.engine import Engine, Leased, NewMessage
from aztask.support.clock import Clock

MAX_HOPS = 4
BATCH = 100
BATCHES_PER_RUN = 10
CHECK_EVERY = 0.1  # seconds between two checks for new dead letters
_LEASE_SECONDS = 60.0
HOPS_EXCEEDED = "MaxTransferHopCountExceeded"


@dataclass(frozen=True, slots=True, eq=False)
class _Route:
    """An entity whose messages are forwarded, or whose dead letters are (`dead`)."""

    source: Entity
    dead: bool


class Forwarder:
    """Moves messages along the routes of the namespace."""

    def __init__(self, engine: Engine, namespace: Namespace, clock: Clock) -> None:
        self._engine = engine
        self._namespace = namespace
        self._clock = clock
        self._revision = -1
        self._routes: list[_Route] = []
        self.pending = False
        self._quiet_until: dict[_Route, float] = {}

    def queues_changed(self) -> None:
        """Check all routes in the next flush: messages were sent or given back."""
        if self.routes:
            self.pending = True
            self._quiet_until.clear()

    def due(self) -> bool:
        """Return whether there are messages to move; a schedule or an expiry may fall due."""
        now = self._clock.monotonic()
        for route in self.routes:
            if self.pending:
                break
            if self._quiet_until.get(route, 0.0) <= now:
                self._check_due(route, now)
        return self.pending

    def _check_due(self, route: _Route, now: float) -> None:
        path, dead = route.source.path, route.dead
        if dead:
            self._engine.peek(path, 0, 0)  # makes the engine dead-letter expired messages
        wait = self._engine.pending(path, dead_letter=dead)
        if wait <= 0 and self._targets(route) is not None:
            self.pending = True
        else:
            self._quiet_until[route] = now + (CHECK_EVERY if dead else max(wait, CHECK_EVERY))

    @property
    def routes(self) -> list[_Route]:
        """The routes of the namespace's current entities."""
        if self._revision != self._namespace.revision:
            self._revision = self._namespace.revision
            self._routes = []
            for entity in self._namespace.all():
                if entity.kind is Kind.TOPIC or entity.forward_to:
                    self._routes.append(_Route(entity, False))
                if entity.forward_dead_letters_to:
                    self._routes.append(_Route(entity, True))
        return self._routes

    def run(self) -> set[str]:
        """Move messages along all routes; return the names of the queues that got some.

        A message may pass several queues in one call.
        """
        if not self.pending:
            return set()
        self.pending = False
        reached: set[str] = set()
        for _ in range(MAX_HOPS + 1):
            moved = set()
            for route in self.routes:
                moved |= self._move(route)
            reached |= moved
            if not moved:
                break
        return reached

    def _move(self, route: _Route) -> set[str]:
        source = route.source
        reached: set[str] = set()
        if source.sessions and not route.dead:
            return reached  # a queue with sessions cannot forward
        targets = self._targets(route)
        if targets is None:
            return reached
        for _ in range(BATCHES_PER_RUN):
            messages = self._engine.receive(
                source.path, BATCH, _LEASE_SECONDS, dead_letter=route.dead
            )
            for message in messages:
                reached |= self._forward(route, targets, message)
            if len(messages) < BATCH:
                break
        else:
            self.pending = True
        return reached

    def _targets(self, route: _Route) -> list[Entity] | None:
        """Return the targets of a route, or None if its messages must wait (rule 3)."""
        source = route.source
        if source.kind is Kind.TOPIC and not route.dead:
            return self._namespace.subscriptions(source)
        path = source.forward_dead_letters_to if route.dead else source.forward_to
        target = self._namespace.find(path)
        return [target] if target is not None and target.status.sends else None

    def _forward(self, route: _Route, targets: list[Entity], message: Leased) -> set[str]:
        source, lease = route.source, [(message.seq, message.token)]
        copy = stored.unpack(message.payload)
        fan_out = source.kind is Kind.TOPIC and not route.dead
        if copy.hops >= MAX_HOPS and not fan_out:
            text = f"forwarded {MAX_HOPS} times; the last queue was {source.path}"
            if not route.dead:
                self._engine.dead_letter(source.path, lease, HOPS_EXCEEDED, text)
            return set()
        if fan_out:
            cut = sections.cut(copy.bare)
            targets = [target for target in targets if _takes(target, cut)]
            payload = message.payload
        else:
            copy = copy.forwarded(source.path if route.dead else None)
            if route.dead:
                dead = (message.reason or "", message.description or "")
                copy = stored.with_reasons(copy, *dead)
            payload = copy.pack()
        for target in targets:
            self._store(target, message, payload, expiring=not route.dead)
        self._engine.complete(source.path, lease, dead_letter=route.dead)
        return {target.path for target in targets}

    def _store(self, target: Entity, message: Leased, payload: bytes, *, expiring: bool) -> None:
        if target.sessions and message.session is None:
            return
        expires = message.expires_at if expiring else None
        new = NewMessage(payload, message.message_id, message.session, None, expires)
        self._engine.send(target.path, [new])


def _takes(subscription: Entity, message: Sections) -> bool:
    """Return whether the subscription accepts messages and one of its rules matches."""
    return subscription.status.sends and any(
        rule.filter.matches(message) for rule in subscription.rules
    )
