"""The options of the Kombu transport: read once per connection, checked, frozen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self

from aztask.brokers.base import Broker
from aztask.codec import CONTENT_TYPES
from aztask.durations import to_seconds
from aztask.errors import ConfigurationError
from aztask.limits import Limits

LEASE_SECONDS: Final = 60.0

_NEVER = frozenset({"application/x-python-serialize", "application/x-yaml", "pickle", "yaml"})
_PLAIN = frozenset({"application/data", "text/plain"})


@dataclass(frozen=True, slots=True)
class TransportOptions:
    """broker: a Broker, a function that returns one, or a text for the function that opens them.

    lease: seconds that each message is held for, again and again until it is acknowledged.
    declare: whether queues are created where they are missing. accept: content types that
    consumers get to see. limits: of what is decoded.
    """

    broker: Any
    lease: float = LEASE_SECONDS
    declare: bool = True
    accept: frozenset[str] = frozenset()
    limits: Limits = field(default_factory=Limits)

    @classmethod
    def read(cls, options: Mapping[str, Any]) -> Self:
        """Kombu puts options of its own among them, so unknown ones are left alone.

        Raises ConfigurationError.
        """
        limits = options.get("limits", Limits())
        if not isinstance(limits, Limits):
            raise ConfigurationError("the transport option limits must be an aztask.limits.Limits")
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

    def open(self, open_broker: Callable[[str], Broker] | None) -> Broker:
        """The broker that the options name. Raises ConfigurationError."""
        given = self.broker
        if isinstance(given, str):
            if open_broker is None:
                raise ConfigurationError(
                    "the transport option broker is a text, and nothing here opens it; call"
                    " aztask.transport.register(open_broker=...) first, or give a broker"
                )
            return open_broker(given)
        broker: Broker = given() if callable(given) else given
        if not hasattr(broker, "receiver"):
            raise ConfigurationError(
                "the transport option broker is missing or is no broker; write"
                ' Connection("aztask://", transport_options={"broker": broker})'
            )
        return broker


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
