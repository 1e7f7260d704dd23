"""The namespace: all entities, stored with their messages in the engine's file.

Rules
1. Every queue, topic and subscription has one engine queue of the same path. That of a topic holds
   its scheduled messages and those on their way to the subscriptions.
2. The entity table and the engine's queues change in one transaction.
3. The transfer dead letters of an entity are the dead letters of another engine queue, `transfer`
   of its path. It is made when it is needed, so that older files need no change.
4. Each engine queue counts its messages from 1, without gaps, as the service does: that of a
   subscription too. A queue in the file of an earlier release keeps its numbers, which have gaps.
5. A queue with sessions cannot forward, as on the service: nothing could take its messages.
"""

from __future__ import annotations

from dataclasses import replace

from aztask.emulator.broker.entities import (
    SUBSCRIPTIONS,
    Entity,
    EntityKind,
    SubscriptionRule,
    Tier,
    check,
    check_rule,
    from_json,
    to_json,
    with_default_rule,
)
from aztask.errors import ConfigurationError, QueueNotFound
from aztask.queues.engine import Database, Engine, StoredSettings
from aztask.support.clock import Clock

# -- The time at which the state of each session was last set.
#
# Clients list the sessions whose state changed since a time. The engine stores the states without
# their times.

_TIME_STEPS = [
    "CREATE TABLE emulator_session_times (queue TEXT NOT NULL, session TEXT NOT NULL,"
    " updated REAL NOT NULL, PRIMARY KEY (queue, session)) WITHOUT ROWID",
]


class SessionTimes:
    """Stores the times, in UTC epoch seconds, by queue path and session."""

    def __init__(self, database: Database) -> None:
        self._database = database
        database.migrate("emulator-session-times", _TIME_STEPS)

    def note(self, queue: str, session: str, at: float) -> None:
        """Remember that the state of a session was set at this time."""
        with self._database.statement() as connection:
            connection.execute(
                "REPLACE INTO emulator_session_times VALUES (?, ?, ?)", (queue, session, at)
            )

    def forget(self, queue: str, session: str | None = None) -> None:
        """Forget a session whose state was deleted, or all sessions of a deleted queue."""
        with self._database.statement() as connection:
            connection.execute(
                "DELETE FROM emulator_session_times"
                " WHERE queue = ? AND session = ifnull(?, session)",
                (queue, session),
            )

    def until(self, queue: str, at: float) -> set[str]:
        """Return the sessions of a queue whose state was last set at this time or before."""
        with self._database.read() as connection:
            rows = connection.execute(
                "SELECT session FROM emulator_session_times WHERE queue = ? AND updated <= ?",
                (queue, at),
            ).fetchall()
        return {session for (session,) in rows}


_STEPS = [
    "CREATE TABLE emulator_entities (key TEXT PRIMARY KEY, document TEXT NOT NULL) WITHOUT ROWID",
]
_MAX_RULES = 2000
_TRANSFER = "/$Transfer"


class EntityExists(ConfigurationError):
    """An entity or a rule of that name exists already."""


class Namespace:
    """Creates, finds, changes and deletes entities.

    revision: rises with every change, so that others can notice one.
    """

    def __init__(
        self, database: Database, engine: Engine, clock: Clock, tier: Tier | None = None
    ) -> None:
        """`tier`: its limits hold for what is created and updated from now on."""
        self.tier = tier
        self.database = database
        self.engine = engine
        self.clock = clock
        self.revision = 0
        self._used: dict[str, float] = {}
        self.session_times = SessionTimes(database)
        engine.adopt()
        database.migrate("emulator", _STEPS)
        with database.read() as connection:
            rows = connection.execute("SELECT document FROM emulator_entities").fetchall()
        entities = [from_json(document) for (document,) in rows]
        self._entities: dict[str, Entity] = {entity.key: entity for entity in entities}

    def find(self, path: str) -> Entity | None:
        """Return the entity at `path`, or None if there is none."""
        return self._entities.get(path.lower())

    def get(self, path: str) -> Entity:
        """Return the entity at `path`. Raises QueueNotFound."""
        entity = self.find(path)
        if entity is None:
            raise QueueNotFound(
                f"the messaging entity {path[:300]!r} could not be found; create it"
            )
        return entity

    def all(self, kind: EntityKind | None = None) -> list[Entity]:
        """Return all entities, or those of one kind, sorted by path."""
        entities = sorted(self._entities.values(), key=lambda entity: entity.key)
        return [entity for entity in entities if kind is None or entity.kind is kind]

    def subscriptions(self, topic: Entity) -> list[Entity]:
        """Return the subscriptions of a topic, sorted by path."""
        prefix = topic.key + SUBSCRIPTIONS.lower()
        return [entity for entity in self.all() if entity.key.startswith(prefix)]

    def partitioned(self, entity: Entity) -> bool:
        """Whether an entity has partitions; a subscription has those of its topic."""
        if entity.kind is EntityKind.SUBSCRIPTION:
            return self.get(entity.topic).partitioned
        return entity.partitioned

    def transfer(self, entity: Entity) -> Entity:
        """Return the place of an entity's transfer dead letters; it is made at the first use.

        It looks like a queue of its own, without sessions, time to live or forwarding.
        """
        place = Entity(
            entity.path + _TRANSFER,
            lock_seconds=entity.lock_seconds,
            max_message_bytes=entity.max_message_bytes,
        )
        settings = _settings(place)
        made = self.engine.create_queue(place.path, settings, numbered=True)
        if not made and self.engine.queue(place.path) != settings:
            self.engine.update_queue(place.path, settings)
        return place

    def transfer_dead(self, entity: Entity) -> int:
        """Return the number of an entity's transfer dead letters."""
        try:
            return self.engine.stats(entity.path + _TRANSFER).dead
        except QueueNotFound:
            return 0  # none was ever made (rule 3)

    def create(self, entity: Entity) -> Entity:
        """Store a new entity. Raises EntityExists, QueueNotFound, ConfigurationError."""
        now = self.clock.wall()
        entity = with_default_rule(check(replace(entity, created=now, updated=now), self.tier))
        if entity.key in self._entities:
            raise EntityExists(f"the messaging entity {entity.path!r} exists already")
        if (
            entity.kind is EntityKind.SUBSCRIPTION
            and self.get(entity.topic).kind is not EntityKind.TOPIC
        ):
            raise ConfigurationError(f"{entity.topic!r} is not a topic")
        self._check_targets(entity)
        with self.database.transaction():
            self.engine.create_queue(entity.path, _settings(entity), numbered=True)
            self._write(entity)
        return self._remember(entity)

    def update(self, entity: Entity) -> Entity:
        """Change an entity's settings. Raises QueueNotFound, ConfigurationError."""
        current = self.get(entity.path)
        for name in ("sessions", "kind"):
            if getattr(current, name) != getattr(entity, name):
                raise ConfigurationError(f"{entity.path}: {name} cannot be changed; create it anew")
        if bool(current.duplicate_window) != bool(entity.duplicate_window):
            raise ConfigurationError(
                f"{entity.path}: duplicate detection cannot be switched; create it anew"
            )
        entity = replace(
            entity, path=current.path, created=current.created, updated=self.clock.wall()
        )
        entity = check(entity, self.tier)
        self._check_targets(entity)
        with self.database.transaction():
            if _settings(entity) != _settings(current):
                self.engine.update_queue(entity.path, _settings(entity))
            self._write(entity)
        return self._remember(entity)

    def delete(self, path: str) -> list[Entity]:
        """Delete an entity with its messages, and a topic's subscriptions; return all of them."""
        entity = self.get(path)
        deleted = [entity]
        if entity.kind is EntityKind.TOPIC:
            deleted += self.subscriptions(entity)
        with self.database.transaction() as connection:
            queues = set(self.engine.queues())
            for each in deleted:
                self.engine.delete_queue(each.path)
                if each.path + _TRANSFER in queues:
                    self.engine.delete_queue(each.path + _TRANSFER)
                self.session_times.forget(each.path)
                connection.execute("DELETE FROM emulator_entities WHERE key = ?", (each.key,))
        for each in deleted:
            del self._entities[each.key]
            self._used.pop(each.key, None)
        self.revision += 1
        return deleted

    def ensure(self, entity: Entity) -> Entity:
        """Create the entity, or update an existing one to these settings."""
        if self.find(entity.path) is None:
            return self.create(entity)
        return self.update(entity)

    # -- auto-delete on idle

    def note_use(self, path: str) -> None:
        """Note that an entity is used now, if it is deleted when it is idle; its topic, too.

        A topic that is deleted takes its subscriptions with it, and their receivers.
        """
        for each in {path.lower(), path.lower().split(SUBSCRIPTIONS.lower())[0]}:
            entity = self.find(each)
            if entity is not None and entity.auto_delete is not None:
                self._used[entity.key] = self.clock.monotonic()

    def idle(self) -> list[str]:
        """Return the entities that have been idle for too long; a first look begins the time.

        One with scheduled messages is not idle, as on the service.
        """
        now = self.clock.monotonic()
        found = []
        for key, entity in self._entities.items():
            if entity.auto_delete is None:
                continue
            if now - self._used.setdefault(key, now) < entity.auto_delete:
                continue
            if self.engine.stats(entity.path).scheduled:
                self._used[key] = now
            else:
                found.append(entity.path)
        return found

    # -- rules of a subscription

    def add_rule(self, path: str, rule: SubscriptionRule) -> Entity:
        """Add a rule to a subscription. Raises EntityExists, QueueNotFound, ConfigurationError."""
        entity = self.get(path)
        if any(known.name.lower() == rule.name.lower() for known in entity.rules):
            raise EntityExists(f"the rule {rule.name!r} exists already in {entity.path!r}")
        check_rule(rule)
        if len(entity.rules) >= _MAX_RULES:
            raise ConfigurationError(f"a subscription has at most {_MAX_RULES} rules")
        stamped = replace(rule, created=self.clock.wall())
        return self._with_rules(entity, (*entity.rules, stamped))

    def replace_rule(self, path: str, rule: SubscriptionRule) -> Entity:
        """Replace a rule; it keeps its position and creation time. Raises QueueNotFound."""
        entity = self.get(path)
        known = self._rule(entity, rule.name)
        changed = replace(rule, name=known.name, created=known.created)
        rules = tuple(changed if each is known else each for each in entity.rules)
        return self._with_rules(entity, rules)

    def remove_rule(self, path: str, name: str) -> Entity:
        """Remove a rule. Raises QueueNotFound if it does not exist."""
        entity = self.get(path)
        removed = self._rule(entity, name)
        return self._with_rules(entity, tuple(rule for rule in entity.rules if rule is not removed))

    @staticmethod
    def _rule(entity: Entity, name: str) -> SubscriptionRule:
        for rule in entity.rules:
            if rule.name.lower() == name.lower():
                return rule
        raise QueueNotFound(f"the rule {name[:100]!r} could not be found in {entity.path!r}")

    def _with_rules(self, entity: Entity, rules: tuple[SubscriptionRule, ...]) -> Entity:
        entity = replace(entity, rules=rules, updated=self.clock.wall())
        with self.database.transaction():
            self._write(entity)
        return self._remember(entity)

    # -- inside

    def _check_targets(self, entity: Entity) -> None:
        if entity.sessions and entity.forward_to:
            raise ConfigurationError(
                f"{entity.path!r} requires sessions, so it cannot forward; forward to"
                " it, or create it without sessions"
            )
        for target in (entity.forward_to, entity.forward_dead_letters_to):
            if target and self.get(target).kind is EntityKind.SUBSCRIPTION:
                raise ConfigurationError(f"{target!r} is a subscription; forward to its topic")

    def _write(self, entity: Entity) -> None:
        with self.database.statement() as connection:
            connection.execute(
                "REPLACE INTO emulator_entities VALUES (?, ?)", (entity.key, to_json(entity))
            )

    def _remember(self, entity: Entity) -> Entity:
        self._entities[entity.key] = entity
        self.note_use(entity.path)
        self.revision += 1
        return entity


def _settings(entity: Entity) -> StoredSettings:
    """Return the engine's settings for an entity.

    A topic never has sessions: its messages only pass through, and its subscriptions decide.
    """
    topic = entity.kind is EntityKind.TOPIC
    return StoredSettings(
        lease_seconds=entity.lock_seconds,
        max_deliveries=entity.max_deliveries,
        duplicate_window=entity.duplicate_window,
        time_to_live=entity.time_to_live,
        dead_letter_expired=entity.dead_letter_expired,
        sessions=entity.sessions and not topic,
    )
