"""The options of the Kombu transport: read once per connection, checked, frozen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self

from aztask.brokers.base import Broker
from aztask.connections import Connections
from aztask.errors import ConfigurationError
from aztask.message.bounds import MessageLimits
from aztask.message.codec import CONTENT_TYPES
from aztask.support.durations import to_seconds

LEASE_SECONDS: Final = 60.0

_NEVER = frozenset({"application/x-python-serialize", "application/x-yaml", "pickle", "yaml"})
_PLAIN = frozenset({"application/data", "text/plain"})


@dataclass(frozen=True, slots=True)
class TransportOptions:
    """broker: a URL or connection string, a function that returns a Broker, or a Broker.

    lease: seconds that each message is held for, again and again until it is acknowledged.
    declare: whether queues are created where they are missing. accept: content types that
    consumers get to see. limits: of what is decoded.
    """

    broker: Any
    lease: float = LEASE_SECONDS
    declare: bool = True
    accept: frozenset[str] = frozenset()
    limits: MessageLimits = field(default_factory=MessageLimits)

    @classmethod
    def read(cls, options: Mapping[str, Any]) -> Self:
        """Kombu puts options of its own among them, so unknown ones are left alone.

        Raises ConfigurationError.
        """
        limits = options.get("limits", MessageLimits())
        if not isinstance(limits, MessageLimits):
            raise ConfigurationError(
                "the transport option limits must be an aztask.message.bounds.MessageLimits"
            )
        declare = options.get("declare", True)
        if not isinstance(declare, bool):
            raise ConfigurationError(
                f"the transport option declare must be a bool, not {declare!r}"
            )
        return cls(
            broker=options.get("broker"),
            lease=to_seconds(options.get("lease", LEASE_SECONDS), "lease", minimum=0.1),
            declare=declare,
            accept=_accepted(options.get("accept", ())),
            limits=limits,
        )

    def open(self) -> tuple[Broker, Callable[[], None]]:
        """(the broker that the options name, what closes it). Raises ConfigurationError.

        A broker that was given as such is its owner's to close.
        """
        given = self.broker
        if isinstance(given, str):
            connections = Connections(given, None)
            return connections.broker(), connections.close
        broker: Any = given() if callable(given) else given
        if not isinstance(broker, Broker):
            raise ConfigurationError(
                "the transport option broker is missing or is no broker; write"
                ' Connection("aztask://", transport_options={"broker": "local://"})'
            )
        return broker, nothing if broker is given else broker.close


def nothing(*_: object) -> None:
    """What is called where there is nothing to do."""


def _accepted(names: object) -> frozenset[str]:
    """Content types, given as such or by the names of Kombu's serializers."""
    given = [names] if isinstance(names, str) else names
    if not isinstance(given, list | tuple | set | frozenset):
        raise ConfigurationError("the transport option accept must be a list of content types")
    types = {*CONTENT_TYPES.values(), *_PLAIN}
    for name in given:
        if not isinstance(name, str) or name in _NEVER:
            raise ConfigurationError(f"{name!r} is never accepted: to read it may run code")
        types.add(CONTENT_TYPES.get(name, name))
    return frozenset(types)
