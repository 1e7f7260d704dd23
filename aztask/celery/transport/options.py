"""The options of the Kombu transport: read once per connection, checked, frozen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self

from aztask.address.priorities import MOST_PRIORITIES, check_priorities, priority_queue
from aztask.config import mask, read_environment
from aztask.errors import ConfigurationError
from aztask.message.bounds import MessageLimits
from aztask.message.foreign import CONTENT_TYPES
from aztask.queues.base import Broker
from aztask.queues.kinds import kind_named
from aztask.stores.connections import Connections
from aztask.support.durations import to_seconds

SHORTEST_LEASE: Final = 0.1
LEVELS: Final = 10
"""The numbers that Celery's `priority` takes: 0 to 9."""
ORDERS: Final = ("rabbitmq", "redis")

_DANGEROUS = frozenset({"application/x-python-serialize", "application/x-yaml", "pickle", "yaml"})


@dataclass(frozen=True, slots=True)
class TransportOptions:
    """The checked options of one connection.

    * `broker`: a URL or connection string, a function that returns a Broker, or a Broker.
    * `lease`: seconds for which each message is held, and renewed until it is acknowledged. None:
      the queue's own lock on Service Bus, else the service's default (60 s; Storage queues 300 s).
    * `leases`: the lease of single queues, by name.
    * `sessions`: the queues that have sessions, by name. Needed only where the transport may not
      read the queue's settings, and to create such a queue.
    * `declare`: True if missing queues are created, with the lease and sessions given here.
    * `remote_control`: True if workers can be controlled and events are sent to all who listen.
    * `priorities`: weights by name, the most urgent first, such as ``{"high": 4, "low": 1}``: each
      queue has a queue for each of them, and ten levels of `priority` are spread over these.
    * `order`: which level is the most urgent: 9 with "rabbitmq", 0 with "redis".
    * `translate_names`: True if a queue name that the service does not allow is translated into one
      that it allows; see `aztask.celery.transport.names`. False: such a name is refused.
    * `accept`: content types that consumers receive in addition to those that they accept.
    * `limits`: of the bodies that are decoded.
    """

    broker: Any
    lease: float | None = None
    leases: Mapping[str, float] = field(default_factory=dict)
    sessions: frozenset[str] = frozenset()
    declare: bool = True
    remote_control: bool = True
    priorities: Mapping[str, int] = field(default_factory=dict)
    order: str = ""
    translate_names: bool = False
    accept: frozenset[str] = frozenset()
    limits: MessageLimits = field(default_factory=MessageLimits)

    @classmethod
    def read(cls, options: Mapping[str, Any], broker: Any = None) -> Self:
        """Check the options. Raises ConfigurationError.

        * `broker`: what names the broker if the options do not.

        Kombu adds options of its own, so unknown ones are ignored.
        """
        limits = options.get("limits", MessageLimits())
        if not isinstance(limits, MessageLimits):
            raise ConfigurationError(
                "the transport option limits must be an aztask.message.bounds.MessageLimits"
            )
        given = options.get("broker")
        lease = options.get("lease")
        priorities, order = _priorities(options)
        return cls(
            broker=broker if given is None else given,
            lease=None if lease is None else _lease(lease, "lease"),
            leases=_leases(options.get("leases", {})),
            sessions=_names(options.get("sessions", ()), "sessions"),
            declare=_flag(options, "declare", default=True),
            remote_control=_flag(options, "remote_control", default=True),
            priorities=priorities,
            order=order,
            translate_names=_flag(options, "translate_names", default=False),
            accept=_accepted(options.get("accept", ())),
            limits=limits,
        )

    def queues_of(self, address: str) -> list[tuple[str, int]]:
        """The queues of one queue, the most urgent first, with the weights of their consumers."""
        return [
            (priority_queue(address, name), weight) for name, weight in self.priorities.items()
        ] or [(address, 1)]

    def queue_for(self, address: str, level: Any) -> str:
        """The queue for a task of this `priority`, 0 to 9; a task without one has 0."""
        if not self.priorities:
            return address
        known = min(LEVELS - 1, max(0, level)) if isinstance(level, int) else 0
        rank: int = known if self.order == "redis" else LEVELS - 1 - known
        return self.queues_of(address)[rank * len(self.priorities) // LEVELS][0]

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
                "the URL aztask:// names no broker; write one of aztask+local:///path/queues.db,"
                " aztask+servicebus://NAMESPACE and aztask+storagequeue://ACCOUNT, or set"
                " AZTASK_BROKER to the address or connection string"
            )
        return broker, nothing if broker is given else broker.close


def nothing(*_: object) -> None:
    """Does nothing, as the default of a callback."""


def _flag(options: Mapping[str, Any], name: str, *, default: bool) -> bool:
    value = options.get(name, default)
    if not isinstance(value, bool):
        raise ConfigurationError(f"the transport option {name} must be a bool, not {value!r}")
    return value


def _lease(value: object, name: str) -> float:
    return to_seconds(value, name, minimum=SHORTEST_LEASE)


def _leases(given: object) -> dict[str, float]:
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise ConfigurationError(
            'the transport option leases must be a dict of seconds by queue, such as {"slow": 300}'
        )
    return {name: _lease(value, f"leases[{name!r}]") for name, value in given.items()}


def _priorities(options: Mapping[str, Any]) -> tuple[dict[str, int], str]:
    """The priorities, the most urgent first, and their order. Raises ConfigurationError."""
    given, order = options.get("priorities"), options.get("order")
    if given is None and order is None:
        return {}, ""
    if given is None or order not in ORDERS:
        raise ConfigurationError(
            "the transport options priorities and order belong together: order says which number "
            'is the most urgent, "rabbitmq" (9 is) or "redis" (0 is)'
        )
    weights = check_priorities("the transport option priorities", given)
    if len(weights) > MOST_PRIORITIES:
        raise ConfigurationError(
            f"the transport option priorities has {len(weights)} entries with normal, which is the "
            f"queue itself; give at most {MOST_PRIORITIES}"
        )
    return dict(sorted(weights.items(), key=lambda each: -each[1])), order


def _names(given: object, name: str) -> frozenset[str]:
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, list | tuple | set | frozenset) or not all(
        isinstance(each, str) for each in names
    ):
        raise ConfigurationError(f"the transport option {name} must be a list of queue names")
    return frozenset(names)


def _accepted(names: object) -> frozenset[str]:
    """Content types, given as such or by the names of Kombu's serializers."""
    given = [names] if isinstance(names, str) else names
    if not isinstance(given, list | tuple | set | frozenset):
        raise ConfigurationError("the transport option accept must be a list of content types")
    types = set()
    for name in given:
        if not isinstance(name, str) or name in _DANGEROUS:
            raise ConfigurationError(
                f"the transport option accept does not take {name!r}, because reading it can run"
                " code; name it where it is read: in Celery's setting accept_content, or in accept"
                " of the kombu.Consumer"
            )
        types.add(CONTENT_TYPES.get(name, name))
    return frozenset(types)


# -- The address -----------------------------------------------------------------------------------
#
# Finds the broker's address in a Kombu connection, and reports it without secrets.
#
#     aztask+local:///var/lib/app/queues.db     aztask+servicebus://NAMESPACE
#     aztask+storagequeue://ACCOUNT             aztask://   (the address is in AZTASK_BROKER)
#
# Rules
# 1. Behind ``aztask+`` stands any URL of a broker, as in ``App(broker=...)``. A connection string
#    is no URL: it goes into AZTASK_BROKER or the transport option ``broker``.
# 2. The transport option ``broker`` is used with ``aztask://`` only; a second address is refused.
# 3. After a failover Kombu has taken the URL apart; it is put together again here.

ALIAS: Final = "aztask"
VARIABLE: Final = "AZTASK_BROKER"

_PREFIX: Final = f"{ALIAS}+"
_EMPTY: Final = f"{ALIAS}://"


def address_of(client: Any) -> str | None:
    """The address in the URL of a Kombu connection; None for ``aztask://``.

    * `client`: a `kombu.Connection`.

    Raises ConfigurationError if a name follows ``aztask://``: it does not say which service it
    belongs to.
    """
    hostname = client.hostname or ""
    if "://" in hostname:
        address = hostname.removeprefix(_PREFIX)
        if not address.startswith(_EMPTY):
            return str(address)
        if address == _EMPTY:
            return None
        name = address.removeprefix(_EMPTY)
        raise ConfigurationError(
            f"{mask(address)} does not say which service it means; write"
            f" aztask+servicebus://{mask(name)} or aztask+storagequeue://{mask(name)}"
        )
    transport = client.transport_cls
    kind = transport.removeprefix(_PREFIX) if isinstance(transport, str) else ""
    if not kind or kind == transport:
        return None
    path = (client.virtual_host or "").lstrip("/") if _has_path(kind) else ""
    name = hostname.removeprefix(_PREFIX)
    return f"{kind}://{name}/{path}" if path else f"{kind}://{name}"


def _has_path(scheme: str) -> bool:
    kind = kind_named(scheme)
    return kind is not None and kind.capabilities.path_in_url


def broker_of(client: Any, environ: Mapping[str, str]) -> Any:
    """What names the broker: the URL's address, the option ``broker``, or AZTASK_BROKER.

    Raises ConfigurationError if the URL and the option both name one.
    """
    address, given = address_of(client), client.transport_options.get("broker")
    if address is not None and given is not None and given != address:
        raise ConfigurationError(
            f"the URL names the broker {mask(address)}, and the transport option broker another"
            " one; remove the option, or write aztask:// as the URL"
        )
    if address is not None or given is not None:
        return given if address is None else address
    return environ.get(VARIABLE) or None


def shown(client: Any) -> str:
    """The URL of a connection with its secrets masked, for banners and logs."""
    hostname = client if isinstance(client, str) else client.hostname or ""
    address = hostname.removeprefix(_PREFIX)
    if "://" not in address or address.startswith(_EMPTY):
        return _EMPTY
    return f"{_PREFIX}{mask(address)}"


def results_address(url: str | None, options: Mapping[str, Any] | None) -> str | None:
    """The address of the result store of a Celery application; None if nothing names one.

    * `url`: what follows ``aztask+`` in `result_backend`, or ``aztask://``.
    * `options`: its `result_backend_transport_options`.
    """
    named = url if url and not url.startswith(f"{ALIAS}:") else None
    return (options or {}).get("results") or named or read_environment("AZTASK_RESULTS")
