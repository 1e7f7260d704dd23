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
    """The checked options of one connection.

    * `broker`: a URL or connection string, a function that returns a Broker, or a Broker.
    * `lease`: seconds for which each message is held, and renewed until it is acknowledged.
    * `declare`: True if missing queues are created.
    * `accept`: content types that consumers receive.
    * `limits`: of the bodies that are decoded.
    """

    broker: Any
    lease: float = LEASE_SECONDS
    declare: bool = True
    accept: frozenset[str] = frozenset()
    limits: MessageLimits = field(default_factory=MessageLimits)

    @classmethod
    def read(cls, options: Mapping[str, Any]) -> Self:
        """Check the options. Raises ConfigurationError.

        Kombu adds options of its own, so unknown ones are ignored.
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
        """(the broker that the options name, a function that closes it). Raises ConfigurationError.

        The function does nothing for a Broker object, which its owner closes.
        """
        given = self.broker
        if isinstance(given, str):
            connections = Connections(given, None)
            return connections.broker(), connections.close
        broker: Any = given() if callable(given) else given
        if not isinstance(broker, Broker):
            raise ConfigurationError(
                "the transport option broker is missing or not a broker; write"
                ' Connection("aztask://", transport_options={"broker": "local://"})'
            )
        return broker, nothing if broker is given else broker.close


def nothing(*_: object) -> None:
    """Does nothing, as the default of a callback."""


def _accepted(names: object) -> frozenset[str]:
    """Content types, given as such or by the names of Kombu's serializers."""
    given = [names] if isinstance(names, str) else names
    if not isinstance(given, list | tuple | set | frozenset):
        raise ConfigurationError("the transport option accept must be a list of content types")
    types = {*CONTENT_TYPES.values(), *_PLAIN}
    for name in given:
        if not isinstance(name, str) or name in _NEVER:
            raise ConfigurationError(f"{name!r} is never accepted: reading it can run code")
        types.add(CONTENT_TYPES.get(name, name))
    return frozenset(types)
