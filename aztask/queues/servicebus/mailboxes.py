"""Mailboxes on Service Bus: one topic, with a subscription for each mailbox.

Rules
1. Publishing is one request for any number of listeners, and needs only the permission to send.
   Opening a mailbox needs the permission to manage, and the Standard or Premium tier: Basic has no
   topics.
2. The service deletes a subscription that is idle for `IDLE`, its shortest time. A receiver that
   waits for messages keeps the subscription.
3. A subscription filters by exchange, and by key for a direct exchange. The listener compares the
   pattern of a topic exchange itself.
4. Notes that are kept are messages of a queue that is only peeked at: a note is one request more,
   and reading them is one for each 250, and one that finds no more. The first process that keeps
   or reads them creates the queue, which needs the permission to manage.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from hashlib import sha256
from typing import Any, Final

from azure.core.exceptions import ResourceExistsError, ResourceNotFoundError
from azure.servicebus.management import CorrelationRuleFilter

from aztask.errors import QueueNotFound
from aztask.message.envelope import Envelope
from aztask.queues.base import (
    EXCHANGE,
    KEPT_SECONDS,
    MESSAGE_SECONDS,
    MOST_KEPT,
    ROUTING_KEY,
    Binding,
    Receiver,
    queue_name,
)
from aztask.queues.servicebus.admin import Administration
from aztask.queues.servicebus.errors import SDK_ERRORS
from aztask.queues.servicebus.inspection import PAGE, Peeking

TOPIC: Final = "aztask-mailboxes"
LOCK: Final = timedelta(seconds=60)
IDLE: Final = timedelta(minutes=5)
LIFETIME: Final = 900.0
MISSING_SECONDS: Final = 10.0
"""Pause before a missing topic is tried again: no process has opened a mailbox so far."""

NOTES: Final = 500
"""Notes of one message: with 400 characters each, as much as the Standard tier takes."""


class BusMailboxes:
    """The mailboxes of one namespace.

    * `send`: sends envelopes to an entity.
    * `receiver`: opens a receiver of an entity, with a lease and with deleting at receipt or not.
    * `peeking`: peeks at queues.
    """

    def __init__(
        self,
        admin: Administration,
        send: Callable[[str, Sequence[Envelope]], None],
        receiver: Callable[[str, float, bool], Receiver],
        peeking: Peeking,
    ) -> None:
        self._admin = admin
        self._send = send
        self._receiver = receiver
        self._peeking = peeking
        self._known: dict[str, frozenset[Binding]] = {}
        self._missing_until = 0.0

    @property
    def lifetime(self) -> float:
        """Seconds: a third of it is how often a mailbox is looked after (the service keeps it)."""
        return LIFETIME

    @property
    def lag(self) -> float:
        """The service pushes messages into mailboxes as into queues."""
        return 0.0

    def open(self, name: str, bindings: Sequence[Binding]) -> None:
        """Create the mailbox or keep it, with exactly these bindings."""
        wanted, subscription = frozenset(bindings), _subscription(name)
        times = {"default_message_time_to_live": timedelta(seconds=MESSAGE_SECONDS)}
        self._create("create_topic", TOPIC, **times)
        created = self._create(
            "create_subscription",
            TOPIC,
            subscription,
            lock_duration=LOCK,
            auto_delete_on_idle=IDLE,
            user_metadata=name[:1024],
            **times,
        )
        if created or self._known.get(name) != wanted:
            self._set_rules(subscription, wanted)
            self._known[name] = wanted
        self._missing_until = 0.0

    def _set_rules(self, subscription: str, bindings: frozenset[Binding]) -> None:
        """Create the rules first, so that no message is missed, then delete the others."""
        rules = {_rule(binding): _filter(binding) for binding in bindings}
        for name, condition in rules.items():
            self._create("create_rule", TOPIC, subscription, name, filter=condition)
        try:
            client = self._admin.client()
            for rule in list(client.list_rules(TOPIC, subscription)):
                if rule.name not in rules:
                    client.delete_rule(TOPIC, subscription, rule.name)
        except ResourceNotFoundError:
            return  # another process has just deleted the rule, or the whole subscription
        except SDK_ERRORS as error:
            raise self._admin.error(error, TOPIC) from None

    def _create(self, call: str, *names: str, **options: Any) -> bool:
        """Create something; returns False if it exists."""
        try:
            getattr(self._admin.client(), call)(*names, **options)
        except ResourceExistsError:
            return False
        except SDK_ERRORS as error:
            raise self._admin.error(error, TOPIC) from None
        return True

    def receiver(self, name: str, *, delete: bool) -> Receiver:
        """A receiver of the mailbox."""
        entity = f"{TOPIC}/Subscriptions/{_subscription(name)}"
        return self._receiver(entity, LOCK.total_seconds(), delete)

    def publish(self, exchange: str, key: str, envelope: Envelope, *, recent: bool = False) -> bool:
        """Send one message to the topic; False if there is no topic, and so no mailbox."""
        if time.monotonic() < self._missing_until:
            return False
        try:
            self._send(TOPIC, [envelope])
        except QueueNotFound:
            self._missing_until = time.monotonic() + MISSING_SECONDS
            return False
        return True

    def delete(self, name: str) -> None:
        """Remove the mailbox with its messages; nothing happens if there is none."""
        self._known.pop(name, None)
        try:
            self._admin.client().delete_subscription(TOPIC, _subscription(name))
        except ResourceNotFoundError:
            return
        except SDK_ERRORS as error:
            raise self._admin.error(error, TOPIC) from None

    def keep(self, exchange: str, notes: Sequence[str]) -> None:
        """Keep notes for mailboxes that are opened later."""
        queue = _notes_of(exchange)
        parts = [notes[start : start + NOTES] for start in range(0, len(notes), NOTES)]
        envelopes = [Envelope(json.dumps(part).encode("ascii")) for part in parts]
        try:
            self._send(queue, envelopes)
        except QueueNotFound:
            self._create_notes(queue)
            self._send(queue, envelopes)

    def kept(self, exchange: str) -> list[str]:
        """The notes of the exchange."""
        queue, found = _notes_of(exchange), dict[str, None]()
        try:
            page = self._peeking.page(queue, limit=PAGE)
            while page and len(found) < MOST_KEPT:
                for each in page:
                    found.update(dict.fromkeys(_notes(each.envelope.body)))
                page = self._peeking.page(queue, after=page[-1].position, limit=PAGE)
        except QueueNotFound:
            self._create_notes(queue)
        return list(found)

    def _create_notes(self, queue: str) -> None:
        kept = timedelta(seconds=KEPT_SECONDS)
        self._create("create_queue", queue, default_message_time_to_live=kept)


def _notes_of(exchange: str) -> str:
    return queue_name(f"notes {exchange}")


def _notes(body: bytes) -> list[str]:
    """The notes in a message; none if it is damaged."""
    try:
        found = json.loads(body)
    except ValueError:
        return []
    return [each for each in found if isinstance(each, str)] if isinstance(found, list) else []


def _subscription(name: str) -> str:
    """A subscription's name has at most 50 characters, of few kinds."""
    return sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _rule(binding: Binding) -> str:
    text = "\n".join((binding.kind, binding.exchange, binding.key))
    return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _filter(binding: Binding) -> CorrelationRuleFilter:
    properties: dict[str, Any] = {EXCHANGE: binding.exchange}
    if binding.kind == "direct":
        properties[ROUTING_KEY] = binding.key
    return CorrelationRuleFilter(properties=properties)
