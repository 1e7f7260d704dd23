"""Who may do what where: the roles that ``aztask azure init`` assigns, as one table.

Rules
1. Least privilege: an identity has a role on what it needs, and none elsewhere.
2. The files of ``aztask azure init`` are written from `grants_of`, and ``aztask azure verify``
   tries what `actions_of` says. Nothing else decides who may do what.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, Literal, NamedTuple, TypeAlias

SENDER: Final = "69a216fc-b8fb-44d8-bc22-1f3c2cd27a39"
RECEIVER: Final = "4f6d3b9b-027b-4f4c-9142-0e5a2a2247e0"
BUS_OWNER: Final = "090c5cfd-751d-490a-894a-3ce6f1109419"
QUEUE_SENDER: Final = "c6a89b2d-59bc-44d0-9896-0f6e12d7b80a"
QUEUE_READER: Final = "19e7f393-937e-4f77-808e-94535e297925"
QUEUE_CONTRIBUTOR: Final = "974c5e8b-45b9-4653-ba55-5f855dd0fb88"
TABLE_CONTRIBUTOR: Final = "0a9a7e1f-b9d0-4cc4-a60d-0319b160aaa3"
BLOB_CONTRIBUTOR: Final = "ba92f5b4-2d11-453d-a403-e96b0029c9fe"
IMAGE_PULLER: Final = "7f951dda-4ed3-4680-a7ca-43fe172d538d"
QUEUE_WORKER: Final = ""
"""The role of our own, which has no id before it is made."""

ROLES: Final = {
    SENDER: "Azure Service Bus Data Sender",
    RECEIVER: "Azure Service Bus Data Receiver",
    BUS_OWNER: "Azure Service Bus Data Owner",
    QUEUE_SENDER: "Storage Queue Data Message Sender",
    QUEUE_READER: "Storage Queue Data Reader",
    QUEUE_CONTRIBUTOR: "Storage Queue Data Contributor",
    TABLE_CONTRIBUTOR: "Storage Table Data Contributor",
    BLOB_CONTRIBUTOR: "Storage Blob Data Contributor",
    IMAGE_PULLER: "AcrPull",
}
"""The roles that are built into Azure, from its documentation; read."""

IDENTITIES: Final = {
    "sender": "programs that send tasks",
    "worker": "workers",
    "operator": "operators and the dashboard",
    "scaler": "KEDA, which counts messages and gets nothing else",
}

On: TypeAlias = Literal["bus", "queues", "table", "results", "payloads", "events", "registry"]
"""What a role is assigned on: the namespace, the queues of the account, the result table, one of
the containers, the registry of images."""

QUEUES: Final[Mapping[str, On]] = {"servicebus": "bus", "storagequeue": "queues"}
CONTAINERS: Final[tuple[On, ...]] = ("results", "payloads", "events")
STORES: Final[tuple[On, ...]] = ("table", *CONTAINERS)

_ROWS: Final = ("read", "add", "update", "delete")
ACTIONS: Final[Mapping[On, tuple[str, ...]]] = {
    "bus": ("send", "receive", "manage"),
    "queues": ("send", "receive", "count", "manage"),
    "table": _ROWS,
    **dict.fromkeys(CONTAINERS, ("read", "list", "add", "update", "delete")),
}
"""What can be done there, in the order in which it is tried and shown."""

_PERMITS: Final[Mapping[str, frozenset[str]]] = {
    SENDER: frozenset({"send"}),
    RECEIVER: frozenset({"receive"}),
    BUS_OWNER: frozenset(ACTIONS["bus"]),
    QUEUE_SENDER: frozenset({"send"}),
    QUEUE_WORKER: frozenset({"send", "receive"}),
    QUEUE_READER: frozenset({"count"}),
    QUEUE_CONTRIBUTOR: frozenset(ACTIONS["queues"]),
    TABLE_CONTRIBUTOR: frozenset(ACTIONS["table"]),
    BLOB_CONTRIBUTOR: frozenset(ACTIONS["payloads"]),
}
"""The actions that each role permits, from Azure's list of their data actions; read."""


class Grant(NamedTuple):
    """One role of one identity, on one thing."""

    who: str
    role: str
    on: On


_QUEUE_GRANTS: Final[Mapping[str, tuple[Grant, ...]]] = {
    "servicebus": (
        Grant("sender", SENDER, "bus"),
        Grant("worker", RECEIVER, "bus"),
        Grant("worker", SENDER, "bus"),  # retries and snoozes go back into the queue
        Grant("operator", BUS_OWNER, "bus"),
        # counts are of the administration, which needs Manage
        Grant("scaler", BUS_OWNER, "bus"),
    ),
    "storagequeue": (
        Grant("sender", QUEUE_SENDER, "queues"),
        Grant("worker", QUEUE_WORKER, "queues"),
        Grant("operator", QUEUE_CONTRIBUTOR, "queues"),
        Grant("scaler", QUEUE_READER, "queues"),
    ),
}


def grants_of(service: str, *, events: bool) -> Iterator[Grant]:
    """All grants of an app: one for each identity, role and thing.

    * `service`: ``servicebus`` or ``storagequeue``.
    * `events`: whether it has a container for events.
    """
    containers = CONTAINERS if events else CONTAINERS[:-1]
    yield from _QUEUE_GRANTS[service]
    yield Grant("sender", BLOB_CONTRIBUTOR, "payloads")
    yield Grant("worker", TABLE_CONTRIBUTOR, "table")
    yield Grant("operator", TABLE_CONTRIBUTOR, "table")
    for name in containers:
        yield Grant("worker", BLOB_CONTRIBUTOR, name)
    yield Grant("operator", BLOB_CONTRIBUTOR, "results")
    yield Grant("operator", BLOB_CONTRIBUTOR, "payloads")
    yield Grant("worker", IMAGE_PULLER, "registry")
    yield Grant("operator", IMAGE_PULLER, "registry")
    if events:
        yield Grant("sender", BLOB_CONTRIBUTOR, "events")


def roles_of(who: str, service: str, *on: On) -> tuple[str, ...]:
    """The roles of an identity on any of these, each once."""
    found = grants_of(service, events=True)
    return tuple(dict.fromkeys(role for name, role, where in found if name == who and where in on))


def actions_of(who: str, service: str, *on: On) -> tuple[str, ...]:
    """What an identity may do there, in the order of `ACTIONS`."""
    permitted = frozenset[str]().union(*(_PERMITS[role] for role in roles_of(who, service, *on)))
    return tuple(action for action in ACTIONS[on[0]] if action in permitted)


def named(roles: tuple[str, ...]) -> str:
    """The roles as a text; "" for none."""
    own = "the role aztask worker of aztask azure init"
    return " and ".join(ROLES.get(role, own) for role in roles)
