"""Each role by itself: what its credential does on a queue of the run, and what it is refused.

Rules
1. `VARIABLES` names the environment variable with the credential of each role; without it, the
   role is skipped.
2. The app's credential makes and deletes the queue; the role's credential only tries.
3. A role that may do more than it needs fails the check, like one that may do less.
4. What the roles may do is read from `aztask.operate.provision.roles`. On the result table and the
   containers, `aztask.operate.verifystores` tries them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeAlias

from aztask.address.addresses import ServiceBusAddress, StorageQueueAddress
from aztask.address.connection_strings import split
from aztask.address.urls import parse_broker
from aztask.errors import AztaskError, ConfigurationError
from aztask.message.envelope import Envelope
from aztask.operate.provision.roles import IDENTITIES, QUEUES, actions_of, named, roles_of
from aztask.operate.verifybench import LOCK, Bench, Refuted, Skipped, late_module
from aztask.queues.base import Broker, Renewed

Address: TypeAlias = ServiceBusAddress | StorageQueueAddress

VARIABLES: Final = {name: f"AZTASK_VERIFY_{name.upper()}" for name in IDENTITIES}
"""The variables with credentials. Each has one of three forms:

* a connection string, whose key or signature has the permissions of the role
* ``entra:CLIENT_ID``: the managed identity of that client id, on this machine
* ``entra:TENANT_ID/CLIENT_ID/SECRET``: an application of Entra ID
"""

ENTRA: Final = "entra:"

MAY: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    service: {who: actions_of(who, service, on) for who in IDENTITIES}
    for service, on in QUEUES.items()
}
"""What `aztask azure init` lets each identity do with messages, by the scheme of the service."""

ASSIGNED: Final[Mapping[str, Mapping[str, str]]] = {
    service: {who: named(roles_of(who, service, on)) for who in IDENTITIES}
    for service, on in QUEUES.items()
}
"""The roles of Azure that say the same."""


def _send(broker: Broker, queue: str, _bench: Bench) -> None:
    broker.send(queue, [Envelope(b"of the role", message_id="of the role")])


def _receive(broker: Broker, queue: str, bench: Bench) -> None:
    """Receive, renew and complete: a worker needs all three."""
    bench.send(queue, b"of the app")
    receiver = broker.receiver(queue, lease=LOCK)
    bench.receivers.append(receiver)
    delivery = bench.one(receiver)
    (answer,) = receiver.renew([delivery])
    if not isinstance(answer, Renewed):
        raise Refuted(f"may receive, but a renewal was answered with {answer}")
    bench.complete(receiver, delivery)


def _count(broker: Broker, queue: str, _bench: Bench) -> None:
    broker.stats(queue)


def _manage(broker: Broker, _queue: str, bench: Bench) -> None:
    bench.queues.append(f"{bench.name}-made")
    broker.declare(bench.queues[-1])


ACTIONS: Final = {"send": _send, "receive": _receive, "count": _count, "manage": _manage}


def role_check(name: str) -> Callable[[Bench], str]:
    """The check of one role."""
    return partial(_role, name)


def _role(role: str, bench: Bench) -> str:
    given = os.environ.get(VARIABLES[role], "")
    if not given:
        raise Skipped(f"no credential of this role: {VARIABLES[role]} may hold it")
    address = bench.app.broker_target
    if not isinstance(address, Address):
        raise Skipped("the app was given a broker instead of an address")
    queue = bench.queue()
    broker = _broker_of(given, address)
    try:
        found = {
            action: _is_granted(partial(ACTIONS[action], broker, queue, bench))
            for action in MAY[address.scheme]["operator"]
        }
    finally:
        with suppress(AztaskError):
            broker.close()
    assigned = ASSIGNED[address.scheme][role]
    for action, granted in found.items():
        needed = action in MAY[address.scheme][role]
        if needed and not granted:
            raise Refuted(f"may not {action}, which it needs: assign it {assigned}")
        if granted and not needed:
            raise Refuted(f"may {action}, which it does not need: it has more than {assigned}")
    refused = ", ".join(action for action, granted in found.items() if not granted) or "nothing"
    return f"may {', '.join(MAY[address.scheme][role])}; was refused: {refused}"


def _is_granted(attempt: Callable[[], None]) -> bool:
    """False if the service refused it. Raises Refuted, BrokerUnavailable."""
    try:
        attempt()
    except ConfigurationError:
        return False
    return True


def _broker_of(given: str, place: Address) -> Broker:
    """A broker of the app's service with another credential. Raises ConfigurationError."""
    credential: Any = None
    address: Any = replace(place, key=None, signature=None)
    if given.startswith(ENTRA):
        access = late_module("azure.access", "identity")
        credential = access.named_credential(given.removeprefix(ENTRA))
    else:
        address = parse_broker(given)
        if type(address) is not type(place):
            raise ConfigurationError("the role's connection string is of another kind of service")
    made: Broker
    if isinstance(address, ServiceBusAddress):
        bus = late_module("queues.servicebus.broker", "servicebus").ServiceBusBroker
        made = bus(address, credential=credential, admin=_administration(address))
    else:
        storage = late_module("queues.storagequeue.broker", "storagequeue").StorageQueueBroker
        made = storage(address, credential=credential)
    return made


def _administration(address: ServiceBusAddress) -> str | None:
    """The emulator's administration with the key of this address; None for Azure."""
    known = os.environ.get("AZTASK_SERVICEBUS_ADMIN")
    if not (address.emulator and known and address.key):
        return None
    parts = {
        **split(known),
        "SharedAccessKeyName": address.key_name or "",
        "SharedAccessKey": address.key.reveal(),
    }
    return ";".join(f"{name}={value}" for name, value in parts.items())
